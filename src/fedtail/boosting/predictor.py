"""What is agreed before the first tree, and a forest: what the trees are, and rows -> scores."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from fedtail.boosting.bins import Bins, Column
from fedtail.boosting.histograms import Fields
from fedtail.core.random import generator
from fedtail.methods.trees import Trees

LEAF = -1
CHUNK = 1 << 13


@dataclass(frozen=True)
class Plan:
    """What is agreed before the first sum."""

    columns: tuple[Column, ...]
    n_classes: int
    rounds: int
    method: Trees = field(default_factory=Trees)
    seed: int = 0
    """What columns are drawn with."""
    patience: int = 0
    """End after so many rounds without a smaller loss on held-out rows; 0: never."""

    def seen(self, t: int) -> tuple[int, ...]:
        """The columns that the trees of round t may ask for."""
        n = len(self.columns)
        kept = max(min(n, 2), round(self.method.column_share * n))
        return tuple(sorted(generator(self.seed, "trees/columns", round=t).permutation(n)[:kept].tolist()))

    @property
    def trees(self) -> int:
        """Trees per round: one per class, or one for two classes."""
        return 1 if self.n_classes == 2 else self.n_classes


@dataclass(frozen=True)
class Start:
    """What bins and counts settle: rows become ``Rows`` by it."""

    bins: Bins
    counts: np.ndarray
    """(C,) training rows over all sites."""
    weights: np.ndarray
    """(C,) of a row of each class, 1 on average."""
    scores: np.ndarray
    """(K,) before the first tree: the weighted classes' shares."""

    @classmethod
    def of(cls, plan: Plan, bins: Bins, counts: np.ndarray) -> Start:
        share = np.maximum(counts, 0.5) / counts.sum()
        weights = share**-plan.method.power
        weights *= counts.sum() / (counts * weights).sum()
        score = np.log(share * weights / (share * weights).sum())
        scores = score[1:] - score[:1] if plan.trees == 1 else score - score.mean()
        return cls(bins, counts, weights, scores)

    @cached_property
    def fields(self) -> Fields:
        return Fields.of(int(self.counts.sum()), float(self.counts @ self.weights))

    @property
    def correction(self) -> np.ndarray:
        """(C,) added to log-probabilities of the weighted classes to have those of the classes as they are."""
        return np.asarray(-np.log(self.weights))


@dataclass
class Forest:
    """Trees as arrays, one row per round, one column per tree of a round. A node's children lie side by side."""

    start: Start
    column: np.ndarray
    """(T, K, M) int16: the column that a node asks for; -1 in a leaf."""
    child: np.ndarray
    """(T, K, M) int16: the left child, the right one being the next."""
    left: np.ndarray
    """(T, K, M, 32) uint8: a bit per bin, 1 where it goes left."""
    value: np.ndarray
    """(T, K, M) float64: of a leaf."""
    gain: np.ndarray
    """(T, K, M) float32: what a split gained."""
    checks: list[np.ndarray] = field(default_factory=list)
    """What rows have told after each round; see ``Check``."""
    parts: ClassVar[tuple[str, ...]] = ("column", "child", "left", "value", "gain")

    @classmethod
    def begin(cls, start: Start, plan: Plan) -> Forest:
        """One without trees."""
        shape = (0, plan.trees, 2 * plan.method.leaves - 1)
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
        """The trees by name."""
        return {name: getattr(self, name) for name in self.parts}

    def first(self, rounds: int) -> Forest:
        """The forest of the first rounds."""
        kept: dict[str, Any] = {name: of[:rounds] for name, of in self.arrays().items()}
        return replace(self, checks=self.checks[:rounds], **kept)

    def add_round(self) -> None:
        """One more round of trees that are a leaf each."""
        for name, of in self.arrays().items():
            more = np.full((1, *of.shape[1:]), LEAF if name == "column" else 0, dtype=of.dtype)
            setattr(self, name, np.concatenate([of, more]))

    @property
    def goes_left(self) -> np.ndarray:
        """(T, K, M, 256) bool: ``left``, bin by bin."""
        return np.unpackbits(self.left, axis=-1, bitorder="little").astype(bool)

    def scores(self, bins: np.ndarray, first: int = 0, scores: np.ndarray | None = None) -> np.ndarray:
        """(K, N) scores of rows (F, N) uint8, added up round after round as in training."""
        n = bins.shape[1]
        out = np.repeat(self.start.scores[:, None], n, axis=1) if scores is None else scores
        goes = self.goes_left
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
        goes, rows = self.goes_left, np.arange(n)
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
        n = len(self.start.bins.columns)
        found = np.bincount(self.column[inner].astype(np.int64), self.gain[inner], minlength=n)
        return np.asarray(found / max(found.sum(), 1e-12))
