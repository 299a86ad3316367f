"""From accepted updates to one step of the global model, by ``server.aggregate``, and the part of each client in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.candidates import Candidates, binary_candidates, uniform_candidates
from fedtail.core.movement import alignment
from fedtail.core.records import Tensors, Update
from fedtail.core.robust import bounded, centre, distances, fairly, krum, suspected
from fedtail.errors import FedtailError
from fedtail.rates.base import RateStrategy
from fedtail.rounds.plan import OPTIMIZER
from fedtail.rounds.state import Problem
from fedtail.settings import ServerSettings, Settings

PIECES = 256
"""Inner products of updates are summed in so many pieces, which a GPU computes at the same time."""
STACKED, STACKED_OF_MORE = 1 << 26, 1 << 24
"""So many values of all updates are stacked in float64 at once; of more, only so many at a time."""
FAR, AGAINST = 3.0, -0.95
"""An update is flagged that is farther from the centre than so many medians of that distance, or whose cosine to the
sum of all others is lower."""
SUMMED = 1 << 18
"""Parameters of which updates are summed at once."""
REACH = 1.5
"""Medians of the distance from the centre within which ``bounded`` draws updates."""
SUSPECTS = 0.2
"""Share of the sites that may be hostile, which ``krum`` drops."""


def rule_of(settings: Settings, real: bool) -> str:
    """Return the rule in force: ``bounded`` for ``auto`` at real sites, unless central privacy needs a mean."""
    if settings.server.aggregate != "auto":
        return settings.server.aggregate
    return "bounded" if real and settings.privacy.mode != "central" else "mean"


def limited(weights: np.ndarray, server: ServerSettings, real: bool) -> np.ndarray:
    """The weights with none above the share that one site can have: a site's size is what it claims."""
    if real and server.aggregate != "mean":
        return fairly(weights)
    return weights


def check_aggregate(problem: Problem, settings: Settings) -> None:
    """Refuse a rule that breaks a promise."""
    rule = rule_of(settings, problem.real)
    if rule != "mean" and settings.privacy.mode == "central":
        raise FedtailError(
            f"server.aggregate = {rule!r}: the noise of privacy.mode = 'central' is calibrated for a mean; use 'mean' "
            "or 'auto'"
        )


