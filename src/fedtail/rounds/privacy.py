"""Privacy of a run: which promises can be kept, noise on the aggregate or on updates, and what it has cost so far."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.privacy import DELTA, draw_noise, gaussian_epsilon, sensitivity
from fedtail.core.records import Task, Update
from fedtail.errors import FedtailError
from fedtail.methods.base import Method, run_bound
from fedtail.models.flat import has_batchnorm
from fedtail.rounds.state import Problem
from fedtail.settings import PrivacySettings


def check_privacy(problem: Problem, privacy: PrivacySettings) -> None:
    """Refuse a promise that cannot be kept: no norm bound, or more than updates leaves a site."""
    if privacy.mode == "none":
        return
    method, rates, where = problem.method, problem.rates, f"privacy.mode = {privacy.mode!r}"
    if has_batchnorm(problem.model.module):
        raise FedtailError(f"{where}: BatchNorm's statistics have no norm bound; use model.batchnorm='groupnorm'")
    bounded = method.bound(1.0, 1, problem.n_classes) is not None and rates.searches != "weight_decay"
    if not bounded and not (privacy.mode == "shares" and privacy.clip):
        raise FedtailError(
            f"{where} needs a method whose updates are bounded, e.g. 'fedcgnm' with weight_decay = 0; {method.name!r} "
            "as configured has no bound"
        )
    if method.wire != "nothing":
        raise FedtailError(f"{where} covers updates only, but {method.name!r} sends more: {method.wire}")
    if privacy.mode == "central" and (rates.patterns() is not None or rates.reports or rates.searches == "lr"):
        raise FedtailError(
            f"{where} covers one aggregate per round, but rates {rates.name!r} release more; use rates 'uniform' or "
            "'fixed', or privacy.mode = 'local'"
        )


def privatize(
    problem: Problem,
    privacy: PrivacySettings,
    task: Task,
    aggregate: Tensor,
    weights: np.ndarray,
    updates: Sequence[Update],
    history: Sequence[dict[str, Any]] = (),
) -> tuple[Tensor, dict[str, Any]]:
    """The aggregate with central noise where asked, and what the rounds so far have cost, for history.

    Releases are counted up over the records: a search sends several updates a round and, once it is done, one.
    """
    if privacy.mode == "none":
        return aggregate, {}
    record: dict[str, Any] = {"mode": privacy.mode, "noise": privacy.noise, "delta": DELTA}
    if privacy.mode == "central":
        bounds = [problem.method.bound(task.lr, u.steps[0], problem.n_classes) or 0.0 for u in updates]
        record["sensitivity"] = sensitivity(weights, bounds)
        n = problem.model.n_params
        deviation = privacy.noise * record["sensitivity"]
        noise = draw_noise(n, deviation, problem.noise_seed, "privacy", 0, task.round)
        aggregate = torch.cat([aggregate[:n] + noise.to(aggregate.device), aggregate[n:]])
    before = history[-1]["privacy"]["releases"] if history else 0
    again = problem.undone if problem.noise_seed is None else 0  # seeded noise repeats itself, and tells nothing new
    problem.undone = 0
    record["releases"] = before + again + task.n_probes
    record["epsilon"] = gaussian_epsilon({privacy.noise: record["releases"]}, DELTA)
    return aggregate, {"privacy": record}


def noised(problem: Problem, privacy: PrivacySettings, task: Task, updates: list[Update]) -> list[Update]:
    """Updates as they leave simulated sites under local privacy; real ones add their noise before."""
    if privacy.mode != "local" or problem.noise_seed is None:
        return updates
    noise, seed, n = privacy.noise, problem.noise_seed, problem.model.n_params
    return [add_noise(u, task, problem.method, noise, seed, problem.n_classes, n) for u in updates]


def add_noise(
    update: Update, task: Task, method: Method, noise: float, seed: int | bytes | None, n_classes: int, n_params: int
) -> Update:
    """The update as it leaves a site under local privacy. task: as the site got it, or the whole round's.

    ``noise`` is the multiplier z; for ``seed`` see ``draw_noise``. With a secret, noise is keyed by what it covers:
    equal runs get equal noise, and unequal ones unrelated noise. It goes to the ``n_params`` trained parameters: frozen
    ones do not move, and there is nothing to hide in them.
    """
    delta = update.delta.clone()
    for i, steps in enumerate(update.steps):
        bound = run_bound(method, task, update.client, i, steps, n_classes)
        if bound is None:
            raise FedtailError(f"privacy needs a method with a norm bound; {method.name!r} as configured has none")
        covered = f"/{noise!r}/{bound!r}/{digest(update.delta[i])}" if isinstance(seed, bytes) else f"/{i}"
        drawn = draw_noise(n_params, noise * bound, seed, f"privacy{covered}", update.client, task.round)
        delta[i, :n_params] += drawn.to(delta.device)
    return replace(update, delta=delta)


def digest(vector: Tensor) -> str:
    """The hash of a vector's bits."""
    return hashlib.sha256(vector.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def count_undone(written: Sequence[dict[str, Any]], kept: Sequence[dict[str, Any]]) -> int:
    """Releases in the history of a run as it was ``written`` that are not in what a resumed run has ``kept`` of it."""
    counts = [(h[-1].get("privacy") or {}).get("releases", 0) if h else 0 for h in (written, kept)]
    return max(int(counts[0]) - int(counts[1]), 0)
