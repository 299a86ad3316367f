"""One client's local training, plain and obviously right.

The reference simulator calls it client after client, and a site of a real federation calls it for itself; the
fast simulator paths are tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtail.core.random import torch_seed
from fedtail.core.records import DIVERGED, Task, Tensors, Update
from fedtail.data.federation import Client
from fedtail.data.images.augment import apply_augment
from fedtail.errors import FedtailError
from fedtail.methods.base import Batch, LocalRun, LocalStep, Method, cross_entropy
from fedtail.models.flat import FlatModel
from fedtail.rounds.evaluation import Logits, Split, model_logits, run_reports
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
    """Model input, contiguous as a data loader would give it, and labels of some pool indices."""
    i = torch.as_tensor(index)
    x, y = client.pool.x[i].to(device), client.pool.y[i].to(device)
    x = client.transform(x)
    return x if draws is None else apply_augment(x, torch.as_tensor(draws).to(device)).contiguous(), y


def group_gradients(
    model: FlatModel,
    method: Method,
    x: Tensor,
    batch: Batch,
    groups: Tensor,
    n_groups: int,
    const: Tensors,
    state: Tensors,
) -> tuple[Tensor, float, Tensors]:
    """(H, d) group gradients, the batch's mean loss, and the step state.

    Forward and backward run per group on its own samples, which costs what one plain step costs. Where samples
    influence each other (statistics of the batch, losses that are stateful or depend on the whole batch), one forward
    and H masked backward passes.
    """
    member = groups[batch.y]
    size = batch.y.shape[0]

    coupled = method.traits.stateful_loss or method.traits.whole_batch
    if n_groups == 1 or coupled or model.couples(x.shape[1:]):
        losses, state = method.loss(model.module(x), batch, const, state)
        each = [
            model.gradient(torch.where(member == h, losses, 0.0).sum() / size, retain_graph=h < n_groups - 1)
            for h in range(n_groups)
        ]
        return each[0][None] if n_groups == 1 else torch.stack(each), float(losses.detach().mean()), state

    grads = torch.zeros(n_groups, model.n_params, device=x.device)
    total = 0.0
    for h in range(n_groups):
        inside = member == h
        if not bool(inside.any()):
            continue
        part = Batch(batch.y[inside], batch.weight[inside], None if batch.teacher is None else batch.teacher[inside])
        losses, state = method.loss(model.module(x[inside]), part, const, state)
        grads[h] = model.gradient(losses.sum() / size)
        total += float(losses.detach().sum())
    return grads, total / size, state


class End(NamedTuple):
    """The end of a local run."""

    delta: Tensor
    """(n,)."""
    loss: np.ndarray
    """Mean loss of each step's batch, up to the first that is not finite."""
    const: Tensors
    state: Tensors
    local: LocalRun


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
) -> End:
    """Run one probe of a client, step by step."""
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
    losses: list[float] = []
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(torch_seed(settings.run.seed, "dropout", client.index, task.round))
        for i, index in enumerate(plan.batches):
            x, y = load_batch(client, index, plan.draws[i] if plan.draws else None, device)
            with torch.no_grad():
                logits = None if teacher is None else teacher.module(x)
            batch = Batch(y, torch.ones_like(y, dtype=torch.float32), logits)
            with lone_samples_named():
                grads, loss, state = group_gradients(model, method, x, batch, groups, n_groups, const, state)
            model.settle()
            losses.append(loss)
            if not np.isfinite(loss):
                break
            with torch.no_grad():
                step, state = method.direction(LocalStep(grads, params, start, const, state, hyper))
                move = decay * params  # in place from here: fresh memory for a whole model costs as much as the sum
                params.sub_(move.add_(step).mul_(lr))
            if on_step is not None:
                on_step(i, params, state)
            task.advance(1.0 / (task.n_probes * len(plan.batches)))
    return End(model.vector.detach() - x0, np.array(losses), const, state, run.local)


def train_client(
    model: FlatModel, client: Client, method: Method, task: Task, row: int, client_state: Tensors, settings: Settings
) -> tuple[Update, list[Tensors]]:
    """All P local runs of one client from the same global model; also the client state each run would leave."""
    ends = [train_probe(model, client, method, task, row, p, client_state, settings) for p in range(task.n_probes)]
    held = Split.of(client, client.validation)
    return client_update(
        task,
        client,
        method,
        ends,
        client_state,
        settings.run.metric,
        lambda models: [float(client_losses(model, client, x).mean()) for x in models],
        lambda models: (model_logits(model, x, held.batches(device=model.vector.device)) for x in models),
    )


def client_update(
    task: Task,
    client: Client,
    method: Method,
    ends: Sequence[End],
    client_state: Tensors,
    metric: str,
    mean_losses: Callable[[Tensor], Sequence[float] | np.ndarray],
    held: Callable[[Tensor], Iterable[Logits]],
) -> tuple[Update, list[Tensors]]:
    """Return the upload of a client after its P local runs, and the client state that each would leave.

    Raises ``DivergedError`` where a run met a loss that is not finite. A task that asks for a report of that takes such
    a run as one that did not move, if not all are; then runs must also end at a finite model, which without the report
    is the server's to find. mean_losses, held: see ``run_reports``.
    """
    delta = ends[0].delta.unsqueeze(0) if len(ends) == 1 else torch.stack([end.delta for end in ends])
    failed, reason = list[int](), ""
    for p, end in enumerate(ends):
        if not math.isfinite(end.loss.sum(dtype=np.float64)):  # float32 cannot overflow there
            step = int(np.flatnonzero(~np.isfinite(end.loss))[0])
            reason = reason or f"loss became {end.loss[step]} at step {step + 1} of {end.local.steps}"
        elif DIVERGED in task.reports and not bool(torch.isfinite(end.delta).all()):
            reason = reason or "the last step was not finite"
        else:
            continue
        failed.append(p)
    if failed and (DIVERGED not in task.reports or len(failed) == len(ends)):
        raise DivergedError(reason)
    done = {
        p: method.finish(end.local, delta[p, : end.local.n_params], end.const, end.state, client_state)
        for p, end in enumerate(ends)
        if p not in failed
    }
    nothing = {name: torch.zeros_like(value) for name, value in next(iter(done.values()))[1].items()}
    states, extras = zip(*(done.get(p, (client_state, nothing)) for p in range(len(ends))), strict=True)
    if failed:
        delta[failed] = 0.0
    losses = [end.loss[: 0 if p in failed else None] for p, end in enumerate(ends)]
    update = Update(
        client=client.index,
        delta=delta.to(task.x.device),
        n_samples=len(client.train),
        steps=tuple(map(len, losses)),
        loss=tuple(float(np.sum(each, dtype=np.float64)) / max(len(each), 1) for each in losses),
        reports=run_reports(task, client, delta, metric, mean_losses, held, failed) if task.reports else {},
        extras={key: torch.stack([e[key] for e in extras]) for key in nothing},
    )
    return update, list(states)


def client_losses(model: FlatModel, client: Client, x: Tensor) -> Tensor:
    """(n_k,) unweighted cross-entropy of each un-resampled training sample."""
    split = Split.of(client, client.train)
    batches = split.batches(device=model.vector.device)
    parts = [cross_entropy(z, y) for z, y in model_logits(model, x, batches)]
    return torch.cat(parts) if parts else torch.empty(0)
