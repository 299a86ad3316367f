"""A table file as bytes: compression, encoding, delimiter, header, and which rows are too long or too short."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from fedtail.errors import FedtailError

BLOCK = 1 << 22
DELIMITERS = (",", "\t", ";", "|")
MAX_FIELD = 1 << 24
COMPRESSED = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zip": "zip"}
BROKEN = (EOFError, OSError, lzma.LZMAError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Source:
    """What must be known of a text table before it is parsed."""

    path: Path
    encoding: str
    delimiter: str
    header: tuple[str, ...]
    """Column names as written, stripped; may repeat or be empty."""
    n_fields: int
    """Fields of a data row."""
    notes: tuple[str, ...]

    def records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield (line, fields) of every data row that is not empty, by the csv module: slow and exact."""
        return islice(_records(self.path, self.encoding, self.delimiter), 1, None)

    def ragged(self, most: int = 1000) -> list[tuple[int, int]]:
        """(line, fields) of the first rows whose length is not ``n_fields``."""
        return list(islice(((n, len(row)) for n, row in self.records() if len(row) != self.n_fields), most))


def open_bytes(path: Path) -> IO[bytes]:
    """The file's content, decompressed by its suffix."""
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zip": _open_zip}
    try:
        return cast(IO[bytes], openers.get(path.suffix.lower(), Path.open)(path, "rb"))
    except FileNotFoundError:
        raise FedtailError(f"table {str(path)!r} does not exist") from None
    except IsADirectoryError:
        raise FedtailError(f"{str(path)!r} is a folder, not a table; for one file per site, use --tables") from None
    except (*BROKEN, RuntimeError) as error:
        raise broken(path, error) from error


def _open_zip(path: Path, mode: str) -> IO[bytes]:
    archive = zipfile.ZipFile(path)
    names = [n for n in archive.namelist() if not n.endswith("/") and not n.startswith("__MACOSX/")]
    if len(names) != 1:
        raise FedtailError(f"{str(path)!r} contains {len(names)} files; a zipped table must contain exactly one")
    return archive.open(names[0])


def broken(path: Path, error: Exception) -> FedtailError:
    """The error for a file that cannot be read to its end."""
    kind = COMPRESSED.get(path.suffix.lower())
    what = f"is not a complete {kind} file" if kind else "cannot be read"
    return FedtailError(f"{str(path)!r} {what} ({error or type(error).__name__}); copy or download it again")


def inspect_source(path: Path, *, delimiter: str | None = None, encoding: str | None = None) -> Source:
    """Read the file once and learn all that parsing needs. Raises for what is no table at all."""
    try:
        return _inspect(path, delimiter, encoding)
    except BROKEN as error:
        raise broken(path, error) from error
    except (LookupError, UnicodeError) as error:
        wrong = f"{str(path)!r} is not readable as {encoding or 'text'}: {error}"
        fix = "give another data.encoding, such as cp1252, or leave it out" if encoding else "save it as UTF-8"
        raise FedtailError(f"{wrong}; {fix}") from error


def _inspect(path: Path, delimiter: str | None, encoding: str | None) -> Source:
    encoding, note = (encoding, "") if encoding else detect_encoding(path)
    with open_bytes(path) as file:
        binary = b"\0" in file.read(BLOCK) and not encoding.lower().startswith("utf")
    with open_bytes(path) as raw, io.TextIOWrapper(raw, encoding=encoding) as text:
        lines = iter(lambda: text.readline(MAX_FIELD), "")
        first = next((line for line in lines if line.strip("\r\n")), "")
    if not first.strip():
        raise FedtailError(f"{str(path)!r} is empty; a table needs a header line and rows")
    if binary or "\0" in first:
        raise FedtailError(f"{str(path)!r} is not a text table; use CSV, TSV or Parquet")
    if first.strip().strip('"').lower().startswith("sep="):
        raise FedtailError(f"{str(path)!r} begins with the line {first.strip()!r}, meant for Excel; delete that line")
    if delimiter is None:
        bare = "".join(first.split('"')[::2])
        delimiter = max(DELIMITERS, key=bare.count)
    elif len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
        raise FedtailError(f"delimiter = {delimiter!r} must be one plain character, such as ',' or ';'")
    rows = _records(path, encoding, delimiter)
    header = tuple(name.strip() for name in next(rows)[1])
    row = next(rows, (0, None))[1]
    if row is None:
        raise FedtailError(f"{str(path)!r} has a header ({len(header)} columns) but no rows")
    source = Source(path, encoding, delimiter, header, len(header), (note,) if note else ())
    if len(row) == len(header) + 1:  # R's row names, or a delimiter at the end of every row; the reader settles which
        longer = replace(source, n_fields=len(row))
        return source if longer.ragged(1) else longer
    return source


def detect_encoding(path: Path) -> tuple[str, str]:
    """(encoding, note): by byte-order mark, else UTF-8, else Windows-1252 or Latin-1 with a note."""
    with open_bytes(path) as file:
        start = file.read(4)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16", "read as UTF-16"
    if start[:3] == b"\xef\xbb\xbf":
        return "utf-8-sig", ""
    for name, note in (("utf-8", ""), ("cp1252", "not UTF-8: read as Windows-1252 (set data.encoding to change it)")):
        try:
            with open_bytes(path) as raw, io.TextIOWrapper(raw, encoding=name, newline="") as text:
                while text.read(BLOCK):
                    pass
        except UnicodeDecodeError:
            continue
        return name, note
    return "latin-1", "not UTF-8: read as Latin-1 (set data.encoding to change it)"


def has_padded_fields(source: Source) -> bool:
    """Whether some field seems to begin with a zero and another digit: a quick look, wrong now and then."""
    padded = re.compile(rf'[{re.escape(source.delimiter)}\s"]0\d|^0\d')
    with open_bytes(source.path) as raw, io.TextIOWrapper(raw, encoding=source.encoding) as text:
        return any(padded.search(line) for line in text)


def _records(path: Path, encoding: str, delimiter: str) -> Generator[tuple[int, list[str]], None, None]:
    """(line, fields) of every non-empty row, by the csv module: slow and exact."""
    csv.field_size_limit(MAX_FIELD)
    with open_bytes(path) as raw, io.TextIOWrapper(raw, encoding=encoding, newline="") as text:
        rows = csv.reader(text, delimiter=delimiter)
        try:
            for row in rows:
                if row:
                    yield rows.line_num, row
        except csv.Error as error:
            raise FedtailError(f"{str(path)!r}, line {rows.line_num}: {error}") from error
