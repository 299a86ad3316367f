"""Candidate global models as base + directions, never as 2^K models.

    base = x + sum_k a_k delta_k^(0),   d_axis = sum_{k on axis} a_k (delta_k^(1) - delta_k^(0))
    x^(s) = base + sum_axis s_axis d_axis

K + 1 vectors describe 2^K models; walking them in Gray-code order costs one axpy each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

REBUILD_EVERY = 16


@dataclass(frozen=True)
class Candidates:
    """N models: row s of ``patterns`` says which directions model s adds to the base."""

    base: Tensor
    """(n,)."""
    directions: Tensor
    """(A, n)."""
    patterns: np.ndarray
    """(N, A) of 0/1; ``binary`` has bit a of s in column a."""

    def __len__(self) -> int:
        return len(self.patterns)

    def model(self, s: int) -> Tensor:
        """(n,) candidate s, combined directly in float64."""
        on = torch.as_tensor(self.patterns[s], dtype=torch.float64, device=self.base.device)
        total = self.base.double()
        for weight, direction in zip(on, self.directions, strict=True):
            if weight:
                total = total + direction.double()
        return total.to(self.base.dtype)

    def walk(self) -> Iterator[tuple[int, Tensor]]:
        """Every candidate once as (s, vector); the vector is a buffer that the next step overwrites.

        Neighbours differ in as few directions as possible (one, for all 2^A patterns), and the buffer is
        rebuilt from the base every 16 candidates, which bounds rounding errors.
        """
        buffer = self.base.clone()
        current = np.zeros(self.patterns.shape[1], dtype=np.int64)
        for i, s in enumerate(self._order()):
            if i % REBUILD_EVERY == 0:
                buffer.copy_(self.base)
                current[:] = 0
            for a in np.flatnonzero(self.patterns[s] != current):
                buffer.add_(self.directions[a], alpha=float(self.patterns[s, a] - current[a]))
            current = self.patterns[s].copy()
            yield int(s), buffer

    def vector(self, s: int) -> Tensor:
        """(n,) candidate s with the bits it has in ``walk``, without those before it."""
        order = self._order()
        place = int(np.flatnonzero(order == s)[0])
        out = self.base.clone()
        current = np.zeros(self.patterns.shape[1], dtype=np.int64)
        for step in order[place - place % REBUILD_EVERY : place + 1]:
            for a in np.flatnonzero(self.patterns[step] != current):
                out.add_(self.directions[a], alpha=float(self.patterns[step, a] - current[a]))
            current = self.patterns[step]
        return out

    def _order(self) -> np.ndarray:
        n, a = self.patterns.shape
        if n == 2**a:
            i = np.arange(n)
            return i ^ (i >> 1)
        return np.arange(n)


def binary_patterns(n_axes: int) -> np.ndarray:
    """(2^A, A) all patterns; bit a of the row number is column a."""
    return (np.arange(2**n_axes)[:, None] >> np.arange(n_axes)) & 1


def binary_candidates(
    x: Tensor, weights: np.ndarray, deltas: Sequence[Tensor] | Tensor, axes: np.ndarray, n_axes: int
) -> Candidates:
    """All 2^A combinations of two probes. deltas: S tensors of shape (2, n); axes: (S,) axis of each client.

    An axis without clients has a zero direction.
    """
    base = x.to(torch.float64, copy=True)
    directions = torch.zeros(n_axes, x.numel(), dtype=x.dtype, device=x.device)
    for a, delta, axis in zip(weights, deltas, axes, strict=True):
        base += delta[0].double().mul_(float(a))
        directions[int(axis)].add_(delta[1] - delta[0], alpha=float(a))
    return Candidates(base.to(x.dtype), directions, binary_patterns(n_axes))


def uniform_candidates(x: Tensor, weights: np.ndarray, deltas: Sequence[Tensor] | Tensor) -> Candidates:
    """P models, model j taking probe j at every client. deltas: S tensors of shape (P, n)."""
    models = x.double().repeat(deltas[0].shape[0], 1)
    for a, delta in zip(weights, deltas, strict=True):
        models.add_(delta.double(), alpha=float(a))
    return _from_first(models[0].to(x.dtype), (models[1:] - models[0]).to(x.dtype))


def separate_candidates(models: Sequence[Tensor]) -> Candidates:
    """Models (n,) that are no sums of clients' directions, as the first and the way from there to each other one."""
    return _from_first(
        models[0],
        torch.stack([m - models[0] for m in models[1:]]) if models[1:] else models[0].new_zeros(0, len(models[0])),
    )


def _from_first(base: Tensor, directions: Tensor) -> Candidates:
    patterns = np.concatenate([np.zeros((1, len(directions)), dtype=np.int64), np.eye(len(directions), dtype=np.int64)])
    return Candidates(base, directions, patterns)
