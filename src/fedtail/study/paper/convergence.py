"""The convergence bound on a problem where everything is known (paper theorem 3.6).

Client k's objective at rate r has two groups, f_{k,h}(x; r) = S_h(r)/2 ||x - c_{k,h}||^2, with majority mass
S_0(r) = 1 / (1 + q^{1-r}) and S_1 = 1 - S_0: resampling moves mass from the majority's optimum to the minority's. So
smoothness is L = 1, gradients are known in closed form, and noise of standard deviation sigma is added to them.
With eta ~ T^(-1/2) the paper's bound is

    (1/T) sum_t ||grad f^(t)(x^t)||^2 <= O(T^(-1/2)) + O(V_T T^(-1/2)).

Two readings come out. With a stabiliser well above the gradients (delta = 10, where steps are nearly plain gradients),
rates that settle let the gradient vanish and rates that oscillate for ever leave a floor: the V_T term. With the
paper's delta = 0.1 there is a floor also at constant rates: normalized group steps come to rest where the *unit
vectors* cancel, not where the gradients do, which the theorem's assumptions exclude.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fedtail.core.metrics import path_variation
from fedtail.core.momentum import cgnm_direction
from fedtail.core.random import generator

Path = Callable[[int, int], float]
"""(round, T) -> rate."""

PATHS: dict[str, Path] = {
    "constant": lambda t, rounds: 0.6,
    "drifting": lambda t, rounds: 0.6 + 0.2 / (1 + t),
    "oscillating": lambda t, rounds: 0.4 if t % 2 else 0.8,
}


@dataclass(frozen=True)
class Point:
    """One run of T rounds."""

    path: str
    delta: float
    rounds: int
    seed: int
    mean: float
    """Squared gradient norm, averaged over all rounds: what the theorem bounds."""
    late: float
    """The same over the last quarter of the rounds."""
    variation: float
    """V_T of the rates."""


def run_path(
    name: str,
    rounds: int,
    seed: int,
    *,
    clients: int = 5,
    dim: int = 20,
    steps: int = 5,
    sigma: float = 0.1,
    ratio: float = 0.05,
    beta: float = 0.5,
    delta: float = 0.1,
    scale: float = 1.0,
) -> Point:
    """FedCGNM for ``rounds`` rounds with eta = ``scale`` / sqrt(T); ``ratio``: minority to majority mass at rate 0."""
    rng = generator(seed, "convergence")
    # Optima differ mostly between groups, which clients share: what resampling trades off.
    shared = rng.standard_normal((1, 2, dim))
    optima = torch.as_tensor(shared + 0.3 * rng.standard_normal((clients, 2, dim)))
    x = torch.as_tensor(2.0 * rng.standard_normal(dim))
    eta = scale / math.sqrt(rounds)
    rates, squared = [], []
    for t in range(rounds):
        rate = PATHS[name](t, rounds)
        majority = 1.0 / (1.0 + ratio ** (1.0 - rate))
        mass = torch.tensor([majority, 1.0 - majority], dtype=torch.float64)[None, :, None]
        squared.append(float((mass * (x - optima)).sum(1).mean(0).pow(2).sum()))
        rates.append(np.full(clients, rate))
        local = x.expand(clients, dim).clone()
        momentum = torch.zeros(clients, 2, dim, dtype=torch.float64)
        for _ in range(steps):
            noise = torch.as_tensor(sigma / math.sqrt(dim) * rng.standard_normal((clients, 2, dim)))
            grads = mass * (local[:, None] - optima) + noise
            direction, momentum = cgnm_direction(momentum, grads, beta, delta)
            local = local - eta * direction
        x = local.mean(0)
    variation = float(path_variation(np.array(rates), np.full(clients, 1 / clients))[-1])
    late = float(np.mean(squared[-max(1, rounds // 4) :]))
    return Point(name, delta, rounds, seed, float(np.mean(squared)), late, variation)


def run_convergence(horizons: tuple[int, ...], seeds: int) -> list[Point]:
    """Every path at every horizon and seed, with the paper's delta and with one far above the gradients.

    The step scale grows with delta, since m / (||m|| + delta) is about m / delta there.
    """
    return [
        run_path(name, rounds, seed, delta=delta, scale=scale)
        for delta, scale in ((0.1, 0.5), (10.0, 5.0))
        for name in PATHS
        for rounds in horizons
        for seed in range(seeds)
    ]
