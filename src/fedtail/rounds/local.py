"""One client's local training, plain and obviously right.

The reference simulator calls it client after client, and a site of a real federation calls it for itself; the
fast simulator paths are tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fedtail.core.random import torch_seed
from fedtail.core.records import DIVERGED, Task, Tensors, Update
from fedtail.data.federation import Client
from fedtail.data.images.augment import apply_augment
from fedtail.errors import FedtailError
from fedtail.methods.base import Batch, LocalStep, Method, cross_entropy
from fedtail.models.flat import FlatModel, has_batchnorm
from fedtail.rounds.evaluation import (
    FEATURES,
    Split,
    feature_measurement,
    judged,
    measurement,
    model_logits,
    run_reports,
)
from fedtail.rounds.plan import prepare_runs
from fedtail.settings import Settings


class DivergedError(FedtailError):
    """Local training met a loss that is not finite."""

    code = DIVERGED
    """What a real site says of it."""


@contextmanager
def lone_samples_named() -> Iterator[None]:
    """Around local steps: torch's refusal to take BatchNorm statistics of one sample, in one line with the way out."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise FedtailError(
            "BatchNorm cannot train on a batch of one sample, and a client has one; set model.batchnorm = 'groupnorm' "
            "or change local.batch_size"
        ) from error


