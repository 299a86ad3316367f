"""The server's side of masked sums: who is added up, and what comes out. It sees sums, and nothing of single sites."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedtail.core.masks import CHECKS, MaskError, Release, open_releases, unmasked, without_checks
from fedtail.core.privacy import limit as accepted
from fedtail.core.records import DIVERGED, Refusal, Task, Update
from fedtail.errors import FedtailError
from fedtail.federate.protocol.faults import CODES, log
from fedtail.federate.protocol.handshake import Hello
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.policy import REVEALS
from fedtail.federate.protocol.sums import (
    COORDINATE_LIMIT,
    LEAST,
    RELEASE,
    Order,
    as_masked,
    named_counts,
    release_from_json,
    size_of_counts,
    split_update,
)
from fedtail.federate.protocol.wire import Parcel
from fedtail.methods.base import Method, run_bound
from fedtail.rates.base import RateStrategy
from fedtail.rounds.batches import batch_of
from fedtail.settings import Settings

MANY_STEPS = 10**9
"""Stands for a number of local steps without a limit."""


@dataclass
class Sums:
    """What the server knows of the sites that can be added up, by client."""

    names: Sequence[str]
    adverts: dict[int, dict[str, str]] = field(default_factory=dict)
    """Client -> its signed key for the run; checked by the sites, not here."""
    strict: bool = True
    """Some site refuses sums whose differences would tell of single sites."""
    last: tuple[int, ...] = ()
    """Clients of the last sum of counts."""
    number: int = 0

    @classmethod
    def of(cls, hellos: Mapping[int, Hello], names: Sequence[str]) -> Sums:
        out = cls(names)
        out.learn(hellos)
        out.strict = any(h.masks.get("differences") != "allow" for h in hellos.values())
        return out

    def learn(self, hellos: Mapping[int, Hello]) -> None:
        """Keys of sites that have said hello to the job."""
        for k, hello in hellos.items():
            if "key" in hello.masks:
                self.adverts[k] = {name: str(hello.masks[name]) for name in ("key", "signature")}

    def members(self, clients: Sequence[int]) -> list[int]:
        """Who is asked for counts. Where differences count, whoever came late stays out: the others' sum is known."""
        if self.strict and self.last and set(self.last) <= set(clients):
            return list(self.last)
        return list(clients)

    def order(self, clients: Sequence[int], **more: Any) -> Order:
        """A new sum over these clients; ``FedtailError`` if they are too few."""
        if len(clients) < LEAST:
            raise FedtailError(f"a masked sum needs at least {LEAST} sites, but there are {len(clients)}")
        self.number = max(self.number + 1, time.time_ns())  # rises over restarts too
        found = {self.names[k]: self.adverts.get(k, {"key": "", "signature": ""}) for k in clients}
        return Order(number=self.number, members=tuple(sorted(found)), adverts=found, **more)


# -- updates ---------------------------------------------------------------------------------------------------


@dataclass
class Pool:
    """Clients whose updates are added up, and what has come of it. Messages are added as they come: the server keeps
    one vector, however many sites there are."""

    order: Order
    clients: list[int]
    names: Sequence[str]
    there: list[int] = field(default_factory=list)
    total: np.ndarray | None = None

    def add(self, client: int, values: np.ndarray) -> None:
        if self.total is None:
            self.total = np.zeros_like(values)
        self.total += values
        self.there = sorted([*self.there, client])

    def survivors(self) -> Order:
        """The order to unmask the sum over who is there."""
        members = tuple(sorted(self.names[k] for k in self.there))
        return Order(number=self.order.number, members=members, adverts=self.order.adverts)

    def read_release(self, client: int, parcel: Parcel) -> Release:
        others = [self.names[k] for k in self.there if k != client]
        return release_from_json(parcel.meta[RELEASE], others)

    def update(
        self, releases: Mapping[int, Release], task: Task, sizes: np.ndarray, steps: Mapping[int, float]
    ) -> tuple[Update | None, str]:
        """The weighted mean of who is there, or why there is none: the releases of all of them open the sum, or none
        does."""
        if len(releases) < len(self.there):
            return None, "another site in the same sum disconnected before it was unmasked"
        assert self.total is not None
        left = [self.names[k] for k in self.there]
        try:
            opened = open_releases({self.names[k]: r for k, r in releases.items()}, self.order.members)
            total = without_checks(unmasked(self.total, opened))
        except MaskError as error:
            return None, f"the masked sum of updates is refused: {error}"
        delta, loss, failed = split_update(self.order, total, left, task.n_probes, task.x.numel())
        most = max(steps[k] for k in self.there)
        return Update(
            client=self.there[0],
            delta=torch.from_numpy(delta).to(task.x.dtype),
            n_samples=int(sizes[self.there].sum()),
            steps=(_finite(most),) * task.n_probes,
            loss=tuple(float(v) for v in loss),
            reports={DIVERGED: (failed > 0).astype(np.float64)} if failed.size else {},
            members=tuple(self.there),
        ), ""


