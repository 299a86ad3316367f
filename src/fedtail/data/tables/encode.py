"""Raw columns + fitted schema -> feature matrix."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from fedtail.data.federation import Samples
from fedtail.data.tables.columns import (
    MOSTLY,
    Levels,
    Numbers,
    as_levels,
    as_numbers,
    decimal_comma,
    level_name,
    level_numbers,
    parse_column,
    without_marks,
)
from fedtail.data.tables.labels import label_codes, need_column
from fedtail.data.tables.read import Table
from fedtail.data.tables.schema import Column, TableSchema
from fedtail.errors import FedtailError
from fedtail.words import listing

ROWS = 8192
"""Rows encoded at a time: the block of the matrix stays in cache while column after column is written to it."""
MAX_BYTES = 16e9
Rows = slice | np.ndarray
Writer = Callable[[np.ndarray, Rows], None]
"""Writes some rows of a column into the part of the matrix that is the column's own."""


def encode(
    schema: TableSchema,
    columns: dict[str, Numbers | Levels],
    index: np.ndarray | None = None,
    notes: list[str] | None = None,
) -> np.ndarray:
    """(N, schema.width) float32: all rows, or those of ``index``, so that splits are never held twice.

    ``columns`` holds at least the schema's (see ``frame_columns``); levels the schema does not have go to ``notes``.
    """
    if not schema.fitted:
        raise FedtailError("the schema has no means and standard deviations yet; fit it first")
    notes = notes if notes is not None else []
    n = len(columns[schema.columns[0].name]) if index is None else len(index)
    if n * schema.width * 4 > MAX_BYTES:
        widest = sorted(schema.columns, key=lambda c: -c.width)[:3]
        raise FedtailError(
            f"{n} rows of {schema.width} features would take {n * schema.width * 4 / 1e9:.0f} GB; lower "
            f"data.max_levels or exclude wide columns ({', '.join(f'{c.name!r}: {c.width}' for c in widest)})"
        )
    writers = [_writer(c, columns[c.name], schema.clip, index, notes) for c in schema.columns]
    ends = np.cumsum([c.width for c in schema.columns])
    out = np.zeros((n, schema.width), dtype=np.float32)
    for start in range(0, n, ROWS):
        parts = np.split(out[start : start + ROWS], ends[:-1], axis=1)
        rows = slice(start, start + ROWS) if index is None else index[start : start + ROWS]
        for part, write in zip(parts, writers, strict=True):
            write(part, rows)
    return out


@dataclass
class SiteTable:
    """Rows in the kinds of an agreed schema. Those of a site stay there."""

    name: str
    columns: dict[str, Numbers | Levels]
    y: np.ndarray
    """(N,) class of each row."""
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.y)


def labelled(source: Table, schema: TableSchema, where: str) -> SiteTable:
    """A table's rows under a schema; those without a label leave the table, which is noted."""
    need_column("label", schema.label, list(source.frame.columns), where)
    y, _ = label_codes(source.frame[schema.label], schema.label, where, schema.classes)
    notes, known = list(source.notes), {schema.label, schema.site, *schema.left_out, *(c.name for c in schema.columns)}
    if extra := [repr(name) for name in source.frame.columns if name not in known]:
        notes.append(f"ignored, since the schema does not have it: column {listing(extra)}")
    if (y < 0).any():
        notes.append(f"{int((y < 0).sum()):,} of {len(y):,} rows left out: no {schema.label}")
        source.frame, y = source.frame[y >= 0], y[y >= 0]
    return SiteTable(source.name, frame_columns(schema, source.frame, where), y, notes)


def encode_site(site: SiteTable, fitted: TableSchema, index: np.ndarray | None = None) -> Samples:
    """Model input of a site's rows under the fitted schema; levels it does not list go to ``site.notes``."""
    y = site.y if index is None else site.y[index]
    return Samples(torch.from_numpy(encode(fitted, site.columns, index, site.notes)), torch.from_numpy(y))


def frame_columns(schema: TableSchema, frame: pd.DataFrame, where: str = "the table") -> dict[str, Numbers | Levels]:
    """The schema's columns of a DataFrame, as arrays of the declared kind; extra columns are ignored."""
    if schema.strict:
        return strict_columns(schema, frame, where)
    if absent := [repr(c.name) for c in schema.columns if c.name not in frame.columns]:
        what, has = "column" if len(absent) == 1 else "columns", listing(repr(str(c)) for c in frame.columns)
        raise FedtailError(f"{where} lacks {what} {listing(absent)} (it has {has})")
    return {c.name: coerce(c, parse_column(frame[c.name]), where) for c in schema.columns}


def coerce(column: Column, data: Numbers | Levels, where: str) -> Numbers | Levels:
    """Data of a column as its declared kind; a numeric column may hold a few fields that are no numbers."""
    if column.kind != "numeric":
        return as_levels(data) if isinstance(data, Numbers) else data
    if isinstance(data, Numbers):
        return without_marks(data, column.marks)
    if data.dates:
        raise FedtailError(f"{where}: column {column.name!r} contains dates, but the schema says numbers")
    read = level_numbers(data.levels, column.comma)
    numbers = as_numbers(data, read, column.comma)
    known = int((data.codes >= 0).sum())
    if numbers.not_numbers > (1 - MOSTLY) * known and numbers.not_numbers > 1:
        strange = next(v for v, x in zip(data.levels, read, strict=True) if np.isnan(x))
        raise FedtailError(
            f"{where}: column {column.name!r} should be numbers, but {numbers.not_numbers} of {known} fields are not "
            f"(first: {strange[:40]!r})"
        )
    return without_marks(numbers, column.marks)


