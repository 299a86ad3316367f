"""A table file as bytes: compression, encoding, delimiter, header, and whether its rows are all of one length.

Everything here is checked before pandas sees the file, since pandas silently fills short rows and takes long ones
for an index.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np

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
    ragged: tuple[tuple[int, int], ...]
    """(line, fields) of rows whose length is not ``n_fields``; the first 1,000."""
    n_rows: int
    """Data rows, ragged ones included."""
    notes: tuple[str, ...]


def open_bytes(path: Path) -> IO[bytes]:
    """The file's content, decompressed by its suffix."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".gz":
            return cast(IO[bytes], gzip.open(path, "rb"))
        if suffix == ".xz":
            return lzma.open(path, "rb")
        if suffix == ".bz2":
            return bz2.open(path, "rb")
        if suffix == ".zip":
            return _open_zip(path)
        return path.open("rb")
    except FileNotFoundError:
        raise FedtailError(f"table {str(path)!r} does not exist") from None
    except IsADirectoryError:
        raise FedtailError(f"{str(path)!r} is a folder, not a table; for one file per site, use --tables") from None
    except (*BROKEN, RuntimeError) as error:
        raise broken(path, error) from error


def _open_zip(path: Path) -> IO[bytes]:
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
        raise FedtailError(f"{str(path)!r} is not readable as {encoding or 'text'}: {error}") from error


def _inspect(path: Path, delimiter: str | None, encoding: str | None) -> Source:
    notes: list[str] = []
    with open_bytes(path) as file:
        binary = b"\0" in file.read(BLOCK) and not (encoding or detect_encoding(path)[0]).lower().startswith("utf")
    encoding, note = (encoding, None) if encoding else detect_encoding(path)
    if note:
        notes.append(note)
    first = _first_line(path, encoding)
    if not first.strip():
        raise FedtailError(f"{str(path)!r} is empty; a table needs a header line and rows")
    if binary or "\0" in first:
        raise FedtailError(f"{str(path)!r} is not a text table; use CSV, TSV or Parquet")
    if first.strip().strip('"').lower().startswith("sep="):
        raise FedtailError(f"{str(path)!r} begins with the line {first.strip()!r}, meant for Excel; delete that line")
    if delimiter is None:
        delimiter = _guess_delimiter(first)
    elif len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
        raise FedtailError(f"delimiter = {delimiter!r} must be one plain character, such as ',' or ';'")
    counts = _count_fields(path, encoding, delimiter)
    header = tuple(name.strip() for name in next(records(path, encoding, delimiter))[1])
    if len(counts) <= 1:
        raise FedtailError(f"{str(path)!r} has a header ({len(header)} columns) but no rows")
    body = counts[1:]
    n_fields = len(header)
    if not (body == n_fields).any() and (body == n_fields + 1).all():
        n_fields += 1  # R's row names, or a delimiter at the end of every row; the reader settles which
    ragged: tuple[tuple[int, int], ...] = ()
    if counts[0] != len(header) or (body != n_fields).any():
        ragged = _ragged(path, encoding, delimiter, n_fields)
    return Source(path, encoding, delimiter, header, n_fields, ragged, len(body), tuple(notes))


def detect_encoding(path: Path) -> tuple[str, str | None]:
    """(encoding, note): by byte-order mark, else UTF-8, else Windows-1252 or Latin-1 with a note."""
    with open_bytes(path) as file:
        start = file.read(4)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16", "read as UTF-16"
    if start[:3] == b"\xef\xbb\xbf":
        return "utf-8-sig", None
    undefined = False
    for name in ("utf-8", "cp1252"):
        try:
            with open_bytes(path) as raw, io.TextIOWrapper(raw, encoding=name, newline="") as text:
                while text.read(BLOCK):
                    pass
        except UnicodeDecodeError:
            undefined = name == "cp1252"
            continue
        return name, None if name == "utf-8" else "not UTF-8: read as Windows-1252 (set data.encoding to change it)"
    assert undefined
    return "latin-1", "not UTF-8: read as Latin-1 (set data.encoding to change it)"