def pools(
    task: Task,
    clients: Collection[int],
    sums: Sums,
    sizes: np.ndarray,
    job: Job,
    method: Method,
    steps: Mapping[int, float],
) -> tuple[list[Pool], list[Refusal]]:
    """Orders for the sums of a round: one for every axis of a search, or one for all; and the clients that are too few
    for one. ``steps``: most local steps of each client."""
    rows = {k: row for row, k in enumerate(task.clients) if k in clients}
    axes = np.zeros(len(task.clients), dtype=np.int64) if task.axes is None else task.axes
    found, refusals = [], []
    for axis in np.unique(axes[list(rows.values())]):
        members = [k for k, row in rows.items() if axes[row] == axis]
        if len(members) < LEAST:
            refusals += [Refusal(k, task.round, CODES["mask-few"]) for k in members]
            continue
        clip, limit = clip_of(task, job, method, sizes[members]), COORDINATE_LIMIT
        bounds = [
            run_bound(method, task, k, i, _finite(steps[k]), job.n_classes)
            for k in members
            for i in range(task.n_probes)
        ]
        if job.shares:
            limit = clip * (1 + 12 * job.shares / math.sqrt(1 - job.dropouts))
        elif all(b is not None and math.isfinite(b) for b in bounds):
            limit = min(limit, accepted(max(b for b in bounds if b is not None)))
        order = sums.order(
            members,
            sizes={sums.names[k]: int(sizes[k]) for k in members},
            cap=cap_of(task, rows, sizes, members),
            probes={
                name: {sums.names[k]: [float(v) for v in values[rows[k]]] for k in members}
                for name, values in task.probes.items()
            },
            limit=float(limit),
            clip=float(clip),
        )
        found.append(Pool(order, members, sums.names))
    return found, refusals


def clip_of(task: Task, job: Job, method: Method, sizes: np.ndarray) -> float:
    """The norm to which updates are cut where they get shares of noise: as set, or the method's bound for an epoch that
    is not resampled, at the largest learning rate that is tried."""
    if not job.shares or job.clip:
        return job.clip
    steps = job.local.epochs * math.ceil(int(sizes.max()) / batch_of(job.local))
    lr = max([task.lr, *np.ravel(task.probes.get("lr", ())).tolist()])
    bound = method.bound(lr, steps, job.n_classes)
    if bound is None:
        raise FedtailError(
            f"privacy.mode = 'shares': method {method.name!r} as configured has no norm bound; set privacy.clip"
        )
    return bound


def cap_of(task: Task, rows: Mapping[int, int], sizes: np.ndarray, members: Sequence[int]) -> float:
    """The number of samples beyond which a member weighs no more, from the shares that the server wants."""
    if task.weights is None:
        return math.inf
    wanted = np.array([task.weights[rows[k]] for k in members])
    each = float((wanted / sizes[list(members)]).max())
    cap = float(wanted.max()) / each if each else math.inf
    return math.inf if cap >= sizes[list(members)].max() * (1 - 1e-9) else cap


def _finite(steps: float) -> int:
    return int(steps) if math.isfinite(steps) else MANY_STEPS


# -- counts ----------------------------------------------------------------------------------------------------


