"""Evaluation on pooled rows: candidates, test set and clients' losses in large batches instead of client by client."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.data.federation import Samples, Transform
from fedtail.methods.base import cross_entropy
from fedtail.simulate.batched.network import Network
from fedtail.simulate.batched.step import Kernel

CHUNK = 4096
"""Samples in one pass of one model."""
CANDIDATES, CANDIDATE_CHUNK = 32, 256
"""Models and samples in one pass of candidates: activations stay in the cache, memory is O(K) model vectors."""


def _chunks(data: Samples, rows: np.ndarray | None, transform: Transform, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels of ``rows`` (all, if None), ``size`` at a time."""
    n = len(data) if rows is None else len(rows)
    for i in range(0, n, size):
        if rows is None:
            x, y = data.x[i : i + size], data.y[i : i + size]
        else:
            index = torch.as_tensor(rows[i : i + size])
            x, y = data.x.index_select(0, index), data.y.index_select(0, index)
        yield transform(x), y


def logits(kernel: Kernel, x: Tensor, data: Samples, rows: np.ndarray | None, transform: Transform) -> Iterator:
    """(m, C, b) logits of models (m, d) on the same samples, and their labels (b,), chunk by chunk."""
    for inputs, y in _chunks(data, rows, transform, max(CHUNK // len(x), 64)):
        yield kernel.forward(x, inputs.expand(len(x), *inputs.shape))[0], y


@torch.no_grad()
def confusions(
    kernel: Kernel, x: Tensor, data: Samples, rows: np.ndarray | None, transform: Transform, n_classes: int
) -> np.ndarray:
    """(m, C, C) confusion matrices of models (m, d)."""
    total = np.zeros((len(x), n_classes, n_classes), dtype=np.int64)
    for z, y in logits(kernel, x, data, rows, transform):
        total += _count(z, y, n_classes)
    return total


@torch.no_grad()
def losses(kernel: Kernel, x: Tensor, data: Samples, rows: np.ndarray, transform: Transform) -> Tensor:
    """(m, len(rows)) unweighted cross-entropy of each sample under models (m, d)."""
    parts = [
        cross_entropy(z.transpose(1, 2), y.expand(len(x), -1)) for z, y in logits(kernel, x, data, rows, transform)
    ]
    return torch.cat(parts, 1) if parts else torch.empty(len(x), 0)


@torch.no_grad()
def candidate_confusions(
    kernel: Kernel, candidates: Candidates, data: Samples, rows: np.ndarray, transform: Transform, n_classes: int
) -> np.ndarray:
    """(N, C, C) confusion matrix of every candidate."""
    total = np.zeros((len(candidates), n_classes, n_classes), dtype=np.int64)
    patterns = torch.as_tensor(candidates.patterns, dtype=candidates.base.dtype)
    for inputs, y in _chunks(data, rows, transform, CANDIDATE_CHUNK):
        for i in range(0, len(candidates), CANDIDATES):
            on = patterns[i : i + CANDIDATES]
            if isinstance(kernel, Network):
                z = kernel.affine_logits(candidates.base, candidates.directions, on, inputs)
            else:
                models = candidates.base + on @ candidates.directions
                z, _ = kernel.forward(models, inputs.expand(len(models), *inputs.shape))
            total[i : i + CANDIDATES] += _count(z, y, n_classes)
    return total


def _count(z: Tensor, y: Tensor, n_classes: int) -> np.ndarray:
    """(m, C, C) confusion matrices from logits (m, C, b) and labels (b,)."""
    guess = (z[:, 1] > z[:, 0]).long() if n_classes == 2 else z.argmax(1)
    cells = guess + y * n_classes + torch.arange(len(z)).unsqueeze(1) * n_classes**2
    counts = torch.bincount(cells.view(-1), minlength=len(z) * n_classes**2)
    return counts.view(len(z), n_classes, n_classes).numpy()