def hash_bucket(level: str, buckets: int) -> int:
    """The bucket of a level: the same on every machine and in every version."""
    return zlib.crc32(level.encode("utf-8")) % buckets


def _writer(
    column: Column, data: Numbers | Levels, clip: float | None, index: np.ndarray | None, notes: list[str]
) -> Writer:
    if isinstance(data, Numbers):
        return _number_writer(data.values, column, clip)
    codes = data.codes
    target = _targets(column, data.levels)
    _report_unseen(column, data.levels, codes if index is None else codes[index], target, notes)

    def write(part: np.ndarray, rows: Rows) -> None:
        to = target[codes[rows]]
        hit = np.flatnonzero(to >= 0)
        part[hit, to[hit]] = 1.0

    return write


def _number_writer(values: np.ndarray, column: Column, clip: float | None) -> Writer:
    assert column.mean is not None and column.std is not None
    mean, std, missing, end = column.mean, column.std, column.missing, 1 + column.pieces
    low, length = np.array(column.cuts[:-1]), np.diff(np.array(column.cuts))

    def write(part: np.ndarray, rows: Rows) -> None:
        given = values[rows]
        scaled = (given - mean) / std
        gone = np.isnan(scaled)
        scaled[gone] = 0.0
        part[:, 0] = scaled if clip is None else np.clip(scaled, -clip, clip)
        if end > 1:
            along = (np.where(gone, low[0], given)[:, None] - low) / length
            part[:, 1:end] = np.clip(along, 0.0, 1.0, out=along)
        if missing:
            part[:, end] = gone

    return write


def _targets(column: Column, levels: list[str]) -> np.ndarray:
    """(L + 1,) feature of each level, -1 for none; the last entry serves the code -1 (missing)."""
    if column.kind == "hashed":
        own = [hash_bucket(v, column.buckets) for v in levels]
    else:
        place = {v: i for i, v in enumerate(column.levels)}
        own = [place.get(v, place.get(_plain(v), -1)) for v in levels]
    return np.array([*own, column.width - 1 if column.missing else -1], dtype=np.int64)


def _plain(level: str) -> str:
    """``1.0`` and ``1,000`` as ``1`` and ``1000``: codes are text where a column is known to be one, else numbers."""
    number = float(level_numbers([level], decimal_comma([level]))[0])
    return level if np.isnan(number) else level_name(number)


def _report_unseen(column: Column, levels: list[str], codes: np.ndarray, target: np.ndarray, notes: list[str]) -> None:
    counts = np.bincount(codes[codes >= 0], minlength=len(levels))
    unseen = np.flatnonzero((target[:-1] < 0) & (counts > 0))
    if len(unseen):
        notes.append(
            f"{column.name!r}: {counts[unseen].sum()} rows have levels missing from the schema "
            f"({listing((repr(levels[i]) for i in unseen), 3)}); they were encoded as none of its levels"
        )


def published(
    label: str, classes: Sequence[str], numeric: Sequence[str], vocabulary: Mapping[str, Sequence[str]]
) -> TableSchema:
    """Return the schema of numeric columns, then one-hot columns over a fixed vocabulary."""
    numbers = [Column(name, "numeric") for name in numeric]
    names = [Column(name, "category", tuple(levels)) for name, levels in vocabulary.items()]
    return TableSchema(label, tuple(classes), (*numbers, *names), clip=None, strict=True)


def strict_columns(schema: TableSchema, frame: pd.DataFrame, where: str) -> dict[str, Numbers | Levels]:
    """Return the columns as arrays; a value that is no number or stands outside the vocabulary is an error."""
    if missing := [c.name for c in schema.columns if c.name not in frame]:
        raise FedtailError(f"{where} has no column {missing[0]!r}; is it the official file with its header?")
    out: dict[str, Numbers | Levels] = {}
    for column in schema.columns:
        series = frame[column.name]
        if column.kind == "numeric":
            # single precision, as such tables have always been stored
            values = pd.to_numeric(series, errors="coerce").to_numpy(dtype=np.float64).astype(np.float32)
            if not np.isfinite(values).all():
                row = int(np.flatnonzero(~np.isfinite(values))[0])
                told = f"{where}: {column.name} = {series.iloc[row]!r}"
                raise FedtailError(f"{told} in data row {row + 1} is not a number")
            out[column.name] = Numbers(values.astype(np.float64), False)
        else:
            codes = pd.Index(column.levels).get_indexer(pd.Index(series)).astype(np.int32)
            if (codes < 0).any():
                value = series.iloc[int(np.flatnonzero(codes < 0)[0])]
                count = len(column.levels)
                raise FedtailError(f"{where}: {column.name} = {value!r} is not one of the {count} published values")
            out[column.name] = Levels(codes, list(column.levels))
    return out


def from_layout(raw: Mapping[str, Any]) -> TableSchema:
    """Return the schema of a layout in a run folder of version 0.2 or older, which named neither label nor classes."""
    return with_scale(published("label", ("0", "1"), raw["numeric"], raw["vocabulary"]), raw["shift"], raw["scale"])


def with_scale(schema: TableSchema, shift: Sequence[float] | np.ndarray, scale: Any) -> TableSchema:
    return schema.with_numeric(
        replace(c, mean=float(m), std=float(s)) for c, m, s in zip(schema.numeric, shift, scale, strict=True)
    )
