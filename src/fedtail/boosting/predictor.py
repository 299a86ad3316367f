"""A forest: what the trees are, and rows -> scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fedtail.boosting.splits import Split
    from fedtail.boosting.start import Plan, Start

LEAF = -1
CHUNK = 1 << 13


class Forest:
    """Trees as arrays, one row per round, one column per tree of a round. A node's children lie side by side."""

    def __init__(
        self, start: Start, column: np.ndarray, child: np.ndarray, left: np.ndarray, value: np.ndarray, gain: np.ndarray
    ) -> None:
        self.start = start
        self.checks: list[np.ndarray] = []
        """What rows have told after each round; see ``Check``."""
        self.column = column
        """(T, K, M) int16: the column that a node asks for; -1 in a leaf."""
        self.child = child
        """(T, K, M) int16: the left child, the right one being the next."""
        self.left = left
        """(T, K, M, 32) uint8: a bit per bin, 1 where it goes left."""
        self.value = value
        """(T, K, M) float64: of a leaf."""
        self.gain = gain
        """(T, K, M) float32: what a split gained."""

    @classmethod
    def begin(cls, start: Start, plan: Plan) -> Forest:
        """One without trees."""
        shape = (0, plan.trees, 2 * plan.leaves - 1)
        return cls(
            start,
            column=np.zeros(shape, np.int16),
            child=np.zeros(shape, np.int16),
            left=np.zeros((*shape, 32), np.uint8),
            value=np.zeros(shape),
            gain=np.zeros(shape, np.float32),
        )

    @property
    def rounds(self) -> int:
        return len(self.column)

    def arrays(self) -> dict[str, np.ndarray]:
        """The trees by the names that ``__init__`` takes."""
        return {name: getattr(self, name) for name in ("column", "child", "left", "value", "gain")}

    def first(self, rounds: int) -> Forest:
        """The forest of the first rounds."""
        found = Forest(self.start, **{name: of[:rounds] for name, of in self.arrays().items()})
        found.checks = self.checks[:rounds]
        return found

    def add_round(self) -> None:
        """One more round of trees that are a leaf each."""
        for name, of in self.arrays().items():
            more = np.full((1, *of.shape[1:]), LEAF if name == "column" else 0, dtype=of.dtype)
            setattr(self, name, np.concatenate([of, more]))

    def set_leaf(self, t: int, k: int, node: int, value: float) -> None:
        self.value[t, k, node] = value

    def set_split(self, t: int, k: int, node: int, split: Split, child: int) -> None:
        self.column[t, k, node], self.child[t, k, node] = split.column, child
        self.left[t, k, node] = np.packbits(split.left, bitorder="little")
        self.gain[t, k, node] = split.gain

    def scores(self, bins: np.ndarray, first: int = 0, scores: np.ndarray | None = None) -> np.ndarray:
        """(K, N) scores of rows (F, N) uint8, added up round after round as in training."""
        n = bins.shape[1]
        out = np.repeat(self.start.scores[:, None], n, axis=1) if scores is None else scores
        goes = np.unpackbits(self.left, axis=-1, bitorder="little").astype(bool)
        for start in range(0, n, CHUNK):
            part = np.ascontiguousarray(bins[:, start : start + CHUNK])
            here = np.arange(part.shape[1])
            for t in range(first, self.rounds):
                for k in range(self.column.shape[1]):
                    out[k, start : start + CHUNK] += self._walk(t, k, part, here, goes[t, k])
        return out

    def _walk(self, t: int, k: int, part: np.ndarray, here: np.ndarray, goes: np.ndarray) -> np.ndarray:
        column, child = self.column[t, k].astype(np.intp), self.child[t, k].astype(np.intp)
        node = np.zeros(len(here), dtype=np.intp)
        flat, table = part.ravel(), goes.ravel()
        while True:
            asks = column.take(node)
            inner = asks >= 0
            if not inner.any():
                return np.asarray(self.value[t, k].take(node))
            bin_of = flat.take(np.maximum(asks, 0) * len(here) + here)
            below = child.take(node) + ~table.take(node * 256 + bin_of)
            node = np.where(inner, below, node)

    def attributions(self, bins: np.ndarray) -> np.ndarray:
        """(K, N, F) what each column adds to each score along the paths: with the first scores, ``scores``."""
        f, n = bins.shape
        out = np.zeros((self.column.shape[1], n, f))
        goes = np.unpackbits(self.left, axis=-1, bitorder="little").astype(bool)
        rows = np.arange(n)
        for t, k in np.ndindex(*self.column.shape[:2]):
            node = np.zeros(n, dtype=np.intp)
            while (inner := np.flatnonzero(self.column[t, k, node] >= 0)).size:
                here = node[inner]
                column = self.column[t, k, here].astype(np.intp)
                below = self.child[t, k, here] + ~goes[t, k, here, bins[column, inner]]
                out[k, rows[inner], column] += self.value[t, k, below] - self.value[t, k, here]
                node[inner] = below
        return out

    def logits(self, scores: np.ndarray) -> np.ndarray:
        """(N, C) log-odds of the classes as they are, from scores (K, N)."""
        z = scores if len(scores) > 1 else np.concatenate([np.zeros_like(scores), scores])
        return np.asarray((z + self.start.correction[:, None]).T)

    def importance(self) -> np.ndarray:
        """(F,) each column's share of all gains."""
        inner = self.column >= 0
        found = np.bincount(
            self.column[inner].astype(np.int64), self.gain[inner], minlength=len(self.start.bins.columns)
        )
        return np.asarray(found / max(found.sum(), 1e-12))
