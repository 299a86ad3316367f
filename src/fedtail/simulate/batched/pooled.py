"""Evaluation on pooled rows: candidates, test set and clients' losses in large batches instead of client by client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.rounds.evaluation import Split
from fedtail.simulate.batched.network import Network
from fedtail.simulate.batched.step import AnyKernel

T = TypeVar("T")
R = TypeVar("R")

CHUNK, LEAST_CHUNK = 4096, 256
"""Samples in one pass of one model: as many as one core is busy with for some milliseconds, so that workers share."""
CHUNK_FLOPS = 2.5e8
CANDIDATES, CANDIDATE_CHUNK = 32, 256
"""Models and samples in one pass of candidates: activations stay in the cache, memory is O(K) model vectors."""


class Spread(Protocol):
    """Gives pieces to workers, each with a kernel of its own; see ``Workers.map``."""

    def __call__(self, work: Callable[[AnyKernel, T], R], pieces: Sequence[T], operations: float) -> list[R]: ...


class Pooled:
    """Models on the rows of many clients. Chunks depend on the model alone, so results do not depend on workers."""

    def __init__(self, spread: Spread, sample_flops: int) -> None:
        self.spread, self.sample_flops = spread, sample_flops
        self.chunk = CHUNK
        while self.chunk > LEAST_CHUNK and self.chunk * sample_flops > CHUNK_FLOPS:
            self.chunk //= 2

    def logits_each(self, x: Tensor, split: Split) -> list[list[tuple[Tensor, Tensor]]]:
        """Return (b, C) logits and the labels, chunk by chunk, for every model of (m, d)."""

        @torch.no_grad()
        def piece(kernel: AnyKernel, part: slice) -> tuple[Tensor, Tensor]:
            inputs, y = split.batch(part)
            return kernel.answers(x, inputs.expand(len(x), *inputs.shape)), y

        operations = float(len(x) * len(split) * self.sample_flops)
        parts = self.spread(piece, split.parts(max(self.chunk // len(x), 64)), operations)
        return [[(z[i].T, y) for z, y in parts] for i in range(len(x))]

    def candidate_confusions(self, candidates: Candidates, split: Split) -> np.ndarray:
        """(N, C, C) confusion matrix of every candidate."""
        patterns = torch.as_tensor(candidates.patterns, dtype=candidates.base.dtype)

        @torch.no_grad()
        def piece(kernel: AnyKernel, part: slice) -> np.ndarray:
            counts, (inputs, y) = [], split.batch(part)
            for i in range(0, len(candidates), CANDIDATES):
                on = patterns[i : i + CANDIDATES]
                if isinstance(kernel, Network):
                    z = kernel.affine_logits(candidates.base, candidates.directions, on, inputs)
                else:
                    models = candidates.base + on @ candidates.directions
                    z = kernel.answers(models, inputs.expand(len(models), *inputs.shape))
                counts.append(_count(z, y, split.n_classes))
            return np.concatenate(counts)

        total = np.zeros((len(candidates), split.n_classes, split.n_classes), dtype=np.int64)
        operations = float(len(candidates) * len(split) * self.sample_flops)
        return sum(self.spread(piece, split.parts(CANDIDATE_CHUNK), operations), total)


def _count(z: Tensor, y: Tensor, n_classes: int) -> np.ndarray:
    """(m, C, C) confusion matrices from logits (m, C, b) and labels (b,)."""
    guess = (z[:, 1] > z[:, 0]).long() if n_classes == 2 else z.argmax(1)
    cells = guess + y * n_classes + torch.arange(len(z)).unsqueeze(1) * n_classes**2
    counts = torch.bincount(cells.view(-1), minlength=len(z) * n_classes**2)
    return counts.view(len(z), n_classes, n_classes).numpy()
