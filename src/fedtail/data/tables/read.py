"""Read a table: CSV, TSV or Parquet, plain or compressed, with every repair stated."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fedtail.data.tables.source import COMPRESSED, Source, broken, has_padded_fields, inspect_source, open_bytes
from fedtail.errors import FedtailError
from fedtail.words import listing

_WORDS = "? NA N/A n/a <NA> #N/A #NA NaN nan -nan -NaN 1.#QNAN -1.#IND NULL null None NONE none"
MISSING = ("", *_WORDS.split())
"""Fields that mean "no value", except in label and site columns, where only the empty field does."""
PARQUET = (".parquet", ".pq")
TABLES = (".csv", ".tsv", ".tab", ".txt", *PARQUET)
_OTHER = ".xlsx .xls .ods .json .jsonl .xml .html .sav .dta .sas7bdat .rds .rda .rdata .pkl .feather .sqlite"
OTHER = tuple(_OTHER.split())
"""Files that people have tables in and that are not read."""


@dataclass
class Table:
    """A table in memory, and what was repaired on the way."""

    frame: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    name: str = "table"


def read_table(
    path: str | Path,
    *,
    text: Collection[str] = (),
    plain: Collection[str] = (),
    delimiter: str | None = None,
    encoding: str | None = None,
) -> Table:
    """Read a file into a DataFrame with unique, non-empty column names.

    ``text`` columns are read as they are written (``01`` stays ``01``); ``plain`` ones too, and in them only the
    empty field is missing (labels and sites may be called "NA" or "None"). Rows with too many or too few fields
    are an error.
    """
    path = Path(path)
    if (suffix := path.suffix.lower()) in OTHER:
        raise FedtailError(f"{str(path)!r} is a {suffix} file, which is not read; save it as CSV and use that file")
    if suffix in PARQUET:
        return _read_parquet(path)
    source = inspect_source(path, delimiter=delimiter, encoding=encoding)
    notes = list(source.notes)
    names = column_names(source, notes)
    options: dict[str, Any] = {
        "names": names,
        "skipinitialspace": True,
        "low_memory": False,
        "dtype": {n: str for n in names if n in text or n in plain},
        "keep_default_na": False,
        "na_values": {n: [""] if n in plain else list(MISSING) for n in names},
    }
    try:
        frame = _parsed(source, options)
        padded = _padded_codes(source, frame, options)
        frame[padded.columns] = padded
    except (pd.errors.ParserError, pd.errors.EmptyDataError, ValueError, OverflowError) as error:
        raise FedtailError(f"{str(path)!r} cannot be parsed: {_one_line(error)}") from error
    except (OSError, EOFError) as error:
        raise broken(path, error) from error
    if frame.empty:
        raise FedtailError(f"{str(path)!r} has a header ({len(names)} columns) but no rows")
    return Table(frame, notes, table_name(path))


def _parsed(source: Source, options: dict[str, Any]) -> pd.DataFrame:
    """The table as pandas reads it, whose rows must all be of the right length.

    pandas takes the surplus of a first row for an index, stops at a later row that is too long, and fills up one that
    is too short: only where the last column has gaps can there be one.
    """
    if len(next(source.records())[1]) != source.n_fields:
        raise _ragged_error(source)
    with open_bytes(source.path) as raw:
        try:
            frame = pd.read_csv(raw, header=0, sep=source.delimiter, encoding=source.encoding, **options)
        except pd.errors.ParserError:
            if source.ragged(1):
                raise _ragged_error(source) from None
            raise
    if (frame.empty or frame.iloc[:, -1].hasnans) and source.ragged(1):
        raise _ragged_error(source)
    return frame


def _ragged_error(source: Source) -> FedtailError:
    ragged = source.ragged()
    line, fields = ragged[0]
    count = f"{len(ragged)} rows" if len(ragged) < 1000 else "1,000 rows or more"
    return FedtailError(
        f"{str(source.path)!r}, line {line}: {fields} fields where the header has {source.n_fields} ({count} like "
        f"this); quote fields that contain {source.delimiter!r}, or mend or drop such rows"
    )


def is_table(path: str | Path) -> bool:
    """Whether a file name is that of a table."""
    suffixes = [s.lower() for s in Path(path).suffixes[-2:]]
    return any(s in TABLES for s in suffixes)


def is_saved(path: str | Path) -> bool:
    """Whether a folder was written by ``save_to_disk`` of a Hugging Face data set."""
    return any(Path(path, f"dataset_{what}.json").is_file() for what in ("info", "dict"))


def table_name(path: Path) -> str:
    """The file's name without the suffixes a table has."""
    name = path.name
    while (suffix := Path(name).suffix.lower()) in (*COMPRESSED, *TABLES, ".data"):
        name = name[: -len(suffix)]
    return name or path.name


