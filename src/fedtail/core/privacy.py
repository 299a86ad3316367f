"""Gaussian noise on updates, with CGNM's own norm bound as the sensitivity, and what it is worth.

A CGNM round moves a client by less than lr * steps * H, by construction: no update is clipped, and one
beyond the bound is refused anyway. Two places for the noise:

- ``central``: sites trust the server. It adds noise of z * max_k a_k B_k to the aggregate sum_k a_k delta_k, and
  epsilon covers a site's whole contribution to the models: two runs that differ in whether one site's updates
  are there (or zero) are hard to tell apart from the sequence of global models.
- ``local``: nobody is trusted. Every site adds noise of z * B_k to each update before it leaves, and epsilon covers
  the update as seen by the server, again there or zero; a round with two probes costs two releases. Two updates can
  be 2 B_k apart: which of two a site sent is hidden as well as epsilon at half the noise says.

Epsilon covers updates and what is made of them. Sample counts, mean losses and validation counts are sent as they
are; numbers of steps are taken as public. No gain from sampling of clients is claimed.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from fedtail.core.random import generator

CHUNK = 1 << 18
DELTA = 1e-5
"""The delta that epsilon of a run is told for."""


def draw_noise(n: int, deviation: float, seed: int | bytes | None, purpose: str, client: int, round: int) -> Tensor:
    """(n,) Gaussian noise in float32. A number is the seed of a simulation, which can be repeated. A real federation
    draws from a cryptographic stream, since whoever guesses a generator's state can take the noise off again: keyed by
    a secret and the purpose, or by nothing but the system's entropy (None)."""
    if isinstance(seed, int):
        drawn = generator(seed, purpose, client, round).normal(0.0, deviation, n)
    else:
        drawn = deviation * secure_normal(os.urandom(32) if seed is None else seed, purpose, n)
    return torch.as_tensor(drawn.astype(np.float32))


def secure_normal(secret: bytes, purpose: str, n: int) -> np.ndarray:
    """(n,) standard normal float64: SHAKE-256 of secret and purpose, by Box and Muller's transform."""
    key = hashlib.sha256(len(secret).to_bytes(8, "big") + secret + purpose.encode()).digest()
    out = np.empty(n)
    for start in range(0, n, CHUNK):
        size = min(CHUNK, n - start)
        half = -(-size // 2)
        bits = hashlib.shake_256(key + start.to_bytes(8, "big")).digest(16 * half)
        uniform = ((np.frombuffer(bits, dtype="<u8") >> np.uint64(11)) + 0.5) * 2.0**-53
        radius, angle = np.sqrt(-2.0 * np.log(uniform[:half])), 2 * np.pi * uniform[half:]
        out[start : start + size] = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]
    return out


def limit(bound: float) -> float:
    """The largest norm that is accepted under a bound: a little slack for floating point, part of the sensitivity."""
    return bound * (1 + 1e-4) + 1e-6


def noisy_limit(bound: float, noise: float, n: int) -> float:
    """The largest norm that is accepted with local noise: a Gaussian in n dimensions has norm about sqrt(n)."""
    return limit(bound) * (1 + noise * (np.sqrt(n) + 6.0))


def sensitivity(weights: Sequence[float] | np.ndarray, bounds: Sequence[float] | np.ndarray) -> float:
    """How far one site can move the aggregate sum_k a_k delta_k: max_k a_k B_k."""
    return float(np.max(np.abs(np.asarray(weights)) * [limit(b) for b in bounds]))


def gaussian_epsilon(releases: Mapping[float, int], delta: float) -> float:
    """The exact epsilon of Gaussian releases together, noise multiplier -> how many: they compose to one Gaussian of
    multiplier 1 / mu, mu^2 = sum of n / z^2 (Dong, Roth and Su, 2022), whose curve is known (Balle and Wang, 2018).
    """
    mu = math.sqrt(sum(n / z**2 if z else math.inf for z, n in releases.items() if n))
    if not 0 < mu < math.inf:
        return mu
    low, high = 0.0, mu * (mu / 2 + 40)
    if gaussian_delta(mu, low) <= delta:
        return 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(mu, middle) > delta else (low, middle)
    return high


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The delta at which one Gaussian release of multiplier 1 / mu has this epsilon."""
    upper, lower = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    return max(0.0, NormalDist().cdf(upper) - math.exp(epsilon + log_cdf(lower)))


def log_cdf(x: float) -> float:
    """log of the standard normal distribution function; far out by its asymptotic series, where the function is 0."""
    if x > -30:
        return math.log(math.erfc(-x / math.sqrt(2)) / 2)
    return -x * x / 2 - math.log(-x) - math.log(2 * math.pi) / 2 + math.log1p(-1 / x**2 + 3 / x**4)
