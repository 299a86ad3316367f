"""Which updates a round takes, and whether they are enough: the server's check of what clients sent."""

from __future__ import annotations

import torch

from fedtail.core.errors import FedtailError
from fedtail.core.privacy import Privacy, noisy_limit
from fedtail.core.records import Refusal, Task, Update
from fedtail.methods.base import Method, run_bound


def accept(
    updates: list[Update],
    refusals: list[Refusal],
    method: Method,
    task: Task,
    quorum: float,
    n_classes: int,
    n_params: int,
    privacy: Privacy | None = None,
) -> tuple[list[Update], list[Refusal]]:
    """Refuse updates that are not finite, of the wrong shape or beyond the method's norm bound, which holds for
    the ``n_params`` parameters; BatchNorm's statistics behind them move as the data have it."""
    noise = privacy.noise if privacy is not None and privacy.mode == "local" else 0.0
    good, bad = [], list(refusals)
    expected = (task.n_probes, task.x.numel())
    for u in sorted(updates, key=lambda u: u.client):
        reason = None
        if tuple(u.delta.shape) != expected:
            reason = f"update has shape {tuple(u.delta.shape)}, expected {expected}"
        elif not all(bool(torch.isfinite(t).all()) for t in (u.delta, *u.extras.values())):
            reason = "update is not finite"
        else:
            for i, (delta, steps) in enumerate(zip(u.delta, u.steps, strict=True)):
                bound = run_bound(method, task, u.client, i, steps, n_classes)
                norm = float(torch.linalg.vector_norm(delta[:n_params].double()))
                if bound is not None and norm > noisy_limit(bound, noise, n_params):
                    reason = f"update norm {norm:.4g} exceeds the method's bound {bound:.4g}"
        if reason is None:
            good.append(u)
        else:
            bad.append(Refusal(u.client, task.round, reason))
    if not good or len(good) < quorum * len(task.clients):
        first = "; ".join(f"client {r.client}: {r.reason}" for r in bad[:3]) or "no replies"
        raise FedtailError(
            f"round {task.round}: {len(good)} of {len(task.clients)} clients returned a valid update, fewer than the "
            f"quorum of {quorum:g} ({first}); if a loss is not finite, lower local.lr (now {task.lr:g})"
        )
    return good, bad
