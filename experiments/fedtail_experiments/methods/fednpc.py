"""FedNPC (Gao et al., 2026): the classifier is trained on noise after the last round.

Training is FedAvg's. Then the server draws features from N(0, I), labels that have nothing to do with them, and takes
``steps`` steps of gradient descent with momentum .9 on the output layer alone, each on a fresh draw: a layer that must
not tell noise apart becomes less sure of the classes it prefers. It keeps the step that is best on the clients' private
validation splits, the one before the first included; the authors' code keeps the one that is best on the test set.
Every ``every``-th step is compared. Where nobody can validate, all steps are taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.core.random import torch_seed
from fedtail.core.records import Tensors
from fedtail.errors import check_range
from fedtail.methods.base import Method, Server

MOMENTUM = 0.9


@dataclass(frozen=True)
class FedNPC(Method):
    """``steps = 0`` is FedAvg."""

    title = "FedNPC"
    paper = (
        "Gao et al., FedNPC: Stochastic Noise-driven Post-hoc Classifier Calibration Method for Federated Long-tailed "
        "Learning, CVPR Findings 2026"
    )
    wire = "nothing up but counts of right answers, as for validation; after the last round, a few models down"

    steps: int = 27
    """Steps on noise; the authors' code takes so many."""
    every: int = 3
    """Steps between two that are compared."""
    noise: int = 10_000
    """Features per step."""
    step_lr: float = 0.1
    """Learning rate of these steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.steps", self.steps, 0)
        check_range("method.every", self.every, 1)
        check_range("method.noise", self.noise, 1)
        check_range("method.step_lr", self.step_lr, 0.0, open_low=True)

    def conclude(self, server: Server, state: Tensors) -> Tensor:
        if not self.steps:
            return server.x
        rng = torch.Generator().manual_seed(torch_seed(server.seed, "fednpc"))
        weight, bias = (t.detach().float().cpu() for t in server.classifier(server.x))
        layers = on_noise(weight, bias, rng, steps=self.steps, noise=self.noise, lr=self.step_lr)
        models = [
            server.x,
            *(server.with_classifier(server.x, *layer) for layer in layers[self.every - 1 :: self.every]),
        ]
        if self.steps % self.every:
            models.append(server.with_classifier(server.x, *layers[-1]))
        values = server.compare(models)
        return models[int(np.argmax(values))] if np.isfinite(values).all() else models[-1]


def on_noise(
    weight: Tensor, bias: Tensor, rng: torch.Generator, *, steps: int, noise: int, lr: float
) -> list[tuple[Tensor, Tensor]]:
    """The layer after each of the steps, each on its own noise. weight: (C, d); bias: (C,)."""
    velocity_w, velocity_b = torch.zeros_like(weight), torch.zeros_like(bias)
    layers = []
    for _ in range(steps):
        labels = torch.randint(0, len(bias), (noise,), generator=rng)
        features = torch.randn(noise, weight.shape[1], generator=rng)
        off = (torch.softmax(features @ weight.T + bias, 1) - F.one_hot(labels, len(bias))) / noise
        velocity_w = MOMENTUM * velocity_w + off.T @ features
        velocity_b = MOMENTUM * velocity_b + off.sum(0)
        weight, bias = weight - lr * velocity_w, bias - lr * velocity_b
        layers.append((weight, bias))
    return layers
