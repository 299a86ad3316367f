"""A raw column as plain arrays: numbers with NaN, or codes into a list of levels with -1."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fedtail.data.tables.read import MISSING
from fedtail.errors import FedtailError, check_range

THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?")
DECIMAL_COMMA = re.compile(r"[-+]?(\d{1,3}(\.\d{3})+|\d*),\d+")
UNIT = re.compile(r"(?<![^-+])\s*[$€£¥]\s*(?=[\d.,])|(?<=\d)\s*[%€£¥$]$")  # before or after a number
DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})|\d{1,2}[- ][A-Za-z]{3}[- ]\d{2,4}"
    r"|[A-Za-z]{3,9} \d{1,2},? \d{4})([T ]+\d{1,2}:\d{2}(:\d{2})?([.,]\d+)?\s*([AaPp][Mm])?\s*(Z|[-+]\d{2}:?\d{2})?)?"
    r"|\d{1,2}:\d{2}(:\d{2})?(\.\d+)?"
)
LARGEST = 1e100
"""Beyond this, squares overflow: such values count as infinite."""


def names_option(key: str, value: Any) -> tuple[str, ...]:
    """A list of column names, or one string with commas; without the spaces around them, as tables are read."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise FedtailError(f"data.{key} = {value!r} must be a list of column names")
    return tuple(name.strip() for name in names if name.strip())


@dataclass(frozen=True)
class Choices:
    """What people say of a table's columns; see ``tables.pooled.table``."""

    exclude: Sequence[str] | str = ()
    categories: Sequence[str] | str = ()
    numbers: Sequence[str] | str = ()
    max_levels: int = 64
    hash_buckets: int = 64
    pieces: int | None = None

    def __post_init__(self) -> None:
        for key in ("exclude", "categories", "numbers"):
            object.__setattr__(self, key, names_option(key, getattr(self, key)))
        check_range("data.max_levels", self.max_levels, 2)
        check_range("data.hash_buckets", self.hash_buckets, 2)
        check_range("data.pieces", self.pieces or 0, 0, 256)

    def check_with_schema(self) -> None:
        """Refuse what a schema file says instead."""
        for key, default in vars(Choices()).items():
            if key != "pieces" and (value := getattr(self, key)) != default:
                raise FedtailError(
                    f"data.{key} = {value!r} has no effect beside data.schema, which says what the columns are; leave "
                    "it out, or change the schema file"
                )


@dataclass(frozen=True)
class Numbers:
    """A numeric column. Infinities have become NaN and are counted."""

    values: np.ndarray
    """(N,) float64."""
    integer: bool
    """All values are whole."""
    infinite: int = 0
    not_numbers: int = 0
    """Fields of another kind that became NaN."""
    comma: bool = False
    """Written with a decimal comma."""
    marks: tuple[float, ...] = ()
    """Values that meant "missing" and have become NaN."""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Levels:
    """A column of names."""

    codes: np.ndarray
    """(N,) int32 into ``levels``, -1 for missing."""
    levels: list[str]
    dates: bool = False
    """The source says that these are dates or times."""

    def __len__(self) -> int:
        return len(self.codes)


def parse_column(series: pd.Series[Any]) -> Numbers | Levels:
    """What pandas made of a column, as arrays. Text that is numbers is left as ``Levels``; see ``as_numbers``."""
    dtype = series.dtype
    if isinstance(dtype, pd.DatetimeTZDtype | pd.PeriodDtype) or dtype.kind in "mM":
        return Levels(np.full(len(series), -1, dtype=np.int32), [], dates=True)
    if isinstance(dtype, pd.CategoricalDtype):
        levels = [level_name(v) for v in dtype.categories]
        return _merge_levels(np.asarray(series.cat.codes, dtype=np.int32), levels)
    if pd.api.types.is_bool_dtype(dtype) or not pd.api.types.is_numeric_dtype(dtype):
        codes, uniques = pd.factorize(series, use_na_sentinel=True)
        return _merge_levels(codes.astype(np.int32), [level_name(v) for v in uniques.tolist()])
    return clean_numbers(series.to_numpy(dtype=np.float64, na_value=np.nan))


def clean_numbers(values: np.ndarray, not_numbers: int = 0, comma: bool = False) -> Numbers:
    """Infinities and values beyond 1e100 to NaN, counted. values: (N,) float64, not modified."""
    with np.errstate(invalid="ignore"):
        beyond = np.abs(values) > LARGEST
    infinite = int(beyond.sum())
    if infinite:
        values = np.where(beyond, np.nan, values)
    known = values[~np.isnan(values)]
    return Numbers(values, bool((known == np.rint(known)).all()), infinite, not_numbers, comma)


