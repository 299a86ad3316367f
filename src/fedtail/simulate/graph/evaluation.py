"""Models on many samples at once: candidate validation, test confusion and clients' losses, on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.simulate.graph.network import DeviceModel
from fedtail.simulate.graph.recorder import Recorder
from fedtail.simulate.graph.step import Resident

LARGEST, GRAIN = 1024, 64
"""A recorded evaluation takes at most LARGEST samples; sizes are multiples of GRAIN."""


class Evaluator:
    """Logits of any model vector on any rows of the resident pool, as recorded graphs on CUDA."""

    def __init__(self, model: DeviceModel, resident: Resident, n_classes: int) -> None:
        self.model, self.resident, self.n_classes = model, resident, n_classes
        self.network = model.network(training=False)
        self.layout, self.device = model.layout, model.numerics.device
        self.params = resident.start[: self.layout.n_params].to(model.numerics.weights, copy=True)
        self.rest = resident.start[self.layout.n_params :].clone()
        self.rows = torch.zeros(LARGEST, dtype=torch.int64, device=self.device)
        self.cuda = self.device.type == "cuda"
        self.recorder = Recorder(self.device)
        self.recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def load(self, x: Tensor) -> None:
        """Evaluate model ``x`` (n,) from now on."""
        d = self.layout.n_params
        self.params.copy_(self.layout.inward(x[:d]))
        self.rest.copy_(x[d:])

    @torch.no_grad()
    def logits(self, x: Tensor, index: np.ndarray) -> Tensor:
        """(len(index), C) float32 logits of model ``x``."""
        self.load(x.to(self.device))
        parts = [self._run(rows)[:real].clone() for rows, real in self._chunks(index)]
        return torch.cat(parts) if parts else torch.empty(0, self.n_classes, device=self.device)

    @torch.no_grad()
    def confusion(self, x: Tensor, index: np.ndarray) -> np.ndarray:
        """(C, C) confusion matrix of model ``x``; row = true class."""
        self.load(x.to(self.device))
        total = torch.zeros(self.n_classes**2, dtype=torch.int64, device=self.device)
        self._count(total, self._chunks(index))
        return total.view(self.n_classes, self.n_classes).cpu().numpy()

    @torch.no_grad()
    def counts(self, candidates: Candidates, index: np.ndarray) -> np.ndarray:
        """(N, 3, C) correct, true and predicted samples per class of every candidate; one copy to the host."""
        c = self.n_classes
        chunks = self._chunks(index)
        total = torch.zeros(len(candidates), c * c, dtype=torch.int64, device=self.device)
        for s, vector in candidates.walk():
            self.load(vector)
            self._count(total[s], chunks)
        m = total.view(-1, c, c)
        return torch.stack([m.diagonal(dim1=1, dim2=2), m.sum(2), m.sum(1)], dim=1).cpu().numpy()

    def _count(self, total: Tensor, chunks: list[tuple[Tensor, int]]) -> None:
        for rows, real in chunks:
            guess = self._run(rows)[:real].argmax(-1)
            true = self.resident.y[rows[:real]]
            total.index_add_(0, true * self.n_classes + guess, torch.ones_like(guess))

    def _chunks(self, index: np.ndarray) -> list[tuple[Tensor, int]]:
        """Rows on the device in even pieces, filled up to the recorded sizes."""
        n = len(index)
        if n == 0:
            return []
        pieces = np.array_split(np.asarray(index, dtype=np.int64), -(-n // LARGEST))
        out = []
        for piece in pieces:
            size = -(-len(piece) // GRAIN) * GRAIN if self.cuda else len(piece)
            filled = np.concatenate([piece, np.full(size - len(piece), piece[0])])
            out.append((torch.as_tensor(filled).to(self.device), len(piece)))
        return out

    def _run(self, rows: Tensor) -> Tensor:
        if not self.cuda:
            return self._call(rows)
        n = len(rows)
        self.rows[:n].copy_(rows)
        if n not in self.recorded:
            self.recorded[n] = self._record(n)
        graph, out = self.recorded[n]
        graph.replay()
        return out

    def _call(self, rows: Tensor) -> Tensor:
        x = self.model.inputs(self.resident.x, rows)
        return self.network([self.layout.named(self.params)], self.rest, x, (len(rows),))

    def _record(self, n: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self.model.numerics.apply()
        out = torch.empty(n, self.n_classes, device=self.device)
        return self.recorder.record(lambda: out.copy_(self._call(self.rows[:n].clone())), lambda: None), out
