"""One client's local training, plain and obviously right.

The reference simulator calls it client after client, and a site of a real federation calls it for itself; the
fast simulator paths are tested against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedtail.core.metrics import confusion_matrix
from fedtail.core.random import generator, torch_seed
from fedtail.core.records import Task, Tensors, Update
from fedtail.core.sampling import epoch_counts, local_batches
from fedtail.data.federation import Client
from fedtail.data.images.augment import apply_augment, draw_augment
from fedtail.errors import FedtailError
from fedtail.methods.base import Batch, LocalRun, LocalStep, Method, cross_entropy
from fedtail.models.flat import FlatModel, has_batchnorm
from fedtail.settings import Settings

EVAL_BATCH = 1024


class DivergedError(FedtailError):
    """Local training met a loss that is not finite."""


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
    """Augmentation draws of all steps' batches, (len(index), 3)."""
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


def plan_local_run(client: Client, rate: float, round: int, settings: Settings, sampler: str = "shuffled") -> LocalPlan:
    """The batches of client and round at ``rate``; ``sampler`` is the method's.

    Both probes of a round use the same generator key, so their batch orders are as alike as their rates allow."""
    labels = client.labels
    positions = local_batches(
        labels,
        rate,
        generator(settings.run.seed, "batches", client.index, round),
        sampler=sampler,
        batch_size=settings.local.batch_size,
        epochs=settings.local.epochs,
        n_classes=client.n_classes,
        replication=settings.local.replication,
        epoch_length=settings.local.epoch_length,
    )
    draws = None
    if client.augment:
        rng = generator(settings.run.seed, "augment", client.index, round)
        draws = np.concatenate([draw_augment(client.augment, len(b), rng) for b in positions])
    counts = np.bincount(labels, minlength=client.n_classes)
    return LocalPlan(
        client.train[np.concatenate(positions)] if positions else np.empty(0, dtype=np.int64),
        np.array([len(b) for b in positions], dtype=np.int64),
        draws,
        counts,
        epoch_counts(counts, rate, sampler, settings.local.batch_size, settings.local.replication),
    )


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
    is valid as long as samples do not influence each other. Otherwise (BatchNorm, stateful losses) one forward
    and H masked backward passes. Default: split unless the model or the method forbids it.
    """
    member = groups[batch.y]
    size = batch.y.shape[0]

    def share(h: int) -> int:
        return size if scale == "batch" else max(int((member == h).sum()), 1)

    if n_groups == 1 or split is False or method.stateful_loss or has_batchnorm(model.module):
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
    tried = {name: float(values[row, probe]) for name, values in task.probes.items()}
    plan = plan_local_run(client, tried.pop("rate"), task.round, settings, method.sampler)
    hyper = {**method.hyper(), "lr": task.lr, **tried}
    lr, decay = hyper["lr"], hyper["weight_decay"]
    run = LocalRun(
        client.index, task.round, plan.counts, plan.resampled, model.n_params, len(plan.batches), lr,
        {**task.broadcast, **task.messages.get(client.index, {})}, device, settings.run.seed,
    )  # fmt: skip
    groups = torch.as_tensor(method.groups(plan.resampled), device=device)
    n_groups = method.group_count(client.n_classes)
    const, state = method.start(run, client_state)

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
    delta = model.vector.detach() - x0
    kept, extras = method.finish(run, delta[: model.n_params], const, state, client_state)
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
    runs = [train_probe(model, client, method, task, row, p, client_state, settings) for p in range(task.n_probes)]
    deltas, steps, losses, states, extras = zip(*runs, strict=True)
    delta = torch.stack(deltas)
    reports = {}
    if "local_gain" in task.reports:
        reports["local_gain"] = local_gain(model, client, task.x, delta)
    if "local_validation" in task.reports:
        reports["local_validation"] = np.array(
            [accuracy(client_confusion(model, client, task.x + d, client.validation)) for d in delta]
        )
    update = Update(
        client.index, delta, len(client.train), tuple(steps), tuple(losses), reports,
        {key: torch.stack([e[key] for e in extras]) for key in extras[0]},
    )  # fmt: skip
    return update, list(states)


def client_logits(model: FlatModel, client: Client, x: Tensor, index: np.ndarray) -> Tensor:
    """(len(index), C) logits of a model on some of the client's samples, without augmentation."""
    model.load(x)
    model.module.eval()
    out = []
    with torch.no_grad():
        for i in range(0, len(index), EVAL_BATCH):
            inputs, _ = load_batch(client, index[i : i + EVAL_BATCH], None, model.vector.device)
            out.append(model.module(inputs))
    return torch.cat(out) if out else torch.empty(0, client.n_classes)


def client_confusion(model: FlatModel, client: Client, x: Tensor, index: np.ndarray) -> np.ndarray:
    """(C, C) confusion matrix on some of the client's samples."""
    guess = client_logits(model, client, x, index).argmax(-1).cpu().numpy()
    return confusion_matrix(client.pool.y.numpy()[index], guess, client.n_classes)


def client_losses(model: FlatModel, client: Client, x: Tensor) -> Tensor:
    """(n_k,) unweighted cross-entropy of each un-resampled training sample."""
    logits = client_logits(model, client, x, client.train)
    return cross_entropy(logits, client.pool.y[torch.as_tensor(client.train)].to(logits.device))


def measure_client(model: FlatModel, client: Client, x: Tensor, what: str) -> Tensor:
    """``train_loss``: mean over samples; ``class_loss``: (C,) mean per class, NaN where the client has none."""
    losses = client_losses(model, client, x).double().cpu()
    if what == "train_loss":
        return losses.mean()
    if what != "class_loss":
        raise ValueError(f"unknown measurement {what!r}")
    y = torch.as_tensor(client.labels)
    sums = torch.zeros(client.n_classes, dtype=torch.float64).index_add_(0, y, losses)
    return sums / torch.as_tensor(client.counts)


def local_gain(model: FlatModel, client: Client, x: Tensor, delta: Tensor) -> np.ndarray:
    """(P,) relative fall of the local loss, clipped to [0, 1]: FAST's reward."""
    before = float(client_losses(model, client, x).mean())
    after = np.array([float(client_losses(model, client, x + d).mean()) for d in delta])
    return np.clip((before - after) / max(before, 1e-12), 0.0, 1.0)


def accuracy(confusion: np.ndarray) -> float:
    """Share of the diagonal; NaN without samples: a client that cannot compare must not seem to have a tie."""
    return float(np.diag(confusion).sum() / confusion.sum()) if confusion.sum() else float("nan")
