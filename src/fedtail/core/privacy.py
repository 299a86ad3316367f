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

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedtail.core.random import generator
from fedtail.errors import FedtailError


def draw_noise(n: int, deviation: float, seed: int | None, purpose: str, client: int, round: int) -> Tensor:
    """(n,) Gaussian noise in float32. ``seed`` None draws from the system's entropy, as a real federation must:
    whoever knows the seed of a keyed generator can take the noise off again."""
    rng = np.random.default_rng() if seed is None else generator(seed, purpose, client, round)
    return torch.as_tensor(rng.normal(0.0, deviation, n).astype(np.float32))


def limit(bound: float) -> float:
    """The largest norm that is accepted under a bound: a little slack for floating point, part of the sensitivity."""
    return bound * (1 + 1e-4) + 1e-6


def noisy_limit(bound: float, noise: float, n: int) -> float:
    """The same for an update that carries local noise: a Gaussian in n dimensions has norm about sqrt(n)."""
    return limit(bound) * (1 + noise * (np.sqrt(n) + 6.0))


def sensitivity(weights: Sequence[float] | np.ndarray, bounds: Sequence[float] | np.ndarray) -> float:
    """How far one site can move the aggregate sum_k a_k delta_k: max_k a_k B_k."""
    return float(np.max(np.abs(np.asarray(weights)) * [limit(b) for b in bounds]))


@lru_cache(maxsize=4096)
def epsilon(noise: float, releases: int, delta: float) -> float:
    """(epsilon, delta) of ``releases`` Gaussian mechanisms with multiplier ``noise``, by Renyi accounting."""
    try:
        from opacus.accountants import RDPAccountant
    except ImportError:
        raise FedtailError("privacy needs an accountant; pip install 'fedtail[privacy]'") from None
    if releases == 0:
        return 0.0
    accountant = RDPAccountant()
    accountant.history = [(noise, 1.0, releases)]
    return float(accountant.get_epsilon(delta))
