"""Scaling without pooling: sites send counts and sums, the server merges them, nobody sends a row.

Pure functions, so that the simulator and a site of a real federation call the same code. A site's message is one
(columns, 4) array; what it reveals is, per numeric column, how many values there are and are missing, their mean
and their spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedtail.data.tables.schema import TableSchema
from fedtail.errors import FedtailError

COUNT, MISSING, MEAN, M2 = range(4)
"""Columns of a moments array: values, missing values, mean, sum of squared deviations from the mean."""


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
