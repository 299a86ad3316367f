"""Columns -> small integers: bins that all sites share, found from sums over sites alone.

Numbers are cut at quantiles in which every class weighs the same, so that cuts lie where the rare class is. Sites add
up weights in cells that all share; heavy cells are divided again, until quantiles can be read off. Levels of a category
are bins of their own where enough rows have them. The last bin of every column is that of missing values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedtail.data.inputs import saved_schema

CELLS = 512
"""Cells per number in one exchange."""
DIVISIONS = 2
"""How often heavy cells are divided: from powers of two to about 1/256 of the weight each."""
MOST_LEVELS = 254
LEAST_ROWS = 10
"""Rows of a level over all sites, at least; rarer levels are one with missing values."""
WEIGHT = 1 << 30
"""What all rows of a class weigh together."""


@dataclass(frozen=True)
class Column:
    """What trees see of stored samples as one column: a number, or the level of a category."""

    name: str
    at: int
    """Where it begins in a stored sample."""
    levels: int = 0
    """Levels of a category, one feature each; 0 for a number."""
    missing: int = -1
    """The feature that says that the value is missing, -1 for none."""
    code: bool = False
    """The category is stored as one number, -1 where it is unknown."""


def columns_of(preprocessing: Mapping[str, Any], width: int, site: int = 0) -> tuple[Column, ...]:
    """The columns in samples of ``width`` features, by what they were made from; of plain arrays a number each.

    ``site``: number of sites, where one more feature behind is the number of the row's site.
    """
    schema, at, found = saved_schema(dict(preprocessing)), 0, list[Column]()
    for column in () if schema is None else schema.columns:
        levels = {"category": len(column.levels), "hashed": column.buckets}.get(column.kind, 0)
        end = at + column.width
        found.append(Column(column.name, at, levels, end - 1 if column.missing else -1))
        at = end
    if at != width:
        found = [Column(f"column {i + 1}", i) for i in range(width)]
    return (*found, *([Column("site", width, site, code=True)] if site else ()))


def read_columns(x: np.ndarray, columns: Sequence[Column]) -> np.ndarray:
    """(F, N) float32: numbers and levels, NaN where missing. x: (N, width) stored samples."""
    out = np.empty((len(columns), len(x)), dtype=np.float32)
    for row, column in zip(out, columns, strict=True):
        if column.levels and not column.code:
            block = x[:, column.at : column.at + column.levels]
            row[:] = block.argmax(1)
            row[block.max(1, initial=0.0) < 0.5] = np.nan
        else:
            row[:] = x[:, column.at]
            if column.code:
                row[(row < 0) | (row >= column.levels)] = np.nan
        if column.missing >= 0:
            row[x[:, column.missing] > 0.5] = np.nan
    return out


@dataclass(frozen=True)
class Bins:
    """The agreed rule by which columns become bins."""

    columns: tuple[Column, ...]
    cuts: tuple[tuple[float, ...], ...]
    """Per column: a number's bin is how many of these lie below it; empty for a category."""
    kept: tuple[tuple[int, ...], ...] = ()
    """Per column: the levels that have a bin, in the order of their bins; empty for a number."""

    @cached_property
    def sizes(self) -> np.ndarray:
        """(F,) bins per column, that of missing values included."""
        pairs = zip(self.columns, self.cuts, self.kept, strict=True)
        return np.array([len(kept) + 1 if c.levels else len(cuts) + 2 for c, cuts, kept in pairs], dtype=np.int64)

    @property
    def offsets(self) -> np.ndarray:
        """(F,) where each column's bins begin in a histogram."""
        return np.concatenate([[0], np.cumsum(self.sizes)[:-1]])

    @property
    def total(self) -> int:
        return int(self.sizes.sum())

    def take(self, columns: Sequence[int]) -> Bins:
        """Return the bins of some columns."""
        parts: Any = (tuple(of[f] for f in columns) for of in (self.columns, self.cuts, self.kept))
        return Bins(*parts)

    def of(self, values: np.ndarray) -> np.ndarray:
        """(F, N) uint8 from the values of ``read_columns``."""
        out = np.empty(values.shape, dtype=np.uint8)
        for row, given, column, cuts, kept, size in zip(
            out, values, self.columns, self.cuts, self.kept, self.sizes, strict=True
        ):
            gone = np.isnan(given)
            if column.levels:
                table = np.full(column.levels + 1, size - 1, dtype=np.uint8)
                table[list(kept)] = np.arange(len(kept))
                row[:] = table[np.where(gone, column.levels, given).astype(np.int64)]
            else:
                row[:] = np.searchsorted(np.array(cuts, dtype=np.float32), given, side="left")
                row[gone] = size - 1
        return out


@dataclass(frozen=True)
class Count:
    """The first question: rows per class, and rows per level of every category."""

    columns: tuple[Column, ...]
    n_classes: int

    @property
    def size(self) -> int:
        return self.n_classes + sum(c.levels for c in self.columns)

    def answer(self, values: np.ndarray, y: np.ndarray) -> np.ndarray:
        parts = [np.bincount(y, minlength=self.n_classes)]
        for row, column in zip(values, self.columns, strict=True):
            if column.levels:
                parts.append(np.bincount(row[~np.isnan(row)].astype(np.int64), minlength=column.levels))
        return np.concatenate(parts)