def _first_line(path: Path, encoding: str) -> str:
    with open_bytes(path) as raw, io.TextIOWrapper(raw, encoding=encoding) as text:
        for line in iter(lambda: text.readline(MAX_FIELD), ""):
            if line.strip("\r\n"):
                return line
    return ""


def _guess_delimiter(line: str) -> str:
    bare = "".join(line.split('"')[::2])
    return max(DELIMITERS, key=lambda d: (bare.count(d), -DELIMITERS.index(d)))


def _blocks(path: Path, encoding: str) -> Iterator[bytes]:
    """The file in blocks, with line ends as a single newline. Only ASCII-compatible bytes matter to the caller."""
    with open_bytes(path) as raw:
        if encoding == "utf-16":
            with io.TextIOWrapper(raw, encoding=encoding) as text:
                yield from (part.encode() for part in iter(lambda: text.read(BLOCK), ""))
            return
        held = b""
        for part in iter(lambda: raw.read(BLOCK), b""):
            block = held + part
            held = b"\r" if block.endswith(b"\r") else b""
            block = block[:-1] if held else block
            if b"\r" in block:
                block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            yield block
        if held:
            yield b"\n"


def _count_fields(path: Path, encoding: str, delimiter: str) -> np.ndarray:
    """(rows,) fields of every non-empty row, header included; a row may span lines inside quotes.

    Vectorized: a byte is outside quotes where the number of quotes before it is even, which holds for doubled
    quotes too. Stray quotes inside a field break this; the counts then differ and ``_ragged`` decides.
    """
    mark, quote, newline = delimiter.encode("utf-8")[0], ord('"'), ord("\n")
    out: list[np.ndarray] = []
    inside, fields, length = np.uint8(0), 1, 0
    for block in _blocks(path, encoding):
        data = np.frombuffer(block, dtype=np.uint8)
        if not data.size:
            continue
        ends, marks = data == newline, data == mark
        if b'"' in block or inside:
            parity = np.bitwise_xor.accumulate((data == quote).astype(np.uint8)) ^ inside
            inside = parity[-1]
            ends, marks = ends & (parity == 0), marks & (parity == 0)
        at = np.flatnonzero(ends)
        if not at.size:
            fields, length = fields + int(marks.sum()), length + data.size
            continue
        # Positions fit 32 bits within a block; a running sum of the marks gives the fields between two line ends.
        running = np.cumsum(marks, dtype=np.int32)[at]
        counts = np.diff(running, prepend=np.int32(0)) + 1
        lengths = np.diff(at, prepend=-1) - 1
        counts[0] += fields - 1
        lengths[0] += length
        out.append(counts[lengths > 0])
        fields = int(marks[at[-1] + 1 :].sum()) + 1
        length = data.size - 1 - int(at[-1])
    if length:
        out.append(np.array([fields], dtype=np.int32))
    return np.concatenate(out) if out else np.empty(0, dtype=np.int32)


def has_padded_fields(source: Source) -> bool:
    """Whether some field seems to begin with a zero and another digit: a quick look, wrong now and then."""
    before = np.frombuffer(f'{source.delimiter}\n" '.encode(), dtype=np.uint8)
    opens = np.zeros(256, dtype=bool)
    opens[before] = True
    for block in _blocks(source.path, source.encoding):
        data = np.frombuffer(block, dtype=np.uint8)
        zero = np.flatnonzero(data[1:-1] == ord("0")) + 1
        after = data[zero + 1]
        if (opens[data[zero - 1]] & (after >= ord("0")) & (after <= ord("9"))).any():
            return True
    return False


def records(path: Path, encoding: str, delimiter: str) -> Generator[tuple[int, list[str]], None, None]:
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


def _ragged(path: Path, encoding: str, delimiter: str, n_fields: int, most: int = 1000) -> tuple[tuple[int, int], ...]:
    rows = records(path, encoding, delimiter)
    next(rows)
    out: list[tuple[int, int]] = []
    for line, row in rows:
        if len(row) != n_fields:
            out.append((line, len(row)))
            if len(out) == most:
                break
    return tuple(out)