class Gathered:
    """A round's updates as the model takes them: ``updates`` drawn towards the centre and ``weights`` capped, where the
    rule says so."""

    def __init__(self, problem: Problem, settings: Settings, updates: Sequence[Update], weights: np.ndarray) -> None:
        server = settings.server
        self.raw, self.server = updates, server
        summed = any(u.members for u in updates)  # sums of clients, which nothing can be told of each
        self.rule = rule_of(settings, problem.real) if len(updates) > 2 and not summed else "mean"
        self.updates, self.weights = list(updates), weights if summed else limited(weights, server, problem.real)
        self.mix = np.eye(len(updates))
        """What each update was made of: row k of (S, S) is in terms of the updates as they came."""
        self._grams: dict[tuple[int, ...], np.ndarray] = {}
        if self.rule == "krum":
            self.weights = krum(self._all_probes(), self.weights, suspected(len(updates), SUSPECTS))
        elif self.rule == "bounded":
            factors, middle = bounded(self._all_probes(), REACH)
            if (factors < 1).any():
                parts = (u.delta.double() * float(w) for u, w in zip(updates, middle, strict=True))
                there = sum(parts, torch.zeros((), dtype=torch.float64))
                self.mix = np.diag(factors) + np.outer(1 - factors, middle)
                self.updates = [
                    _drawn(u, float(s), there) if s < 1 else u for u, s in zip(updates, factors, strict=True)
                ]

    def combine(self, x: Tensor, choice: np.ndarray) -> Tensor:
        """The aggregate of every client's chosen probe."""
        return combine(x, self.weights, self.updates, choice)

    def candidates(self, x: Tensor, rates: RateStrategy, present: np.ndarray) -> Candidates | None:
        """The models that the strategy wants compared; None if it compares none."""
        wanted, deltas = rates.patterns(), [u.delta for u in self.updates]
        if wanted is None:
            return None
        if wanted == "binary":
            return binary_candidates(x, self.weights, deltas, rates.axes[present], rates.n_axes)
        return uniform_candidates(x, self.weights, deltas)

    def diagnostics(self, choice: np.ndarray, p: np.ndarray, real: bool, wanted: Collection[str]) -> dict[str, Any]:
        """Return the part of the round's record that is about updates; ``influence`` always in a real federation, and
        nothing of sums, in which single clients cannot be told."""
        if any(u.members for u in self.raw):
            return {}
        out: dict[str, Any] = {"alignment": alignment(self.gram(choice), p)} if "alignment" in wanted else {}
        return {**out, "influence": self.influence(choice)} if real or "influence" in wanted else out

    def gram(self, choice: np.ndarray) -> np.ndarray:
        """(S, S) inner products of the chosen updates, as they came."""
        key = tuple(choice.tolist())
        if key not in self._grams:
            self._grams[key] = inner_products([u.delta for u in self.raw], choice).cpu().numpy()
        return self._grams[key]

    def _all_probes(self) -> np.ndarray:
        """(S, S) inner products of all probes of a site as one vector: one that is far in any of them is far."""
        n, probes = len(self.raw), len(self.raw[0].steps)
        return np.sum([self.gram(np.full(n, p, dtype=np.int64)) for p in range(probes)], axis=0)

    def influence(self, choice: np.ndarray) -> dict[str, Any]:
        """For the round's record: along the clients, how long each update was and how it lay to the others', what the
        server made of it, and who is far from all others."""
        gram, n, a = self.gram(choice), len(self.raw), self.weights
        norm, taken = np.sqrt(np.diag(gram)), self.mix @ gram @ self.mix.T
        along = (gram @ self.mix.T * (1 - np.eye(n))) @ a  # with the sum of all others, as they were taken
        rest = np.sqrt(np.maximum(a @ taken @ a - 2 * a * (taken @ a) + a**2 * np.diag(taken), 0.0))
        cosine = np.full(n, np.nan)
        cosine[norm * rest > 0] = (along / np.where(norm * rest > 0, norm * rest, 1.0))[norm * rest > 0]
        apart = distances(gram, centre(gram)) if n > 2 else np.zeros(n)
        usual = float(np.median(apart))
        away = apart / usual if usual > 0 else np.ones(n)
        held, sizes = np.diag(self.mix), np.array([u.n_samples for u in self.raw], dtype=np.float64)
        share = np.abs(a) * held * norm
        clients = np.array([u.client for u in self.raw])
        return {
            "norm": _short(norm),
            "cosine": _short(cosine),
            "claimed": _short(sizes / sizes.sum() if sizes.sum() > 0 else sizes),
            "weight": _short(a * held),
            "share": _short(share / share.sum() if share.sum() > 0 else share),
            "distance": _short(away),
            "flagged": clients[(away > FAR) | (cosine < AGAINST)].tolist() if n > 2 else [],
        }


def _drawn(update: Update, factor: float, centre: Tensor) -> Update:
    """An update drawn towards the centre (P, n), and what the method sends beside it as much smaller."""
    own = update.delta
    delta = (own.double() * factor + centre * (1 - factor)).to(own.dtype)
    return replace(update, delta=delta, extras={name: value * factor for name, value in update.extras.items()})


def combine(x: Tensor, weights: np.ndarray, updates: Sequence[Update], choice: np.ndarray) -> Tensor:
    """x + sum_k a_k delta_k[choice_k], summed in client order in float64; of a large model on a CPU a piece at a time,
    so that the sum stays in the cache."""
    width = len(x) if x.is_cuda else min(len(x), SUMMED)
    done = []
    for piece in [slice(first, first + width) for first in range(0, len(x), width)]:
        total = x[piece].to(torch.float64, copy=True)
        term = torch.empty_like(total)  # one for all: fresh memory of a large model takes longer than the sum
        for a, u, c in zip(weights, updates, choice, strict=True):
            total += term.copy_(u.delta[int(c), piece]).mul_(float(a))
        done.append(total.to(x.dtype))
    return torch.cat(done)