def column_names(source: Source, notes: list[str]) -> list[str]:
    """Unique, non-empty names of the columns; what had to be changed goes into ``notes``."""
    header = list(source.header)
    if source.n_fields == len(header) + 1:
        if not next(source.records())[1][-1].strip():
            notes.append("every row ends with a delimiter; the empty last field was left out")
            header.append("(after the last delimiter)")
        else:
            notes.append("rows have one field more than the header; the first was used as row names")
            header.insert(0, "(row name)")
    named, renamed = unique_names(header)
    notes += renamed
    if all(re.fullmatch(r"[-+]?[\d.]+", n) for n in source.header):
        notes.append("warning: all column names are numbers; is the header line missing?")
    return named


def unique_names(header: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names made unique and non-empty, and a note of those that changed."""
    out: list[str] = []
    changed: list[str] = []
    taken = set(header)
    for i, name in enumerate(header):
        new, k = name or f"column {i + 1}", 2
        while new in out or (new != name and new in taken):
            new, k = f"{name or f'column {i + 1}'} ({k})", k + 1
        if new != name:
            changed.append(f"{name or 'no name'!r} to {new!r}")
        out.append(new)
    return out, [f"columns renamed: {listing(changed)}"] if changed else []


def _read_parquet(path: Path) -> Table:
    if not path.is_file():
        raise FedtailError(f"table {str(path)!r} does not exist")
    try:
        frame = pd.read_parquet(path)
    except ImportError:
        raise FedtailError("reading Parquet needs pyarrow: pip install 'fedtail[parquet]'") from None
    except Exception as error:  # pyarrow raises its own kinds, depending on what is wrong inside the file
        raise FedtailError(f"{str(path)!r} is not a readable Parquet file: {_one_line(error)}") from error
    if isinstance(frame.index, pd.MultiIndex) or frame.index.name is not None:
        frame = frame.reset_index()
    return from_frame(frame, table_name(path))


def from_frame(frame: pd.DataFrame, name: str = "table") -> Table:
    """A DataFrame as a table: names made strings and unique."""
    if frame.empty:
        raise FedtailError(f"{name!r} has {frame.shape[1]} columns and {frame.shape[0]} rows; a table needs both")
    names, notes = unique_names([str(c).strip() for c in frame.columns])
    return Table(frame.set_axis(names, axis=1), notes, name)


def _padded_codes(source: Source, frame: pd.DataFrame, options: dict[str, Any]) -> pd.DataFrame:
    """The columns that were read as numbers though fields are padded with zeros (``0042``), read as text."""
    whole = [n for n in frame.select_dtypes("number") if (frame[n].dropna() % 1 == 0).all()]
    if not whole or not has_padded_fields(source):
        return frame[[]]
    text = {**options, "usecols": whole, "dtype": str}
    text["na_values"] = {n: v for n, v in options["na_values"].items() if n in whole}
    with open_bytes(source.path) as raw:
        fields = pd.read_csv(raw, header=0, sep=source.delimiter, encoding=source.encoding, **text)
    padded = [n for n in whole if fields[n].str.fullmatch(r"\s*0\d+\s*").any()]
    return fields[padded]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
