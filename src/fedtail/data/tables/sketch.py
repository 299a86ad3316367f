"""Scaling and quantiles without pooling: sites send counts and sums of each numeric column, and nobody sends a row.

First come moments: how many values there are and are missing, their mean and their spread. The merged ones settle bins
(``grid``): fine steps in deviations around the mean, which serve years and temperatures, and steps of a fixed ratio
around zero, which serve incomes and byte counts. Then sites count their values in these bins. From the added counts
come the ``cuts`` of each column, between which a number is encoded piecewise linearly (Gorishniy et al. 2022, "On
embeddings for numerical features in tabular deep learning").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedtail.core.robust import fairly
from fedtail.data.tables.columns import Levels, Numbers
from fedtail.data.tables.schema import TableSchema
from fedtail.errors import FedtailError

MIN_COUNT = 5
"""A site tells no mean of fewer values than this."""
DECADES, PER_DECADE = (-6, 12), 16
LINEAR, REACH = 160, 4.0
"""Bins of the linear part, and how many deviations it reaches to either side of the mean."""
_RATIO = 10.0 ** (np.arange(DECADES[0] * PER_DECADE, DECADES[1] * PER_DECADE + 1) / PER_DECADE)
_FIXED = np.concatenate([-_RATIO[::-1], [0.0], _RATIO])
BINS = len(_FIXED) + LINEAR + 2
"""Counts a site sends per column."""
MOST_PIECES, LEAST_PIECES, ALL_PIECES = 16, 4, 256
"""Pieces of one column, and about how many of all columns together: wide tables get coarser ones."""
COUNT, MISSING, MEAN, M2 = range(4)
"""Columns of a moments array: values, missing values, mean, sum of squared deviations from the mean."""
WIDE, HUGE = 10.0, 1e150
"""How many times the usual deviation a site's mean may be away, and its deviation be; and no number is larger."""
Columns = Mapping[str, Numbers | Levels]