def inner_products(deltas: Sequence[Tensor], choice: np.ndarray) -> Tensor:
    """(S, S) in float64. Large updates are taken a few pieces at a time, which may change the last bits."""
    first_one, n_clients = deltas[0], len(deltas)
    n, device = first_one.shape[-1], first_one.device
    width = -(-n // PIECES)
    at_once = PIECES if n * n_clients <= STACKED else max(1, STACKED_OF_MORE // (width * n_clients))
    # one memory for all, as fresh memory takes longer than the products; what the last pieces lack counts as 0
    held, done = torch.zeros(n_clients, at_once * width, dtype=torch.float64, device=device), []
    for first in range(0, PIECES, at_once):
        count = min(at_once, PIECES - first)
        rows = held[:, : count * width]
        for row, delta, c in zip(rows, deltas, choice, strict=True):
            part = delta[int(c), first * width : (first + count) * width]
            row[: len(part)] = part
            row[len(part) :] = 0.0
        pieces = rows.unflatten(1, (count, width)).transpose(0, 1)
        done.append(pieces @ pieces.mT)
    return torch.cat(done).sum(0)


def _short(values: np.ndarray) -> list[float | None]:
    """Four digits, and None for what is not defined: these are for reading."""
    return [float(f"{v:.4g}") if np.isfinite(v) else None for v in values]


BETA1, BETA2, TAU = 0.9, 0.99, 1e-3
"""Momenta and floor of the optimizers: those of their authors' experiments, where FedAdagrad alone has no momentum."""


def in_force(server: ServerSettings, settled: Mapping[str, Any]) -> ServerSettings:
    """Return the server's settings with an optimizer in place of ``auto``."""
    if server.optimizer != "auto":
        return server
    if OPTIMIZER not in settled:
        raise FedtailError("server.optimizer = 'auto' depends on the sites, which are not known here; name one")
    return server.model_copy(update={"optimizer": settled[OPTIMIZER]})


def server_step(
    server: ServerSettings, x: Tensor, aggregate: Tensor, state: Tensors, n_params: int | None = None
) -> tuple[Tensor, Tensors]:
    """The next global model and the optimizer's moments (FedOpt, Reddi et al., 2021).

    With the pseudo-gradient g = x - aggregate and no bias correction, as in the paper's algorithm 2,

        momentum (FedAvgM)   m <- beta1 m + g;                    x <- x - lr m
        adagrad              v <- v + g^2                      }
        adam                 v <- beta2 v + (1 - beta2) g^2    }  m <- beta1 m + (1 - beta1) g
        yogi                 v <- v - (1 - beta2) g^2 sign(v - g^2) }  x <- x - lr m / (sqrt(v) + tau)

    from m = 0 and v = tau^2 on. x, aggregate: (n,); the buffers from ``n_params`` on are the aggregate's.
    """
    if server.optimizer == "none":
        return aggregate, state
    d = x.numel() if n_params is None else n_params
    gradient = x[:d] - aggregate[:d]
    m = state.get("m", torch.zeros_like(gradient))
    if server.optimizer == "momentum":
        m = BETA1 * m + gradient
        move, state = m, {"m": m}
    else:
        m = BETA1 * m + (1 - BETA1) * gradient
        v = _second_moment(server, state.get("v", torch.full_like(gradient, TAU**2)), gradient**2)
        move, state = m / (v.sqrt() + TAU), {"m": m, "v": v}
    return torch.cat([x[:d] - server.step * move, aggregate[d:]]), state


def _second_moment(server: ServerSettings, v: Tensor, square: Tensor) -> Tensor:
    if server.optimizer == "adagrad":
        return v + square
    if server.optimizer == "adam":
        return BETA2 * v + (1 - BETA2) * square
    return v - (1 - BETA2) * square * torch.sign(v - square)
