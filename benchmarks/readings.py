"""Interpretations of the paper's step that the product does not offer, as methods of one's own.

    fedtail reproduce table-iid --scale full --only C10-100 --only K=5 --only "FedCGNM + U" --seeds 1 --device cuda \
        method.name=benchmarks/readings.py:DecayInside method.weight_decay=1e-3

The paper says neither where weight decay enters a normalized step (it searched 1e-4 and 1e-3; outside the norm, as the
product has it, CIFAR-10 wants 5e-3) nor, in so many words, that norms are over all parameters jointly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from fedtail.core.momentum import group_momentum, like
from fedtail.core.records import Tensors
from fedtail.methods.base import LocalStep
from fedtail.methods.fedcgnm import FedCGNM
from fedtail.models import MODELS

NETWORKS = ("resnet8", "resnet18")


@dataclass(frozen=True)
class DecayInside(FedCGNM):
    """Weight decay as a part of every group's loss, so that it is normalized with the gradient:

        m_h <- beta m_h + (1 - beta) (g_h + (weight_decay / H) x)

    It grows as gradients become small."""

    def direction(self, step: LocalStep) -> tuple[Tensor, Tensors]:
        decay = like(step.hyper["weight_decay"], step.x) * step.x
        inside = step.grads + (decay / step.grads.shape[-2]).unsqueeze(-2)
        direction, state = super().direction(step._replace(grads=inside))
        return direction - decay, state  # what an engine adds afterwards


@dataclass(frozen=True)
class NormPerTensor(FedCGNM):
    """Every weight tensor's part of a momentum divided by its own norm, so that all tensors move equally far."""

    def direction(self, step: LocalStep) -> tuple[Tensor, Tensors]:
        momentum = group_momentum(step.state["momentum"], step.grads, step.hyper["beta"])
        delta = like(step.hyper["delta"], momentum)
        parts = [
            (m / (torch.linalg.vector_norm(m, dim=-1, keepdim=True) + delta)).sum(dim=-2)
            for m in momentum.split(tensor_sizes(momentum.shape[-1]), dim=-1)
        ]
        return torch.cat(parts, dim=-1), {**step.state, "momentum": momentum}


@cache
def tensor_sizes(n_params: int) -> Sequence[int]:
    """How many of a network's parameters each of its tensors has, told by their number."""
    for name, n_classes, width in product(NETWORKS, (10, 100), (16, 64)):
        network = MODELS.build(name, (3, 32, 32), n_classes, width=width, norm_groups=1)
        sizes = [p.numel() for p in network.parameters()]
        if sum(sizes) == n_params:
            return sizes
    raise SystemExit(f"a model of {n_params} parameters is none of {', '.join(NETWORKS)} on CIFAR")