def read_masked_counts(client: int, parcel: Parcel, shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """(n,) of a reply, as random as they come; ``ValueError`` if they are something else."""
    return as_masked(parcel.tensors, size_of_counts(shapes) + CHECKS, np.uint64)


def sum_of_counts(replies: Mapping[int, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Counts by name, added over all members; ``FedtailError`` where the masks do not cancel."""
    total = np.zeros(size_of_counts(shapes) + CHECKS, dtype=np.uint64)
    for values in replies.values():
        total += values
    try:
        counts = without_checks(total)
    except MaskError as error:
        raise FedtailError(f"a masked sum over {len(replies)} sites is refused: {error}") from None
    if counts.size and int(counts.max()) >> 62:
        raise FedtailError("a masked sum has impossible counts; a site sent something other than counts")
    return named_counts(counts, shapes)


def check_masked(settings: Settings, method: Method, rates: RateStrategy) -> None:
    """Refuse what needs more of updates than weighted sums, in one line."""
    where, options = "deploy.updates = 'masked'", settings.rates.options
    if not method.only_sums:
        raise FedtailError(f"{where}: method {method.name!r} needs more than sums of updates: {method.wire}")
    if rates.reports - {DIVERGED}:
        raise FedtailError(f"{where}: rates {rates.name!r} need per-site numbers; use 'uniform' or 'fixed'")
    if settings.rates.name == "fedhoo_clusters":
        if options.get("by", "updates") == "updates" and "labels" not in options:
            raise FedtailError(f"{where}: clusters cannot come from updates; set rates.by = 'size' or 'labels'")
    elif rates.patterns() == "binary":
        raise FedtailError(
            f"{where}: rates {rates.name!r} compare the updates of individual sites; use rates.name = "
            "'fedhoo_clusters', whose "
            f"clusters have at least {LEAST} sites"
        )
    if settings.server.aggregate not in ("auto", "mean"):
        raise FedtailError(f"{where}: server.aggregate = {settings.server.aggregate!r} compares updates; use 'mean'")
    if settings.run.participation < 1:
        raise FedtailError(f"{where} needs all sites in every round; set run.participation = 1")


def choose_reveal(settings: Settings, hellos: Mapping[int, Hello], names: Sequence[str], n: int) -> tuple[str, str]:
    """What the ``n`` sites of a run shall reveal, and one line where ``auto`` means less than sums."""
    wanted = settings.deploy.reveal
    if wanted in ("totals", "classes"):
        return wanted, ""
    why = _no_masks(hellos, names, n) or _no_sums(settings, hellos, names)
    if not why:
        return "sums", ""
    if wanted == "sums":
        raise FedtailError(f"deploy.reveal = 'sums' is not possible: {why}")
    said = f"validation gives only totals, nothing per class: {why} (deploy.reveal)"
    log.warning(said)
    return "totals", said


def _no_masks(hellos: Mapping[int, Hello], names: Sequence[str], n: int) -> str:
    """Why ``n`` sites cannot add anything up under masks; empty if they can."""
    if n < LEAST:
        return f"masked sums need at least {LEAST} sites, but there are {n}"
    for k, hello in sorted(hellos.items()):
        if not hello.masks:
            return f"{names[k]} has no list of sites (sites.pub) for masked sums"
        if int(hello.masks.get("least", LEAST)) > n:
            return f"{names[k]} requires sums over at least {int(hello.masks['least'])} sites, but there are {n}"
    first = min(hellos)
    other = [names[k] for k, h in sorted(hellos.items()) if h.masks.get("roster") != hellos[first].masks.get("roster")]
    return f"{other[0]} has a different list of sites (sites.pub) from {names[first]}" if other else ""


def _no_sums(settings: Settings, hellos: Mapping[int, Hello], names: Sequence[str]) -> str:
    """Why class counts cannot be added up although masks can; empty if they can."""
    for k, hello in sorted(hellos.items()):
        if REVEALS.index(str(hello.masks.get("reveal", "totals"))) < REVEALS.index("sums"):
            return f"the policy of {names[k]} does not allow sums"
    strict = [names[k] for k, h in sorted(hellos.items()) if h.masks.get("differences") != "allow"]
    if strict and settings.deploy.reveal == "auto" and min(settings.run.quorum, settings.run.participation) < 1:
        return (
            f"run.quorum or run.participation below 1 lets sites be missing, and the policy of {strict[0]} refuses "
            "sums whose differences would reveal individual sites"
        )
    return ""


def need_masks(hellos: Mapping[int, Hello], names: Sequence[str], n: int) -> None:
    """Refuse masked updates where sites cannot mask."""
    why = _no_masks(hellos, names, n)
    if why:
        raise FedtailError(f"deploy.updates = 'masked' is not possible: {why}")
