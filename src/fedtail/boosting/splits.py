"""Sums of nodes -> how each is split, from the sums alone: who has them finds the same splits, whoever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedtail.boosting.bins import Bins
from fedtail.boosting.histograms import Fields

L2 = 1.0
"""Added to a node's Hessians."""
LEAST_HESSIAN = 1e-3
SMOOTH, LEAST_IN_LEVEL = 10.0, 10.0
"""Levels of a category are ordered by gradient over Hessian plus this; those with fewer rows stay on the right."""
LEAST_GAIN = 1e-7
MOST_STEP = 8.0
"""A leaf's value before the learning rate, at most: a class that a node has never doubted has a Hessian near 0."""
NOWHERE = 255
"""A bin that no column has."""
BLOCK = 1 << 17
"""Candidates judged at a time, which stay in cache."""

Told = tuple[int, np.ndarray, int]
"""A column, the bins that go left, and the packed sum of their rows."""
Found = tuple[np.ndarray, Callable[[int], Told]]
"""The best score of every node, and what the split behind it is."""


@dataclass(frozen=True)
class Split:
    """A node's best split."""

    gain: float
    column: int
    left: np.ndarray
    """(256,) bool: the bins that go left."""
    sums: np.ndarray
    """(2,) sums of the two children, packed."""


class Finder:
    """Finds best splits by some of the columns; knows the layout of a histogram of these."""

    def __init__(self, bins: Bins, fields: Fields, least_rows: int, columns: Sequence[int]) -> None:
        self.columns, self.fields, self.least_rows = columns, fields, float(least_rows)
        self.bins = bins = bins.take(columns)
        self.sizes, self.offsets = bins.sizes, bins.offsets
        self.owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        last = self.offsets + self.sizes - 1
        self.missing = last[self.owner]
        # A category of two levels is a number: its levels have one order.
        unordered = [bool(c.levels) and n > 3 for c, n in zip(bins.columns, self.sizes, strict=True)]
        ordered = ~np.array(unordered)[self.owner]
        ordered[last] = False
        self.numbers = np.flatnonzero(ordered)
        groups: dict[int, list[int]] = {}
        for f in np.flatnonzero(unordered):  # of similar width, to be judged together
            groups.setdefault(int(self.sizes[f] - 1).bit_length(), []).append(int(f))
        self.groups = [np.array(g) for g in groups.values()]

    def best(self, sums: np.ndarray) -> list[Split | None]:
        """The best split of each node; None where none gains. sums: (L, T) packed."""
        found: list[Split | None] = []
        block = max(1, BLOCK // max(sums.shape[1], 1))
        for start in range(0, len(sums), block):
            found += self._best(sums[start : start + block])
        return found

    def value(self, total: int) -> float:
        """A leaf's value before the learning rate, from its packed sum."""
        g, h = self.fields.sums(total)
        return float(min(max(-g / (h + L2), -MOST_STEP), MOST_STEP))

    def _best(self, sums: np.ndarray) -> list[Split | None]:
        total = sums[:, : self.sizes[0]].sum(1)
        parts = [*self._numbers(sums, total), *self._categories(sums, total)]
        base = self._score(total)
        if not parts:
            return [None] * len(sums)
        gains = np.stack([p[0] for p in parts])
        out: list[Split | None] = []
        for i, which in enumerate(gains.argmax(0)):
            gain = float(gains[which, i] - base[i])
            if not gain > LEAST_GAIN:
                out.append(None)
                continue
            column, left, own = parts[which][1](i)
            out.append(Split(gain, self.columns[column], left, np.array([own, total[i] - own])))
        return out

    def _score(self, sums: np.ndarray) -> np.ndarray:
        g, h = self.fields.sums(sums)
        return np.asarray(g * g / (h + L2))

    def _gains(self, left: np.ndarray, total: np.ndarray) -> np.ndarray:
        """Scores of both children together, -inf where one is too small. left: (L, M); total: (L,)."""
        fields, least = self.fields, self.least_rows * 2.0**self.fields.count
        rows, all_rows = left & ((1 << fields.count_bits) - 1), (total & ((1 << fields.count_bits) - 1))[:, None]
        bad = rows < least
        bad |= rows > all_rows - least
        gl, hl = fields.sums(left)
        g, h = (v[:, None] for v in fields.sums(total))
        gr, hr = g - gl, h - hl
        bad |= hl < LEAST_HESSIAN
        bad |= hr < LEAST_HESSIAN
        gl *= gl
        hl += L2
        gl /= hl
        gr *= gr
        hr += L2
        gr /= hr
        gl += gr
        gl[bad] = -np.inf
        return gl

    def _numbers(self, sums: np.ndarray, total: np.ndarray) -> Iterator[Found]:
        """Cuts of numbers, missing values to the right, and where there are some, to the left."""
        at = self.numbers
        if not len(at):
            return
        # Every row is in one bin of every column, so that the sum before a column's bins is known; it may run over and
        # comes back.
        running = np.cumsum(sums, axis=1)[:, at] - self.owner[at] * total[:, None]
        gone = sums[:, self.missing[at]]
        some = gone.any(0)
        for add, where in ((False, np.arange(len(at))), (True, np.flatnonzero(some))):
            if not len(where):
                continue
            left = running[:, where] + gone[:, where] if add else running[:, where]
            gains = self._gains(left, total)
            best = gains.argmax(1)

            yield gains[np.arange(len(sums)), best], partial(self._cut, at[where], best, left, add)

    def _categories(self, sums: np.ndarray, total: np.ndarray) -> Iterator[Found]:
        """Levels, missing values among them, in the order of their gradients: the first of them go left."""
        for group in self.groups:
            width = int(self.sizes[group].max())
            inside = np.arange(width) < self.sizes[group][:, None]
            at = np.where(inside, self.offsets[group][:, None] + np.arange(width), 0)
            block = sums[:, at]  # (L, G, width)
            (g, h), n = self.fields.sums(block), self.fields.rows(block)
            rank = np.where(inside & (n >= LEAST_IN_LEVEL), g / (h + SMOOTH), np.inf)
            order = np.argsort(rank, axis=2, kind="stable")
            ordered = np.take_along_axis(block, order, 2)
            ordered[np.isinf(np.take_along_axis(rank, order, 2))] = 0
            running = np.cumsum(ordered, axis=2).reshape(len(sums), -1)
            gains = self._gains(running, total)
            best = gains.argmax(1)

            order[np.isinf(np.take_along_axis(rank, order, 2))] = NOWHERE
            yield gains[np.arange(len(sums)), best], partial(self._subset, group, best, running, order)

    def _cut(self, at: np.ndarray, best: np.ndarray, left: np.ndarray, missing: bool, i: int) -> Told:
        position = int(at[best[i]])
        column = int(self.owner[position])
        table = np.zeros(256, dtype=bool)
        table[: position - int(self.offsets[column]) + 1] = True
        table[int(self.sizes[column]) - 1] = missing
        return column, table, int(left[i, best[i]])

    def _subset(self, group: np.ndarray, best: np.ndarray, left: np.ndarray, order: np.ndarray, i: int) -> Told:
        of, last = divmod(int(best[i]), order.shape[2])
        table = np.zeros(256, dtype=bool)
        table[order[i, of, : last + 1]] = True
        table[NOWHERE] = False
        return int(group[of]), table, int(left[i, best[i]])