def load_batch(
    client: Client, index: np.ndarray, draws: np.ndarray | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Model input and labels of some pool indices."""
    i = torch.as_tensor(index)
    x, y = client.pool.x[i].to(device), client.pool.y[i].to(device)
    x = client.transform(x)
    return x if draws is None else apply_augment(x, torch.as_tensor(draws).to(device)), y


def group_gradients(
    model: FlatModel,
    method: Method,
    x: Tensor,
    batch: Batch,
    groups: Tensor,
    n_groups: int,
    const: Tensors,
    state: Tensors,
    *,
    split: bool | None = None,
) -> tuple[Tensor, float, Tensors]:
    """(H, d) group gradients, the batch's mean loss, and the step state.

    ``split`` runs forward and backward per group on its own samples, which costs what one plain step costs and
    is valid as long as samples do not influence each other. Otherwise (BatchNorm, losses that are stateful or depend
    on the whole batch) one forward and H masked backward passes. Default: split unless the model or the method
    forbids it.
    """
    member = groups[batch.y]
    size = batch.y.shape[0]

    coupled = method.traits.stateful_loss or method.traits.whole_batch or has_batchnorm(model.module)
    if n_groups == 1 or split is False or coupled:
        losses, state = method.loss(model.module(x), batch, const, state)
        grads = torch.stack(
            [
                model.gradient(torch.where(member == h, losses, 0.0).sum() / size, retain_graph=h < n_groups - 1)
                for h in range(n_groups)
            ]
        )
        return grads, float(losses.detach().mean()), state

    grads = torch.zeros(n_groups, model.n_params, device=x.device)
    total = 0.0
    for h in range(n_groups):
        mine = member == h
        if not bool(mine.any()):
            continue
        part = Batch(batch.y[mine], batch.weight[mine], None if batch.teacher is None else batch.teacher[mine])
        losses, state = method.loss(model.module(x[mine]), part, const, state)
        grads[h] = model.gradient(losses.sum() / size)
        total += float(losses.detach().sum())
    return grads, total / size, state


def train_probe(
    model: FlatModel,
    client: Client,
    method: Method,
    task: Task,
    row: int,
    probe: int,
    client_state: Tensors,
    settings: Settings,
    *,
    on_step: Callable[[int, Tensor, Tensors], None] | None = None,
) -> tuple[Tensor, int, float, Tensors, Tensors]:
    """One local run: (delta, steps, mean loss, client state to keep, extras)."""
    device = model.vector.device
    (run,) = prepare_runs(model, client, method, task, row, client_state, settings, [probe])
    plan, hyper, const, state = run.plan, run.hyper, run.const, run.state
    lr, decay = hyper["lr"], hyper["weight_decay"]
    groups = torch.as_tensor(run.groups, device=device)
    n_groups = method.group_count(client.n_classes)

    x0 = task.x.to(device)
    teacher = model.clone() if method.traits.needs_teacher else None
    if teacher is not None:
        teacher.load(x0)
        teacher.module.eval()
    model.load(x0)
    model.module.train()
    params, start = model.vector[: model.n_params], x0[: model.n_params]
    mean_loss = 0.0
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(torch_seed(settings.run.seed, "dropout", client.index, task.round))
        for i, index in enumerate(plan.batches):
            x, y = load_batch(client, index, plan.draws[i] if plan.draws else None, device)
            logits = None
            if teacher is not None:
                with torch.no_grad():
                    logits = teacher.module(x)
            batch = Batch(y, torch.ones_like(y, dtype=torch.float32), logits)
            with lone_samples_named():
                grads, loss, state = group_gradients(model, method, x, batch, groups, n_groups, const, state)
            if not np.isfinite(loss):
                raise DivergedError(f"loss became {loss} at step {i + 1} of {len(plan.batches)}")
            with torch.no_grad():
                step, state = method.direction(LocalStep(grads, params, start, const, state, hyper))
                params.sub_(lr * (step + decay * params))
            if on_step is not None:
                on_step(i, params, state)
            mean_loss += loss / len(plan.batches)
            task.advance(1.0 / (task.n_probes * len(plan.batches)))
    delta = model.vector.detach() - x0
    kept, extras = method.finish(run.local, delta[: model.n_params], const, state, client_state)
    return delta, len(plan.batches), mean_loss, kept, extras


def train_client(
    model: FlatModel, client: Client, method: Method, task: Task, row: int, client_state: Tensors, settings: Settings
) -> tuple[Update, list[Tensors]]:
    """All P local runs of one client from the same global model; also the client state each run would leave."""
    runs: list[tuple[Tensor, int, float, Tensors, Tensors]] = []
    failed: list[int] = []
    for p in range(task.n_probes):
        try:
            run = train_probe(model, client, method, task, row, p, client_state, settings)
            if DIVERGED in task.reports and not bool(torch.isfinite(run[0]).all()):
                raise DivergedError("the last step was not finite")
            runs.append(run)
        except DivergedError:
            if DIVERGED not in task.reports or len(failed) == task.n_probes - 1:
                raise
            failed.append(p)
            runs.append((torch.zeros_like(task.x, device=model.vector.device), 0, 0.0, client_state, {}))
    deltas, steps, losses, states, extras = zip(*runs, strict=True)
    delta, held = torch.stack(deltas), Split.of(client, client.validation)
    reports = run_reports(
        task,
        delta,
        judged(settings.run.metric, client.n_classes, client.background),
        lambda models: [float(client_losses(model, client, x).mean()) for x in models],
        lambda models: (model_logits(model, x, held.batches(device=model.vector.device)) for x in models),
        failed,
    )
    return client_update(client, delta, steps, losses, reports, unmoved(extras, failed)), list(states)


def client_update(
    client: Client,
    delta: Tensor,
    steps: Sequence[int],
    losses: Sequence[float],
    reports: dict[str, np.ndarray],
    extras: Sequence[Tensors],
) -> Update:
    """What a client uploads after its P local runs. delta: (P, n); extras: of each run."""
    return Update(
        client=client.index,
        delta=delta,
        n_samples=len(client.train),
        steps=tuple(steps),
        loss=tuple(losses),
        reports=reports,
        extras={key: torch.stack([e[key] for e in extras]) for key in extras[0]},
    )


def unmoved(extras: Sequence[Tensors], failed: Sequence[int]) -> list[Tensors]:
    """What the runs send beside their updates, with zeros for those that diverged."""
    sound = next(e for p, e in enumerate(extras) if p not in failed)
    nothing = {name: torch.zeros_like(value) for name, value in sound.items()}
    return [nothing if p in failed else e for p, e in enumerate(extras)]


def diverged(losses: Sequence[np.ndarray], task: Task, delta: Tensor) -> tuple[str | None, list[int]]:
    """Why a client is refused, if some run's losses, step by step, are not all finite; and those runs. delta: (P, n).

    A task that asks for a report of them refuses a client only if all its runs diverged. Its runs must end at a finite
    model too; without the report that is the server's to find.
    """
    reason, failed = None, []
    for p, each in enumerate(losses):
        if not math.isfinite(each.sum(dtype=np.float64)):  # float32 cannot overflow there
            bad = np.flatnonzero(~np.isfinite(each))
            reason = reason or f"loss became {each[bad[0]]} at step {bad[0] + 1} of {len(each)}"
            failed.append(p)
        elif DIVERGED in task.reports and not bool(torch.isfinite(delta[p]).all()):
            reason = reason or "the last step was not finite"
            failed.append(p)
    return (None if DIVERGED in task.reports and len(failed) < len(losses) else reason), failed


def client_losses(model: FlatModel, client: Client, x: Tensor) -> Tensor:
    """(n_k,) unweighted cross-entropy of each un-resampled training sample."""
    split = Split.of(client, client.train)
    batches = split.batches(device=model.vector.device)
    parts = [cross_entropy(z, y) for z, y in model_logits(model, x, batches)]
    return torch.cat(parts) if parts else torch.empty(0)


def measure_client(model: FlatModel, client: Client, x: Tensor, what: str) -> Tensor:
    """``measurement`` or ``feature_measurement`` of the model ``x`` at a client."""
    if what in FEATURES:
        return feature_measurement(model, client, x, what)
    return measurement(client, client_losses(model, client, x), what)
