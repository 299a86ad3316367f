"""Which updates a round takes, and whether they are enough: the server's check of what clients sent."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.privacy import noisy_limit
from fedtail.core.records import DIVERGED, Refusal, Task, Update, clients_of
from fedtail.errors import FedtailError
from fedtail.methods.base import Method, run_bound
from fedtail.rounds.state import Problem
from fedtail.settings import Settings


class QuorumError(FedtailError):
    """Too few clients returned an update that can be taken."""


def least(quorum: float, n: int) -> int:
    """Return how many of ``n`` clients must answer; a little off a product such as 0.28 * 25 is not one more."""
    return max(1, math.ceil(quorum * n - 1e-9))


NOT_FINITE = "update is not finite"
REPORTS = {DIVERGED: (0.0, 1.0)}
"""Range of the scalars that clients report, where there is one."""


def accept(
    updates: list[Update], refusals: list[Refusal], problem: Problem, task: Task, settings: Settings
) -> tuple[list[Update], list[Refusal]]:
    """Refuse updates that ``fault`` finds fault with; raise where fewer than the quorum are left."""
    privacy, quorum = settings.privacy, settings.run.quorum
    noise = privacy.noise if privacy.mode in ("local", "shares") else 0.0
    good, bad = [], list(refusals)
    usual = Counter(map(_extras, updates)).most_common(1)
    for u in sorted(updates, key=lambda u: u.client):
        reason = fault(u, problem.method, task, problem.n_classes, problem.model.n_params, noise)
        if reason is None and _extras(u) != usual[0][0]:
            reason = "the extra data it sent differ in form from most clients'"
        if reason is None:
            good.append(u)
        else:
            bad += [Refusal(k, task.round, reason, "update") for k in u.clients]
    n_good = len(clients_of(good))
    diverged = {r.client for r in bad if r.code == DIVERGED or r.reason == NOT_FINITE}
    if len(task.clients) > 1 and diverged.issuperset(task.clients):
        given = "the first model"
        if task.round:
            given = f"the model that round {task.round - 1} left (an update taken then was finite, but likely too long)"
        raise QuorumError(
            f"round {task.round}: all {len(task.clients)} clients diverged from {given}, so none of them is the cause; "
            f"lower local.lr (now {task.lr:g})"
        )
    if n_good < (needed := least(quorum, len(task.clients))):
        first = "; ".join(f"client {r.client}: {r.reason}" for r in bad[:3]) or "no replies"
        raise QuorumError(
            f"round {task.round}: {n_good} of {len(task.clients)} clients returned a valid update, but {needed} are "
            f"needed (run.quorum = {quorum:g}; {first}); if a loss is not finite, lower local.lr (now {task.lr:g})"
        )
    return good, bad


def _extras(u: Update) -> tuple[Any, ...]:
    """Names, shapes and types of what the method sends beside the update, by which a site must be like the others."""
    return tuple(sorted((name, tuple(value.shape), str(value.dtype)) for name, value in u.extras.items()))


def fault(u: Update, method: Method, task: Task, n_classes: int, n_params: int, noise: float) -> str | None:
    """Why an update cannot be taken, or None: the update, or what the method sends beside it, has the wrong shape or is
    not finite, or the update is longer than the method allows.

    The bound holds for the ``n_params`` parameters; BatchNorm's statistics behind them move as the data have it. A
    report may be undefined: a client without validation data has nothing to tell.
    """
    runs = (task.n_probes,)
    if tuple(u.delta.shape) != (*runs, task.x.numel()):
        return f"update has shape {tuple(u.delta.shape)}, expected {(*runs, task.x.numel())}"
    for name, shape in [
        *((k, v.shape[:1]) for k, v in u.extras.items()),
        *((k, v.shape) for k, v in u.reports.items()),
    ]:
        if tuple(shape) != runs:
            return f"update has {name!r} of shape {tuple(shape)}, expected {runs}"
    if not all(_finite(values) for values in (u.delta, *u.extras.values())):
        return NOT_FINITE
    for name, value in u.reports.items():
        known = value[~np.isnan(value.astype(np.float64))]
        low, high = REPORTS.get(name, (-np.inf, np.inf))
        if not np.isfinite(known).all() or (known < low).any() or (known > high).any():
            return f"report {name!r} is outside [{low:g}, {high:g}]"
    for i, (delta, steps) in enumerate(zip(u.delta, u.steps, strict=True)):
        bound = run_bound(method, task, u.client, i, steps, n_classes)
        if bound is None:
            continue
        norm = float(torch.linalg.vector_norm(delta[:n_params], dtype=torch.float64))
        if norm > noisy_limit(bound, noise, n_params):
            return f"update norm {norm:.4g} exceeds the method's bound {bound:.4g}"
    return None


def _finite(values: Tensor) -> bool:
    """Return whether all values are finite, in one pass, without memory of the model's size. Squares of float32 may
    overflow, in float64 they cannot, which takes four times as long."""
    if values.dtype != torch.float32:
        return bool(torch.isfinite(values).all())
    if math.isfinite(torch.linalg.vector_norm(values)):
        return True
    return math.isfinite(torch.linalg.vector_norm(values, dtype=torch.float64))
