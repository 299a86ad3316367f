"""Rows of a site: their gradients as integers, their sums per node and bin, and their way down a tree.

A bin's sums are one 64-bit integer with three fields: gradients, Hessians and rows. Fields are as wide as the rows of
all sites together need, so that no sum runs over; what is lost is rounded up or down by a hash of the row and the tree,
so that nothing is lost on average and every partition of rows into sites gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.errors import FedtailError

CHUNK = 1 << 15
"""Rows added at a time: indices and gradients stay in cache while column after column is added up."""
COUNTED, COARSE = 16, 12
"""Bits for rows; where there are more, they are counted in units of more than one, with fewer bits."""
MOST_ROWS = 1 << 23
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Fields:
    """Where gradients, Hessians and rows lie in 64 bits, and their units as powers of two."""

    gradient: int
    """A gradient of 1 is 2 to this."""
    hessian: int
    count: int
    """A row is 2 to this, which is below 0 where there are very many."""
    hessian_bits: int
    count_bits: int

    @classmethod
    def of(cls, rows: int, weight: float) -> Fields:
        """For ``rows`` rows that weigh ``weight`` together; a row's gradient is at most its weight, its Hessian at most
        a quarter of it."""
        if rows > MOST_ROWS:
            raise FedtailError(f"{rows:,} rows are more than trees can add up exactly, which is {MOST_ROWS:,}")
        exact = (rows + 1).bit_length()
        count_bits = exact if exact <= COUNTED else COARSE
        count = count_bits - exact
        if count < 0:
            count -= 1  # room for rounding
        bits = 63 - count_bits  # totals must be below 2**62 either way
        hessian_bits = bits // 2
        weight = max(weight, 1.0)
        gradient = int(np.floor(np.log2((2.0 ** (bits - hessian_bits - 1) - 1 - rows) / weight)))
        hessian = int(np.floor(np.log2((2.0**hessian_bits - 1 - rows) / (weight / 4))))
        return cls(min(gradient, 30), min(hessian, 30), count, hessian_bits, count_bits)

    def pack(self, gradient: np.ndarray, hessian: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """int64 of float64 gradients and Hessians. noise: uint64, what decides how each is rounded."""
        low, mid, high = ((noise >> np.uint64(s)) & np.uint64(0x1FFFFF) for s in (0, 21, 42))
        g = np.floor(np.ldexp(gradient, self.gradient) + np.ldexp(low.astype(np.float64), -21)).astype(np.int64)
        h = np.floor(np.ldexp(hessian, self.hessian) + np.ldexp(mid.astype(np.float64), -21)).astype(np.int64)
        n = ((high.astype(np.int64) & ((1 << -self.count) - 1)) == 0).astype(np.int64)
        return (g << (self.hessian_bits + self.count_bits)) + (h << self.count_bits) + n

    def sums(self, packed: Any) -> tuple[Any, Any]:
        """Gradients and Hessians as float64, of an array or of one integer."""
        g = (packed >> (self.hessian_bits + self.count_bits)) * 2.0**-self.gradient
        h = ((packed >> self.count_bits) & ((1 << self.hessian_bits) - 1)) * 2.0**-self.hessian
        return g, h

    def rows(self, packed: Any) -> Any:
        """Rows as float64, of an array or of one integer."""
        return (packed & ((1 << self.count_bits) - 1)) * 2.0**-self.count


class Rows:
    """Rows in bins, with their scores and their nodes in the trees that grow now."""

    def __init__(self, bins: np.ndarray, y: np.ndarray, start: np.ndarray) -> None:
        """bins: (F, N) uint8; y: (N,) classes; start: (K,) scores before the first tree, one per tree of a round."""
        self.bins, self.y = np.ascontiguousarray(bins), y
        self.scores = np.repeat(np.asarray(start, dtype=np.float64)[:, None], bins.shape[1], axis=1)
        self.nodes: list[np.ndarray] = []
        self.packed = np.zeros((len(start), 0), dtype=np.int64)
        self.hash = np.zeros(bins.shape[1], dtype=np.uint64)
        for row in self.bins:
            self.hash = (self.hash ^ row) * _MIX
            self.hash ^= self.hash >> np.uint64(29)
        self.hash = (self.hash ^ y.astype(np.uint64)) * _MIX

    def __len__(self) -> int:
        return self.bins.shape[1]

    def begin(self) -> None:
        """All rows at the roots of the next trees."""
        self.nodes = [np.arange(len(self)) for _ in self.scores]

    def differentiate(self, fields: Fields, weights: np.ndarray, tree: int) -> None:
        """Gradients and Hessians of the weighted log loss at the scores. weights: (C,) of a row of each class."""
        w = weights[self.y]
        p: np.ndarray = self.probabilities()[-len(self.scores) :]  # of two classes, the second
        packed = np.empty((len(p), len(self)), dtype=np.int64)
        for k, of in enumerate(p):
            hit = self.y == k + len(weights) - len(p)
            noise = (self.hash ^ np.uint64(tree * 65_537 + k + 1)) * _MIX
            noise = (noise ^ (noise >> np.uint64(32))) * _MIX
            packed[k] = fields.pack(w * (of - hit), w * of * (1.0 - of), noise >> np.uint64(1))
        self.packed = packed

    def probabilities(self) -> np.ndarray:
        """(C, N) of the weighted classes."""
        z = self.scores if len(self.scores) > 1 else np.concatenate([np.zeros_like(self.scores), self.scores])
        e = np.exp(z - z.max(0))
        total = e[0].copy()
        for row in e[1:]:
            total += row
        return np.asarray(e / total)

    def histograms(
        self, built: Sequence[int], trees: Sequence[int], columns: Sequence[int], sizes: np.ndarray
    ) -> np.ndarray:
        """(len(built), T) sums of the rows in the nodes ``built`` of ``trees``, by the bins of ``columns``; sizes: (F,)
        bins per column."""
        ends = np.cumsum(sizes[list(columns)])
        total, offsets = int(ends[-1]), [0, *ends[:-1].tolist()]
        out = np.zeros(len(built) * total, dtype=np.int64)
        lists = [self.nodes[i] for i in built]
        if not lists:
            return out.reshape(0, total)
        lengths = [len(r) for r in lists]
        rows = np.concatenate(lists)
        base = np.repeat(np.arange(len(built)) * total, lengths)
        values = np.concatenate([self.packed[k].take(r) for k, r in zip(trees, lists, strict=True)])
        at = np.empty(min(CHUNK, len(rows)), dtype=np.intp)
        for start in range(0, len(rows), CHUNK):
            part = slice(start, start + CHUNK)
            index, where, added = rows[part], base[part], values[part]
            here = at[: len(index)]
            for f, offset in zip(columns, offsets, strict=True):
                np.add(where, self.bins[f].take(index), out=here)
                here += offset
                np.add.at(out, here, added)
        return out.reshape(len(built), total)

    def move(self, split: Sequence[tuple[int, np.ndarray] | float], trees: Sequence[int]) -> None:
        """Rows of every node go to its two children, in the order of nodes, or take its value and are done.

        split: per node a column and (256,) bool, whether a bin goes left, or the value of a leaf.
        """
        moved: list[np.ndarray] = []
        for how, k, rows in zip(split, trees, self.nodes, strict=True):
            if isinstance(how, tuple):
                left = how[1].take(self.bins[how[0]].take(rows))
                moved += [rows[left], rows[~left]]
            else:
                self.scores[k, rows] += how
        self.nodes = moved
