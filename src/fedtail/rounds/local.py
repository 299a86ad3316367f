"""One client's local training, plain and obviously right.

The reference simulator calls it client after client, and a site of a real federation calls it for itself; the
fast simulator paths are tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedtail.core.random import generator, torch_seed
from fedtail.core.records import DIVERGED, Task, Tensors, Update
from fedtail.core.sampling import epoch_counts, local_batches
from fedtail.data.federation import Client, Federation
from fedtail.data.images.augment import BASIC, STRONG, apply_augment, draw_augment, draw_views
from fedtail.errors import FedtailError
from fedtail.methods.base import Batch, LocalRun, LocalStep, Method, cross_entropy
from fedtail.models.flat import FlatModel, has_batchnorm
from fedtail.rounds.batches import batch_of
from fedtail.rounds.evaluation import (
    FEATURES,
    Split,
    feature_measurement,
    judged,
    measurement,
    model_logits,
    run_reports,
)
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


@dataclass(frozen=True)
class LocalPlan:
    """Everything random about a local run, drawn before it starts; equal on every engine."""

    index: np.ndarray
    """Pool indices of all steps' batches, one after another."""
    sizes: np.ndarray
    """Size of each step's batch."""
    all_draws: np.ndarray | None
    """Augmentation draws of all steps' batches, (len(index), 3) or, with two views, (len(index), 12)."""
    counts: np.ndarray
    """(C,) the client's training samples per class."""
    resampled: np.ndarray
    """(C,) class sizes of one resampled epoch."""

    @cached_property
    def batches(self) -> list[np.ndarray]:
        """Pool indices of each step's batch."""
        return self._cut(self.index)

    @cached_property
    def draws(self) -> list[np.ndarray] | None:
        """Augmentation draws of each step's batch, (B, 3)."""
        return None if self.all_draws is None else self._cut(self.all_draws)

    def _cut(self, values: np.ndarray) -> list[np.ndarray]:
        return [values[a:b] for a, b in pairwise([0, *np.cumsum(self.sizes).tolist()])]

    def part(self, first: int, last: int) -> LocalPlan:
        """The steps from one to another."""
        if first == 0 and last >= len(self.sizes):
            return self
        mine = slice(int(self.sizes[:first].sum()), int(self.sizes[:last].sum()))
        draws = None if self.all_draws is None else self.all_draws[mine]
        return replace(self, index=self.index[mine], sizes=self.sizes[first:last], all_draws=draws)


def plan_local_run(
    client: Client, rate: float, round: int, settings: Settings, sampler: str = "shuffled", views: bool = False
) -> LocalPlan:
    """The batches of client and round at ``rate``; ``sampler`` and ``views`` are the method's.

    Both probes of a round use the same generator key, so their batch orders are as alike as their rates allow."""
    labels = client.labels
    positions, sizes = local_batches(
        labels,
        rate,
        generator(settings.run.seed, "batches", client.index, round),
        sampler=sampler,
        batch_size=batch_of(settings.local),
        epochs=settings.local.epochs,
        n_classes=client.n_classes,
        replication=settings.local.replication,
        epoch_length=settings.local.epoch_length,
    )
    draws = None
    if client.augment or (views and client.pool.x.ndim == 4):
        rng = generator(settings.run.seed, "augment", client.index, round)
        if views and client.pool.x.ndim == 4:
            strong = generator(settings.run.seed, "strong", client.index, round)
            draws = np.concatenate([draw_views(client.augment, int(n), rng, strong) for n in sizes])
        else:
            assert client.augment
            draws = np.concatenate([draw_augment(client.augment, int(n), rng) for n in sizes])
            draws = draws.repeat(2, 0) if views else draws
    if views:
        positions, sizes = positions.repeat(2), sizes * 2
    return LocalPlan(
        index=client.train[positions],
        sizes=sizes,
        all_draws=draws,
        counts=client.counts,
        resampled=epoch_counts(client.counts, rate, sampler, batch_of(settings.local), settings.local.replication),
    )


def draw_width(federation: Federation, method: Method) -> int:
    """Numbers that a sample's augmentation is drawn as in this federation; 0 for none."""
    if method.needs_views and federation.pool.x.ndim == 4:
        return BASIC + STRONG
    return BASIC if federation.augment else 0


@dataclass(frozen=True)
class PreparedRun:
    """One local run of a task before its first step; the same on every engine."""

    row: int
    """Of the task: the client's."""
    probe: int
    plan: LocalPlan
    local: LocalRun
    hyper: dict[str, float]
    """Scalars of the step, with what the probe tries; ``lr`` is among them."""
    groups: np.ndarray
    """(C,) group of each class."""
    const: Tensors
    state: Tensors
    """The step state to begin with."""


def prepare_runs(
    model: FlatModel,
    client: Client,
    method: Method,
    task: Task,
    row: int,
    client_state: Tensors,
    settings: Settings,
    probes: Sequence[int] | None = None,
) -> list[PreparedRun]:
    """The client's local runs, of all probes or some. Probes of equal rate share a plan."""
    device, drawn = model.vector.device, {}
    message = {k: v.to(device) for k, v in {**task.broadcast, **task.messages.get(client.index, {})}.items()}
    runs = []
    for probe in range(task.n_probes) if probes is None else probes:
        tried = {name: float(values[row, probe]) for name, values in task.probes.items()}
        rate = tried.pop("rate")
        if rate not in drawn:
            plan = plan_local_run(client, rate, task.round, settings, method.sampler, method.needs_views)
            drawn[rate] = plan, method.groups(plan.resampled)
        plan, groups = drawn[rate]
        hyper = {**method.hyper(), "lr": task.lr, **tried}
        local = LocalRun(
            client=client.index,
            round=task.round,
            counts=plan.counts,
            resampled=plan.resampled,
            n_params=model.n_params,
            steps=len(plan.sizes),
            lr=hyper["lr"],
            message=message,
            device=device,
            seed=settings.run.seed,
        )
        const, state = method.start(local, client_state)
        run = PreparedRun(
            row=row, probe=probe, plan=plan, local=local, hyper=hyper, groups=groups, const=const, state=state
        )
        runs.append(run)
    return runs


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
    scale: str = "batch",
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

    def share(h: int) -> int:
        return size if scale == "batch" else max(int((member == h).sum()), 1)

    coupled = method.stateful_loss or method.whole_batch or has_batchnorm(model.module)
    if n_groups == 1 or split is False or coupled:
        losses, state = method.loss(model.module(x), batch, const, state)
        grads = torch.stack(
            [
                model.gradient(torch.where(member == h, losses, 0.0).sum() / share(h), retain_graph=h < n_groups - 1)
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
        grads[h] = model.gradient(losses.sum() / share(h))
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
    teacher = model.clone() if method.needs_teacher else None
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
                grads, loss, state = group_gradients(
                    model, method, x, batch, groups, n_groups, const, state, scale=settings.local.scale
                )
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
    model: FlatModel,
    client: Client,
    method: Method,
    task: Task,
    row: int,
    client_state: Tensors,
    settings: Settings,
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