def level_name(value: Any) -> str:
    """The one spelling of a level: stripped; 1.0 and 1 are the same, and so are True and "true"."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating) and float(value).is_integer() and abs(float(value)) < 2**53:
        return str(int(value))
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    name = str(value).strip()
    return name.lower() if name.lower() in ("true", "false") else name


def _merge_levels(codes: np.ndarray, names: list[str]) -> Levels:
    """Levels whose names have become equal get one code; empty ones are missing."""
    seen: dict[str, int] = {}
    remap = np.full(len(names) + 1, -1, dtype=np.int32)
    for i, name in enumerate(names):
        if name not in MISSING:
            remap[i] = seen.setdefault(name, len(seen))
    if len(seen) == len(names):
        return Levels(codes, names)
    return Levels(remap[codes], list(seen))


def decimal_comma(levels: list[str]) -> bool:
    """Whether some level can only be read with a decimal comma: ``3,14``, but not ``1,234``."""
    return any(DECIMAL_COMMA.fullmatch(v) and not THOUSANDS.fullmatch(v) for v in (UNIT.sub("", v) for v in levels))


def level_numbers(levels: list[str], comma: bool) -> np.ndarray:
    """(L,) the number each level is written as, NaN where it is none.

    Plain and scientific notation, and ``1,234.5`` with thousands or, with ``comma``, ``3,14`` and ``1.234,5``; with a
    currency or a percent sign too, which stays out.
    """
    out = np.full(len(levels), np.nan)
    written, marks = (DECIMAL_COMMA, (",", ".", ".")) if comma else (THOUSANDS, ("", "", ","))
    for i, text in enumerate(UNIT.sub("", level) for level in levels):
        with suppress(ValueError):
            plain = text.translate(str.maketrans(*marks)) if written.fullmatch(text) else text
            out[i] = float(plain) if "_" not in plain else np.nan
    return out


def as_numbers(column: Levels, numbers: np.ndarray, comma: bool) -> Numbers:
    """A column of names read as numbers; what is none becomes missing and is counted."""
    table = np.append(numbers, np.nan)
    counts = np.bincount(column.codes[column.codes >= 0], minlength=len(numbers))
    return clean_numbers(table[column.codes], int(counts[np.isnan(numbers)].sum()), comma)


def without_marks(column: Numbers, marks: tuple[float, ...]) -> Numbers:
    """The column with the values that mean "missing" as NaN."""
    if not marks or column.marks == marks:
        return column
    return replace(column, values=np.where(np.isin(column.values, marks), np.nan, column.values), marks=marks)


def as_levels(column: Numbers) -> Levels:
    """Numbers as names, for columns declared to be categories."""
    codes, uniques = pd.factorize(column.values, use_na_sentinel=True)
    return Levels(codes.astype(np.int32), [level_name(v) for v in uniques.tolist()])


MOSTLY = 0.95
"""Share of a text column's fields that must be numbers (dates) for it to count as numbers (dates)."""
FEW, ROWS_PER_CODE = 20, 20
"""Whole numbers of at most so many different values, each in so many rows on average, count as codes."""
NINES = (99, 999, 9999, 99999, 999999)
PADDED = re.compile(r"0\d+")
ID_NAME = re.compile(r"(^|[_\W])(id|ids|uuid|guid|key|index|idx|nr|no|number|row|row name|case|serial)([_\W]|$)", re.I)


@dataclass(frozen=True)
class Kind:
    """The use made of a column."""

    name: str
    """``numeric``, ``category`` or, left out: ``date``, ``text``, ``id``, ``constant``, ``empty``."""
    data: Numbers | Levels
    note: str | None = None
    code: str = ""
    """Why numbers count as names, if they do."""

    @property
    def used(self) -> bool:
        return self.name in ("numeric", "category")