@dataclass(frozen=True)
class Weigh:
    """The next ones: weights of rows in the cells between ``edges``, number by number."""

    edges: tuple[np.ndarray, ...]
    """Per number: ascending keys; a cell ends with its edge."""
    weights: np.ndarray
    """(C,) what a row of each class weighs."""
    numbers: tuple[int, ...]
    """Which columns are numbers."""

    @property
    def size(self) -> int:
        return sum(len(e) + 1 for e in self.edges)

    def answer(self, values: np.ndarray, y: np.ndarray) -> np.ndarray:
        parts = []
        shift = np.uint64(max(len(self.weights) - 1, 1).bit_length())
        for f, edges in zip(self.numbers, self.edges, strict=True):
            known = np.flatnonzero(~np.isnan(values[f]))
            pairs = (keys_of(values[f][known]).astype(np.uint64) << shift) | y[known].astype(np.uint64)
            pairs.sort()  # with the class in the last bits, sorting is enough to know the weights
            running = np.concatenate([[0], np.cumsum(self.weights[(pairs & ((np.uint64(1) << shift) - np.uint64(1)))])])
            ends = np.searchsorted(pairs, (edges.astype(np.uint64) + np.uint64(1)) << shift, side="left")
            parts.append(np.diff(running[np.concatenate([[0], ends, [len(pairs)]])]))
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def keys_of(values: np.ndarray) -> np.ndarray:
    """(N,) uint32 in the order of the float32 ``values``."""
    bits = (values.astype(np.float32) + np.float32(0.0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(0x80000000))


def values_of(keys: np.ndarray) -> np.ndarray:
    """(N,) float32, the inverse of ``keys_of``."""
    keys = keys.astype(np.uint32)
    return np.where(keys >> 31, keys & np.uint32(0x7FFFFFFF), ~keys).astype(np.uint32).view(np.float32)


def find_bins(
    columns: tuple[Column, ...], n_classes: int, most: int, ask: Callable[[Count | Weigh], np.ndarray]
) -> tuple[Bins, np.ndarray]:
    """Ask for sums until bins are known: at most ``most`` bins per number. Returns them and the rows per class."""
    sums = ask(Count(columns, n_classes))
    counts, rest = sums[:n_classes], sums[n_classes:]
    kept: list[tuple[int, ...]] = []
    for column in columns:
        rows, rest = rest[: column.levels], rest[column.levels :]
        order = np.argsort(-rows, kind="stable")[:MOST_LEVELS]
        kept.append(tuple(int(i) for i in np.sort(order[rows[order] >= LEAST_ROWS])))
    weights = np.where(counts > 0, WEIGHT // np.maximum(counts, 1), 0)
    numbers = tuple(f for f, c in enumerate(columns) if not c.levels)
    first = np.arange(1, CELLS, dtype=np.int64) << (32 - (CELLS.bit_length() - 1))
    edges = tuple(first for _ in numbers)
    found: list[np.ndarray] = []
    for step in range(DIVISIONS + 1):
        sums = ask(Weigh(edges, weights, numbers))
        found = np.split(sums, np.cumsum([len(e) + 1 for e in edges])[:-1]) if numbers else []
        if step < DIVISIONS:
            edges = tuple(divide(e, w) for e, w in zip(edges, found, strict=True))
    cuts: list[tuple[float, ...]] = [()] * len(columns)
    for f, e, w in zip(numbers, edges, found, strict=True):
        cuts[f] = tuple(float(v) for v in values_of(quantiles(e, w, most)))
    return Bins(columns, tuple(cuts), tuple(kept)), counts


def divide(edges: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """New edges: those beside weight, and more of them inside of cells with much of it."""
    weights = np.maximum(weights, 0)  # of a sum that a site has poisoned, or cells without end would be made of it
    total = sum(weights.tolist())
    if not total:
        return edges[:0]
    bounds = np.concatenate([[0], edges, [(1 << 32) - 1]])
    out: list[int] = []
    for i in np.flatnonzero(weights):
        low, high = int(bounds[i]), int(bounds[i + 1])
        parts = max(1, int(weights[i]) * (CELLS // 2) // total)
        out += [low + (high - low) * j // parts for j in range(parts + 1)]
    found = np.unique(out)
    return found[(found > 0) & (found < bounds[-1])]


def quantiles(edges: np.ndarray, weights: np.ndarray, most: int) -> np.ndarray:
    """Keys of at most ``most`` - 1 cuts with about the same weight between two."""
    running, total = np.cumsum(weights)[:-1], int(weights.sum())
    if not total or not len(edges):
        return edges[:0]
    filled = int((weights > 0).sum())
    if filled <= most:  # every cell that holds something is a bin
        at = np.flatnonzero((weights[:-1] > 0) & (running < total))
    else:
        wanted = [total * j // most for j in range(1, most)]
        at = np.unique(np.searchsorted(running, wanted, side="left"))
        at = at[at < len(running)]
        at = at[(running[at] < total) & (running[at] > 0)]
    return edges[at]
