"""A client's local runs before their first step: everything random about them, and what the method starts with.

Drawn once and equal on every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from fedtail.core.random import generator
from fedtail.core.records import Task, Tensors
from fedtail.core.sampling import epoch_counts, local_batches
from fedtail.data.federation import Client, Federation
from fedtail.data.images.augment import BASIC, Views, draw_augment
from fedtail.errors import FedtailError
from fedtail.methods.base import LocalRun, Method
from fedtail.models.flat import FlatModel
from fedtail.settings import LocalSettings, Settings


@dataclass(frozen=True)
class LocalPlan:
    """Everything random about a local run, drawn before it starts; equal on every engine."""

    index: np.ndarray
    """Pool indices of all steps' batches, one after another."""
    sizes: np.ndarray
    """Size of each step's batch."""
    all_draws: np.ndarray | None
    """Augmentation draws of all steps' batches, (len(index), 3) or, with two views, as many as they are drawn as."""
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
        samples = slice(int(self.sizes[:first].sum()), int(self.sizes[:last].sum()))
        draws = None if self.all_draws is None else self.all_draws[samples]
        return replace(self, index=self.index[samples], sizes=self.sizes[first:last], all_draws=draws)


def plan_local_run(
    client: Client, rate: float, round: int, settings: Settings, sampler: str = "shuffled", views: Views | None = None
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
        epoch_length=settings.local.epoch_length,
    )
    draws, rng = None, generator(settings.run.seed, "augment", client.index, round)
    if views and client.pool.x.ndim == 4:
        strong = generator(settings.run.seed, "strong", client.index, round)
        draws = np.concatenate([views.draw(client.augment, int(n), rng, strong) for n in sizes])
    elif client.augment:
        draws = np.concatenate([draw_augment(client.augment, int(n), rng) for n in sizes])
        draws = draws.repeat(2, 0) if views else draws
    if views:
        positions, sizes = positions.repeat(2), sizes * 2
    return LocalPlan(
        index=client.train[positions],
        sizes=sizes,
        all_draws=draws,
        counts=client.counts,
        resampled=epoch_counts(client.counts, rate, sampler, batch_of(settings.local)),
    )


def draw_width(federation: Federation, method: Method) -> int:
    """Numbers that a sample's augmentation is drawn as in this federation; 0 for none."""
    if method.traits.views and federation.pool.x.ndim == 4:
        return method.traits.views.width
    return BASIC if federation.augment else 0


@dataclass(frozen=True)
class PreparedRun:
    """One local run of a task before its first step; the same on every engine."""

    row: int
    """The client's row in the task's probes."""
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
            plan = plan_local_run(client, rate, task.round, settings, method.sampler, method.traits.views)
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
        runs.append(PreparedRun(row, probe, plan, local, hyper, groups, const, state))
    return runs


BATCHES = (16, 32, 64)
"""What ``local.batch_size = "auto"`` chooses from. A site of a hundred rows takes two steps in an epoch of batches of
64, so that a whole run hardly moves the model; sites of thousands find their direction better in large batches."""
STEPS = 8
"""Steps that an epoch of the median site is to have."""


def follow(sizes: Sequence[int] | np.ndarray) -> int:
    """The largest batch in which the median site takes ``STEPS`` steps in an epoch, else the smallest. sizes: training
    samples per site; 0 of one that is not there."""
    return max((batch for batch in BATCHES if median(sizes) >= STEPS * batch), default=BATCHES[0])


def median(sizes: Sequence[int] | np.ndarray) -> float:
    """Return the median size of the sites that are there."""
    there = np.asarray(sizes)[np.asarray(sizes) > 0]
    return float(np.median(there)) if there.size else 0.0


def settled(settings: Settings, sizes: Sequence[int] | np.ndarray) -> Settings:
    """Settings as engines take them: with a number for the batch size."""
    if settings.local.batch_size != "auto":
        return settings
    return settings.model_copy(update={"local": settings.local.model_copy(update={"batch_size": follow(sizes)})})


def batch_of(local: LocalSettings) -> int:
    """Samples of a local step."""
    if local.batch_size == "auto":
        raise FedtailError("local.batch_size = 'auto' depends on site sizes, which are not known here; set a number")
    return local.batch_size


MANY = 20
"""Sites from which on ``server.optimizer = "auto"`` is Adam, if they are small ..."""
SMALL = 512
"""... that is, if the median one has fewer training samples than this."""
OPTIMIZER = "server_optimizer"
"""What it chose, among the settings that a run has found."""


def follow_sites(sizes: Sequence[int] | np.ndarray) -> str:
    """Return what ``server.optimizer = "auto"`` means for sites with so many training samples: Adam for many small
    ones. The mean over fifty of them moves the model no farther than one does; Adam's step does not depend on it."""
    return "adam" if np.count_nonzero(sizes) >= MANY and median(sizes) < SMALL else "none"


def settled_by_sizes(
    settings: Settings, sizes: Sequence[int] | np.ndarray
) -> tuple[dict[str, float | str], tuple[str, ...]]:
    """(settings that were ``auto`` and follow from the sizes of sites, notes on them for the run folder and the
    screen)."""
    found, notes, usual = dict[str, float | str](), list[str](), f"{median(sizes):,.0f} training samples"
    if settings.local.batch_size == "auto":
        found["batch_size"] = batch = follow(sizes)
        notes.append(f"batches of {batch} (local.batch_size=auto): the median site has {usual}")
    if settings.server.optimizer == "auto":
        found[OPTIMIZER] = follow_sites(sizes)
        if found[OPTIMIZER] != "none":
            about = f"{np.count_nonzero(sizes)} sites, of which the median one has {usual}"
            notes.append(f"the server applies updates with Adam (server.optimizer=auto): {about}")
    return found, tuple(notes)
