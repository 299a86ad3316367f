"""Scaling without pooling: sites send counts and sums, the server merges them, nobody sends a row.

Pure functions, so that the simulator and a site of a real federation call the same code. A site's message is one
(columns, 4) array; what it reveals is, per numeric column, how many values there are and are missing, their mean
and their spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedtail.core.robust import capped, fair_share
from fedtail.data.tables.schema import TableSchema
from fedtail.errors import FedtailError

COUNT, MISSING, MEAN, M2 = range(4)
"""Columns of a moments array: values, missing values, mean, sum of squared deviations from the mean."""
WIDE, HUGE = 10.0, 1e150
"""How many times the usual deviation a site's mean may be away, and its deviation be; and no number is larger."""


def column_moments(values: np.ndarray, *, min_count: int = 1) -> np.ndarray:
    """(4,) moments of one column. values: (N,) with NaN for missing.

    With fewer than ``min_count`` values only the number of missing ones is told: the mean of one row is that row.
    """
    known = values[~np.isnan(values)]
    out = np.zeros(4)
    out[MISSING] = len(values) - len(known)
    if len(known) >= max(min_count, 1):
        mean = known.mean()
        out[COUNT], out[MEAN], out[M2] = len(known), mean, ((known - mean) ** 2).sum()
    return out


def merge_moments(sites: Sequence[np.ndarray]) -> np.ndarray:
    """(columns, 4) moments of all sites together. sites: each (columns, 4), in any order.

    Chan's rule on counts, means and squared deviations: sums of raw squares would lose every digit of the variance
    of, say, a time stamp. Sorted by content first, so that the order of arrival cannot change a bit.
    """
    if not sites:
        raise FedtailError("no site sent any moments")
    arrays = sorted((np.asarray(s, dtype=np.float64) for s in sites), key=lambda a: a.tobytes())
    shape = arrays[0].shape
    total = np.zeros(shape)
    for part in arrays:
        if part.shape != shape or part.ndim != 2 or shape[1] != 4:
            raise FedtailError(f"moments have shape {part.shape}, expected (columns, 4); do all sites use one schema?")
        if not np.isfinite(part).all() or (part[:, [COUNT, MISSING, M2]] < 0).any():
            raise FedtailError("a site sent moments that are negative or not finite")
        n = total[:, COUNT] + part[:, COUNT]
        safe = np.maximum(n, 1.0)
        delta = part[:, MEAN] - total[:, MEAN]
        total[:, M2] += part[:, M2] + delta**2 * total[:, COUNT] * part[:, COUNT] / safe
        total[:, MEAN] += delta * part[:, COUNT] / safe
        total[:, COUNT] = n
        total[:, MISSING] += part[:, MISSING]
    return total


def check_moments(part: np.ndarray, columns: int, most: float) -> None:
    """``FedtailError`` unless these can be one site's moments: whole counts up to ``most``, finite, none negative."""
    if part.shape != (columns, 4):
        raise FedtailError(f"moments have shape {part.shape}, expected ({columns}, 4); do all sites use one schema?")
    counts = part[:, [COUNT, MISSING]]
    if not np.isfinite(part).all() or (part[:, [COUNT, MISSING, M2]] < 0).any() or np.abs(part).max(initial=0) > HUGE:
        raise FedtailError("a site sent moments that are negative or not finite")
    if (counts != np.floor(counts)).any() or counts.sum(axis=1).max(initial=0) > most:
        raise FedtailError(f"a site sent moments for more than {most:g} rows, or for a fraction of a row")


def tempered(sites: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Moments of sites that may be hostile: none counts for more than a fair share of a column's values, none is
    farther than ``WIDE`` median deviations from the median mean, no deviation is more than so many median ones. Without
    at least three sites that have values, or where most do not vary, there is nothing to compare with."""
    out = [np.array(part, dtype=np.float64) for part in sites]
    for c in range(len(out[0]) if out else 0):
        there = [k for k, part in enumerate(out) if part[c, COUNT] > 0]
        if len(there) < 3:
            continue
        rows = np.array([out[k][c] for k in there])
        deviation = np.sqrt(rows[:, M2] / rows[:, COUNT])
        usual, middle = float(np.median(deviation)), float(np.median(rows[:, MEAN]))
        spread = max(usual, float(np.median(np.abs(rows[:, MEAN] - middle))))
        rows[:, COUNT] = np.floor(capped(rows[:, COUNT], fair_share(len(there)))).clip(1)
        if spread > 0:
            rows[:, MEAN] = rows[:, MEAN].clip(middle - WIDE * spread, middle + WIDE * spread)
        rows[:, M2] = (deviation.clip(0, WIDE * usual) if usual > 0 else deviation) ** 2 * rows[:, COUNT]
        for k, row, before in zip(there, rows, [out[k][c] for k in there], strict=True):
            if row[COUNT] < before[COUNT] or row[MEAN] != before[MEAN] or not np.isclose(row[M2], before[M2]):
                out[k][c] = row
    return out


def fit_schema(schema: TableSchema, moments: np.ndarray) -> TableSchema:
    """The schema with mean, deviation and missing indicator of every numeric column. moments: (columns, 4)."""
    numeric = schema.numeric
    if moments.shape != (len(numeric), 4):
        raise FedtailError(f"moments have shape {moments.shape}, the schema has {len(numeric)} numeric columns")
    rows = {c.name: row for c, row in zip(numeric, moments, strict=True)}
    columns = []
    for column in schema.columns:
        if column.kind == "numeric":
            count, missing, mean, m2 = rows[column.name]
            std = float(np.sqrt(m2 / count)) if count else 0.0
            # A column that does not vary (or nearly so, in floating point) is centred and otherwise left alone.
            std = std if std > 1e-12 * max(abs(mean), 1e-300) else 1.0
            column = replace(column, mean=float(mean), std=std, missing=column.missing or bool(missing > 0))
        columns.append(column)
    return replace(schema, columns=tuple(columns))