def default_pieces(columns: int) -> int:
    """Pieces per numeric column for that many of them."""
    return int(np.clip(ALL_PIECES // max(columns, 1), LEAST_PIECES, MOST_PIECES))


def grid(mean: float, std: float) -> np.ndarray:
    """(BINS - 1,) ascending edges; bin i holds values above edge i - 1 and up to edge i."""
    near = mean + std * np.linspace(-REACH, REACH, LINEAR + 1)
    return np.sort(np.concatenate([_FIXED, near]))


def column_sketch(values: np.ndarray, edges: np.ndarray, *, min_count: int = 1) -> np.ndarray:
    """(BINS,) counts of one column. values: (N,) with NaN for missing.

    Bins are joined, from the lowest on, until each that is told holds ``min_count`` values; a column with fewer tells
    nothing.
    """
    known = values[~np.isnan(values)]
    counts = np.bincount(np.searchsorted(edges, known, side="left"), minlength=BINS)
    if min_count <= 1 or not len(known):
        return counts
    out = np.zeros_like(counts)
    held, last = 0, -1
    for i in np.flatnonzero(counts):
        held += int(counts[i])
        if held >= min_count:
            out[i], held, last = held, 0, int(i)
    if last >= 0:
        out[last] += held
    return out


def merge_sketches(sites: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """(columns, BINS) counts of all sites together."""
    total = np.zeros((columns, BINS), dtype=np.int64)
    for counts in sites:
        if counts.shape != total.shape or not np.issubdtype(counts.dtype, np.integer) or (counts < 0).any():
            raise FedtailError(f"a site sent invalid bin counts: {counts.dtype} of shape {counts.shape}")
        total += counts
    return total


def pack_sketch(counts: np.ndarray) -> list[list[list[int]]]:
    """Plain JSON: per column, the numbers and the counts of the bins that are not empty. counts: (columns, BINS)."""
    return [[at.tolist(), row[at].tolist()] for row in counts for at in [np.flatnonzero(row)]]


def unpack_sketch(packed: Sequence[Sequence[Sequence[int]]], columns: int) -> np.ndarray:
    """(columns, BINS) from ``pack_sketch``; anything else is an error."""
    out = np.zeros((columns, BINS), dtype=np.int64)
    if len(packed) != columns:
        raise FedtailError(
            f"a site sent bin counts for {len(packed)} columns, but the schema has {columns} numeric ones"
        )
    for row, (at, counts) in zip(out, packed, strict=True):
        if len(at) != len(counts) or any(not 0 <= i < BINS for i in at):
            raise FedtailError(f"a site sent bin counts outside the {BINS} bins")
        row[np.asarray(at, dtype=np.int64)] = np.asarray(counts, dtype=np.int64)
    return out


def fit_cuts(schema: TableSchema, counts: np.ndarray) -> TableSchema:
    """The scaled schema with the cuts of every numeric column. counts: (numeric columns, BINS)."""
    pieces = default_pieces(len(schema.numeric)) if schema.pieces is None else schema.pieces
    fitted = []
    for column, row in zip(schema.numeric, counts, strict=True):
        ends = cuts(row, grid(column.mean or 0.0, column.std or 1.0), pieces)
        fitted.append(replace(column, cuts=tuple(ends.tolist())))
    return replace(schema.with_numeric(fitted), pieces=pieces)


def cuts(counts: np.ndarray, edges: np.ndarray, pieces: int) -> np.ndarray:
    """Up to ``pieces`` + 1 ascending values with about equally many samples between two; empty if two do not differ.

    A bin with more than its share (zeros in a column of gains, say) is one cut, and the others divide the rest.
    """
    at = np.flatnonzero(counts)
    if pieces < 1 or len(at) < 3:  # two values are told apart by one number as well
        return np.empty(0)
    mass = counts[at].astype(np.float64)
    upper = edges[np.minimum(at, len(edges) - 1)]
    heavy = np.zeros(len(at), dtype=bool)
    while True:
        left = pieces + 1 - int(heavy.sum())
        more = ~heavy & (mass > mass[~heavy].sum() / max(left, 1))
        if not more.any() or left <= 1:
            break
        heavy |= more
    chosen = heavy.copy()
    chosen[[0, -1]] = True
    left = pieces + 1 - int(chosen.sum())
    if left > 0:
        running = np.cumsum(np.where(heavy, 0.0, mass))
        wanted = running[-1] * np.arange(1, left + 1) / (left + 1)
        chosen[np.minimum(np.searchsorted(running, wanted), len(at) - 1)] = True
    ends = np.unique(upper[chosen])
    return ends if len(ends) > 2 else np.empty(0)


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
    total = np.zeros(np.shape(sites[0]))
    for part in sorted((np.asarray(s, dtype=np.float64) for s in sites), key=lambda a: a.tobytes()):
        check_moments(part, len(total))
        n = total[:, COUNT] + part[:, COUNT]
        safe = np.maximum(n, 1.0)
        delta = part[:, MEAN] - total[:, MEAN]
        total[:, M2] += part[:, M2] + delta**2 * total[:, COUNT] * part[:, COUNT] / safe
        total[:, MEAN] += delta * part[:, COUNT] / safe
        total[:, COUNT] = n
        total[:, MISSING] += part[:, MISSING]
    return total


def check_moments(part: np.ndarray, columns: int, most: float = np.inf) -> None:
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
        rows[:, COUNT] = np.floor(fairly(rows[:, COUNT])).clip(1)
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
    fitted = []
    for column, (count, missing, mean, m2) in zip(numeric, moments, strict=True):
        std = float(np.sqrt(m2 / count)) if count else 0.0
        # A column that does not vary (or nearly so, in floating point) is centred and otherwise left alone.
        std = std if std > 1e-12 * max(abs(mean), 1e-300) else 1.0
        fitted.append(replace(column, mean=float(mean), std=std, missing=column.missing or bool(missing > 0)))
    return schema.with_numeric(fitted)


def moments_of(
    schema: TableSchema, columns: Columns, index: np.ndarray | None = None, min_count: int = MIN_COUNT
) -> np.ndarray:
    """(numeric columns, 4): the moments of some rows of a site, all rows without ``index``."""
    rows = [column_moments(v, min_count=min_count) for v in numbers_of(schema, columns, index)]
    return np.array(rows).reshape(-1, 4)


def sketch_of(
    scaled: TableSchema, columns: Columns, index: np.ndarray | None = None, min_count: int = MIN_COUNT
) -> np.ndarray:
    """(numeric columns, BINS): counts of some rows of a site in the bins of the merged scaling."""
    edges = [grid(c.mean or 0.0, c.std or 1.0) for c in scaled.numeric]
    values = numbers_of(scaled, columns, index)
    counts = [column_sketch(v, e, min_count=min_count) for v, e in zip(values, edges, strict=True)]
    return np.array(counts, dtype=np.int64).reshape(-1, BINS)


def numbers_of(schema: TableSchema, columns: Columns, index: np.ndarray | None) -> Iterator[np.ndarray]:
    """Yield each numeric column's values in some rows, all rows without ``index``."""
    for column in schema.numeric:
        data = columns[column.name]
        assert isinstance(data, Numbers)
        yield data.values if index is None else data.values[index]