def infer_kind(name: str, column: Numbers | Levels, choices: Choices = Choices()) -> Kind:
    """Decide from all rows of the file; nothing is fitted here. ``choices.categories`` are names, whatever they look
    like; ``choices.numbers`` are not taken for codes or ids, and their values not for marks."""
    category, number = name in choices.categories, name in choices.numbers
    if isinstance(column, Numbers) and category:
        column = as_levels(column)
    if isinstance(column, Numbers):
        return _numeric(name, column, number)
    present = column.codes[column.codes >= 0]
    if column.dates:
        return Kind("date", column)
    if not len(present):
        return Kind("empty", column)
    counts = np.bincount(present, minlength=len(column.levels))
    if (counts > 0).sum() == 1 and len(present) == len(column.codes):
        return Kind("constant", column)
    if category:
        return Kind("category", column)
    if not number and any(PADDED.fullmatch(v) for v in column.levels):
        kind = _names(name, column, counts, np.full(len(column.levels), np.nan), choices.max_levels)
        return replace(kind, code="leading zeros") if kind.used else kind
    comma = decimal_comma(column.levels)
    numbers = level_numbers(column.levels, comma)
    if counts[~np.isnan(numbers)].sum() >= MOSTLY * len(present):
        kind = _numeric(name, as_numbers(column, numbers, comma), number)
        if kind.used and isinstance(kind.data, Numbers) and kind.data.not_numbers:
            note = f"{name!r}: {kind.data.not_numbers} non-numeric fields count as missing"
            return Kind("numeric", kind.data, note)
        return kind
    if number:
        raise FedtailError(
            f"data.numbers names column {name!r}, whose fields are no numbers, such as {column.levels[0]!r}; "
            "leave it out"
        )
    return _names(name, column, counts, numbers, choices.max_levels)


def _numeric(name: str, column: Numbers, number: bool = False) -> Kind:
    known = column.values[~np.isnan(column.values)]
    if not len(known):
        return Kind("empty", column)
    if len(known) == len(column.values) and known.min() == known.max():
        return Kind("constant", column)
    note = f"{name!r}: {column.infinite} infinite values count as missing" if column.infinite else None
    if number or not column.integer:
        return Kind("numeric", column, note)
    if len(known) >= 20 and _looks_like_id(name, known):
        return Kind("id", column)
    distinct, counts = np.unique(known, return_counts=True)
    if 2 < len(distinct) <= FEW and len(known) >= ROWS_PER_CODE * len(distinct):
        return Kind("category", as_levels(column), note, code=f"{len(distinct)} different whole numbers")
    return Kind("numeric", without_marks(column, missing_marks(distinct, counts)), note)


def missing_marks(distinct: np.ndarray, counts: np.ndarray) -> tuple[float, ...]:
    """Values that stand for "missing": 96 to 99, 996 to 999 and so on, where all others are below half of that; and a
    lone -1, -9, -99, -999 or -9999 under values from 0 on. A mark occurs twice or more.

    distinct: (D,) ascending; counts: (D,).
    """
    marks: list[float] = []
    for nines in NINES:
        top = (distinct > nines - 4) & (distinct <= nines)
        rest = distinct[~top]
        if top.any() and top[-1] and len(rest) > 1 and rest[-1] < nines / 2 and counts[top].sum() > 1:
            marks += distinct[top].tolist()
    if len(distinct) > 2 and distinct[0] in (-1, -9, -99, -999, -9999) and distinct[1] >= 0 and counts[0] > 1:
        marks.insert(0, float(distinct[0]))
    return tuple(marks)


def _looks_like_id(name: str, values: np.ndarray) -> bool:
    """Whole numbers, (nearly) all different, and either in file order or called an id."""
    steps = np.diff(values)
    in_order = (steps > 0).all() or (steps < 0).all()
    return bool(in_order or (ID_NAME.search(name) and len(np.unique(values)) > 0.9 * len(values)))


def _names(name: str, column: Levels, counts: np.ndarray, numbers: np.ndarray, max_levels: int) -> Kind:
    n = int(counts.sum())
    used = [level for level, c in zip(column.levels, counts, strict=True) if c]
    sample = used[:2000]
    if sum(bool(DATE.fullmatch(v)) for v in sample) >= MOSTLY * len(sample):
        return Kind("date", column)
    words = float(np.mean([len(v.split()) for v in sample]))
    length = float(np.mean([len(v) for v in sample]))
    distinct = len(used) / n
    if len(used) > max_levels and (words >= 8 or length >= 80 or (distinct > 0.5 and words >= 3)):
        return Kind("text", column)
    if n >= 20 and distinct > 0.5:
        return Kind("id", column)
    mixed = int(counts[~np.isnan(numbers)].sum())
    note = None
    if mixed and np.isnan(numbers).any() and len(used) > 20 and mixed > 0.05 * n:
        note = f"{name!r} mixes {mixed} numbers with {n - mixed} other fields; treated as a category"
    return Kind("category", column, note)
