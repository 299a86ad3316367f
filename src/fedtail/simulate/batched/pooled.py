"""Evaluation on pooled rows: candidates, test set and clients' losses in large batches instead of client by client."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.methods.base import cross_entropy
from fedtail.rounds.evaluation import Split
from fedtail.simulate.batched.network import Network
from fedtail.simulate.batched.step import Kernel

CHUNK = 4096
"""Samples in one pass of one model."""
CANDIDATES, CANDIDATE_CHUNK = 32, 256
"""Models and samples in one pass of candidates: activations stay in the cache, memory is O(K) model vectors."""


@torch.no_grad()
def logits(kernel: Kernel, x: Tensor, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
    """(m, C, b) logits of models (m, d) on the same samples, and their labels (b,), chunk by chunk."""
    for inputs, y in split.batches(max(CHUNK // len(x), 64)):
        yield kernel.answers(x, inputs.expand(len(x), *inputs.shape)), y


def logits_each(kernel: Kernel, x: Tensor, split: Split) -> list[list[tuple[Tensor, Tensor]]]:
    """Of every model of (m, d): its (b, C) logits and the labels, chunk by chunk."""
    parts = list(logits(kernel, x, split))
    return [[(z[i].T, y) for z, y in parts] for i in range(len(x))]


@torch.no_grad()
def confusions(kernel: Kernel, x: Tensor, split: Split) -> np.ndarray:
    """(m, C, C) confusion matrices of models (m, d)."""
    total = np.zeros((len(x), split.n_classes, split.n_classes), dtype=np.int64)
    for z, y in logits(kernel, x, split):
        total += _count(z, y, split.n_classes)
    return total


@torch.no_grad()
def losses(kernel: Kernel, x: Tensor, split: Split) -> Tensor:
    """(m, len(split)) unweighted cross-entropy of each sample under models (m, d)."""
    parts = [cross_entropy(z.transpose(1, 2), y.expand(len(x), -1)) for z, y in logits(kernel, x, split)]
    return torch.cat(parts, 1) if parts else torch.empty(len(x), 0)


@torch.no_grad()
def candidate_confusions(kernel: Kernel, candidates: Candidates, split: Split) -> np.ndarray:
    """(N, C, C) confusion matrix of every candidate."""
    total = np.zeros((len(candidates), split.n_classes, split.n_classes), dtype=np.int64)
    patterns = torch.as_tensor(candidates.patterns, dtype=candidates.base.dtype)
    for inputs, y in split.batches(CANDIDATE_CHUNK):
        for i in range(0, len(candidates), CANDIDATES):
            on = patterns[i : i + CANDIDATES]
            if isinstance(kernel, Network):
                z = kernel.affine_logits(candidates.base, candidates.directions, on, inputs)
            else:
                models = candidates.base + on @ candidates.directions
                z = kernel.answers(models, inputs.expand(len(models), *inputs.shape))
            total[i : i + CANDIDATES] += _count(z, y, split.n_classes)
    return total


def _count(z: Tensor, y: Tensor, n_classes: int) -> np.ndarray:
    """(m, C, C) confusion matrices from logits (m, C, b) and labels (b,)."""
    guess = (z[:, 1] > z[:, 0]).long() if n_classes == 2 else z.argmax(1)
    cells = guess + y * n_classes + torch.arange(len(z)).unsqueeze(1) * n_classes**2
    counts = torch.bincount(cells.view(-1), minlength=len(z) * n_classes**2)
    return counts.view(len(z), n_classes, n_classes).numpy()
