"""An engine of totals: all that it says follows from sums over sites, so that every site and a relay can run the loop.

At a site it trains and counts on that site's data; at a relay there is none. Both get the same sums, and with them the
same model, whatever else the relay may wish for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.boosting.grower import Ask, Site, asking
from fedtail.boosting.model import TreesModule
from fedtail.boosting.predictor import Forest
from fedtail.core.candidates import Candidates
from fedtail.core.decisions import Decision, Decisions, SiteGoal
from fedtail.core.records import DIVERGED, Measurement, Refusal, Task, Tensors, Update
from fedtail.core.robust import fair_share
from fedtail.core.scores import ONE, TEMPERATURES, Scores
from fedtail.core.totals import COUNTS, LIMIT, Reach, Totals
from fedtail.errors import FedtailError
from fedtail.federate.engine import Unmeasured
from fedtail.federate.protocol.agreement import LEAST
from fedtail.federate.protocol.masks import Fixed
from fedtail.federate.site.prepared import Prepared
from fedtail.methods.base import Method
from fedtail.models.flat import FlatModel
from fedtail.rounds.evaluation import count_candidates
from fedtail.rounds.local import DivergedError, train_client
from fedtail.settings import Settings

LARGEST = 16.0
"""Largest coordinate of an update; what is larger is cut. Fixed point is then fine to 2^-26."""
LARGEST_WIDE = float(1 << 20)
"""The same in 64 bits, for models with statistics of batches among their values, and for sums with noise."""
LOSS_LIMIT = 64.0
"""Largest mean loss that is told."""
MANY_STEPS = 10**9
"""Stands for a number of local steps that nobody knows."""
LOG_LOSS = 27.7
"""Largest log loss of one row, whose probability is cut at 1e-12."""


@dataclass
class SummedEngine:
    """A ``rounds.state.Engine`` over totals. ``owned``: what this process has of the sites, by client."""

    totals: Totals
    owned: Mapping[int, Prepared]
    model: FlatModel
    method: Method
    settings: Settings
    n_classes: int
    group_sizes: np.ndarray
    """(groups,) training samples."""
    name: str
    spent: Callable[[], dict[str, Any]] = dict
    """What a round's record tells of the noise so far, where there is some."""
    takes_rivals = False

    def __post_init__(self) -> None:
        self.n_clients = self.totals.n_clients
        self.sizes = np.zeros(self.n_clients)
        """(K,) the mean size of each client's group; nobody knows more."""
        for group, size in zip(self.totals.groups, self.group_sizes, strict=True):
            self.sizes[list(group)] = size / len(group)
        self._most = max(fair_share(len(group)) for group in self.totals.groups)
        """The largest weight of a client whose updates get noise."""
        self._states: dict[int, Tensors] = {}
        self._left: dict[int, list[Tensors]] = {}
        self._confusion: tuple[Tensor, dict[str, np.ndarray]] | None = None
        self._why = ""  # what local training has ended with here, where it failed

    # -- training ------------------------------------------------------------------------------------------------

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        """One update for each group: the mean over its clients, weighted by their training samples."""
        probes, n, clip = task.n_probes, task.x.numel(), self._clip(task)
        check_alike(task, self.totals.groups)
        wide = n > self.model.n_params or clip is not None
        fixed = Fixed(LARGEST_WIDE, 58) if wide else Fixed(LARGEST)
        trained = {k: self._trained(task, k, fixed.limit) for k in self.totals.here}
        lost = np.zeros((len(self.totals.groups), probes), dtype=bool)
        if clip is None and DIVERGED in task.reports:
            lost = self.totals.group_totals(probes, lambda k: trained[k][2].astype(np.int64), limit=COUNTS) > 0
        if lost.all():
            raise FedtailError(f"round {task.round}: local training diverges at every learning rate{self._why}")
        sums = self.totals.group_totals(
            probes * n + (0 if clip else probes),
            lambda k: fixed.encode(self._part(k, *trained[k], lost, clip)),
            limit=LIMIT if wide else COUNTS,
            reach=2 * self._most * (clip or math.inf) * math.sqrt(probes) * fixed.scale + math.sqrt(probes * n),
        )
        return [
            self._update(task, group, fixed.decode(row), gone, fixed.limit)
            for group, row, gone in zip(self.totals.groups, sums, lost, strict=True)
        ], []

    def asking(self, forest: Forest | None) -> Ask:
        """Questions about trees to all sites."""

        def site(here: Prepared) -> Site:
            module, pool, y = here.model.module, here.client.pool, here.client.pool.y.numpy()
            assert isinstance(module, TreesModule)
            rows = (here.client.train, here.client.validation)
            train, held = ((module.values(pool.x[torch.as_tensor(i)]), y[i]) for i in rows)
            return Site(train, held, forest)

        return asking(self.totals, {k: site(here) for k, here in self.owned.items()})

    def _trained(self, task: Task, client: int, limit: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The client's (P, n) update, (P,) losses in units of ``LOSS_LIMIT / limit``, and which of its (P,) runs have
        no finite end within the limit."""
        here, row, probes = self.owned[client], task.clients.index(client), task.n_probes
        state = self._states.get(client, {})
        try:
            update, self._left[client] = train_client(
                here.model, here.client, here.method, task, row, state, self.settings
            )
        except FedtailError as error:  # told with the part: by itself it would tell the relay of one site
            self._why = f" ({error})"
            self._left[client] = [state] * probes
            return np.zeros((probes, task.x.numel())), np.zeros(probes), np.ones(probes, dtype=bool)
        delta = update.delta.detach().cpu().double().numpy()
        whole = np.abs(delta).max(axis=1, initial=0.0) <= limit
        delta = np.where(np.isfinite(delta).all(axis=1, keepdims=True), delta, 0.0)
        failed = ~whole | (update.reports.get(DIVERGED, np.zeros(probes)) > 0)
        return delta, np.clip(np.nan_to_num(update.loss), 0.0, LOSS_LIMIT) * (limit / LOSS_LIMIT), failed

    def _part(
        self, client: int, delta: np.ndarray, loss: np.ndarray, failed: np.ndarray, lost: np.ndarray, clip: float | None
    ) -> np.ndarray:
        """The client's (P, n) update and (P,) losses, times its weight; with a norm to ``clip`` to, the update alone.

        A sum of which some have no part would be of the others alone, and settings can be chosen so that one is left.
        So runs that are lost at one client of a group are so at all of them; where there is nothing to choose from,
        there is no sum.
        """
        g, group = next((g, group) for g, group in enumerate(self.totals.groups) if client in group)
        weight = len(self.owned[client].client.train) / float(self.sizes[client] * len(group))
        if clip is not None:
            short = np.minimum(1.0, clip / np.maximum(np.linalg.norm(delta, axis=1, keepdims=True), 1e-30))
            return min(weight, self._most) * (delta * short).ravel()
        if (failed & ~lost[g]).any():
            raise DivergedError(f"local training gave an update that no sum can hold; lower local.lr{self._why}")
        return weight * np.concatenate([np.where(lost[g][:, None], 0.0, delta).ravel(), np.where(lost[g], 0.0, loss)])

    def _update(self, task: Task, group: Sequence[int], mean: np.ndarray, lost: np.ndarray, limit: float) -> Update:
        """What a group's sum says."""
        probes, n = task.n_probes, task.x.numel()
        loss = mean[probes * n :] * (LOSS_LIMIT / limit) if len(mean) > probes * n else np.full(probes, np.nan)
        return Update(
            client=group[0],
            delta=torch.from_numpy(mean[: probes * n].reshape(probes, n)).to(task.x.dtype),
            n_samples=max(int(self.sizes[list(group)].sum()), 1),
            steps=(MANY_STEPS,) * probes,
            loss=tuple(loss.tolist()),
            reports={DIVERGED: lost.astype(np.float64)} if DIVERGED in task.reports else {},
            members=tuple(group),
        )

    def _clip(self, task: Task) -> float | None:
        """The norm to which updates are cut before their share of noise, None where they get none: as set, or the
        method's bound for so many steps as an epoch of 64 batches has, at the largest learning rate that is tried."""
        privacy = self.settings.privacy
        if privacy.mode != "shares" or privacy.clip:
            return privacy.clip if privacy.mode == "shares" else None
        lr = max([task.lr, *np.ravel(task.probes.get("lr", ())).tolist()])
        bound = self.method.bound(lr, self.settings.local.epochs * 64, self.n_classes)
        if bound is None:
            raise FedtailError(
                f"privacy.mode = 'shares': method {self.method.name!r} as configured has no norm bound; set "
                "privacy.clip"
            )
        return bound

    def commit(self, choice: dict[int, int]) -> None:
        for client in self.totals.here:
            if client in choice and self._left.get(client):
                self._states[client] = self._left[client][choice[client]]

    def state(self) -> dict[int, Tensors]:
        return {k: state for k, state in self._states.items() if state}

    def load_state(self, state: dict[int, Tensors]) -> None:
        self._states = dict(state)

    # -- counting ------------------------------------------------------------------------------------------------

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        shape = (len(candidates), 3, self.n_classes)

        def part(client: int) -> np.ndarray:
            here = self.owned[client]
            return count_candidates(here.model, candidates, here.split("validation")).ravel()

        return self._counted(math.prod(shape), part, math.sqrt(6 * len(candidates))).reshape(shape)

    def confusion(self, x: Tensor, split: str) -> np.ndarray:
        """As the protocol says. Whoever asks for the test asks for the validation next: one exchange answers both."""
        if self._confusion is None or self._confusion[0] is not x or split not in self._confusion[1]:
            splits = ("test", "validation") if split == "test" else (split,)

            def part(client: int) -> np.ndarray:
                return np.concatenate([self.owned[client].confusion(x, name).ravel() for name in splits])

            found = self._counted(len(splits) * self.n_classes**2, part, math.sqrt(2))
            self._confusion = (x, dict(zip(splits, found.reshape(len(splits), self.n_classes, -1), strict=True)))
        return self._confusion[1][split]

    def end_round(self) -> None:
        """Forget what was asked: a process that begins here again asks what one that goes on does."""
        self._confusion = None

    def confusions(self, x: Tensor) -> dict[int, np.ndarray]:
        return {}

    def scores(self, x: Tensor, split: str, decisions: Decisions | None = None) -> Iterator[tuple[int, Scores]]:
        """Under -1, of all sites together."""
        rule, none = (decisions or Decisions()).common, Scores.of(np.empty((0, self.n_classes)), np.empty(0))

        def part(client: int) -> np.ndarray:
            return self.owned[client].scores(x, split, rule).flat()

        yield -1, none.like(self._counted(none.flat().size, part, scores_reach(self.n_classes), LIMIT))

    def validate_scores(self, candidates: Candidates, clients: Sequence[int]) -> Iterator[tuple[int, Scores]]:
        for s in range(len(candidates)):
            for _, found in self.scores(candidates.vector(s), "validation"):
                yield s, found

    def _counted(self, size: int, part: Any, reach: Reach, limit: int = COUNTS) -> np.ndarray:
        """A total of counts; noise may have made some of them negative, and they are then none."""
        return np.maximum(self.totals.total(size, part, limit=limit, reach=reach), 0)

    def site_decisions(self, x: Tensor, goal: SiteGoal) -> dict[int, Decision]:
        """Each site's own decision, which stays there."""
        for client in self.totals.here:
            self.owned[client].decide(x, goal)
        return {}

    def measure(self, x: Tensor, what: Measurement) -> dict[int, Tensor]:
        raise Unmeasured(self.method.name, what.name)

    def info(self) -> dict[str, Any]:
        about = {"engine": self.name, "path": "remote", "device": "sites", "trust": self.settings.deploy.trust}
        return {**about, "told": self.spent()}

    def close(self) -> None:
        """Nothing is left open."""


def scores_reach(n_classes: int) -> np.ndarray:
    """(size,) of ``Scores``: how far one row that is replaced can move each part, for all parts together."""
    two, blocks = math.sqrt(2), 8  # cells are three blocks, sums two, the others one each; and one is left over
    none = vars(Scores.of(np.empty((0, n_classes)), np.empty(0)))
    each: dict[str, float | np.ndarray] = {
        "confusion": two,
        "bins": math.sqrt(4 * n_classes),
        "cells": np.array([[two], [two], [two * ONE]]),
        "sums": np.where(np.arange(len(none["sums"])), two * LOG_LOSS * ONE, 2.0 * ONE),
        "tempered": float(np.linalg.norm(LOG_LOSS / TEMPERATURES + math.log(max(n_classes, 2)))) * ONE,
        "mass": two * ONE,
    }
    pieces = [np.broadcast_to(each[name], value.shape).ravel() for name, value in none.items()]
    return np.concatenate(pieces) * math.sqrt(blocks + 1)


def check_sums_only(settings: Settings, method: Method) -> None:
    """Refuse what needs more of sites than sums, or says that they have noise that they have not, in one line."""
    where = f"deploy.trust = {settings.deploy.trust!r}"
    mode = "shares" if settings.deploy.trust == "private" else "none"
    if settings.privacy.mode != mode:
        raise FedtailError(f"{where} goes with privacy.mode = {mode!r}, not with {settings.privacy.mode!r}")
    if not method.only_sums or method.traits.needs_auxiliary:
        raise FedtailError(f"{where}: method {method.name!r} needs more than sums of updates: {method.wire}")
    if settings.server.aggregate not in ("auto", "mean"):
        raise FedtailError(f"{where}: server.aggregate = {settings.server.aggregate!r} compares updates; use 'mean'")
    if settings.run.participation < 1 or settings.run.quorum < 1:
        raise FedtailError(f"{where} needs all sites in every round; set run.participation = 1 and run.quorum = 1")
    if settings.data.holdout:
        raise FedtailError(f"{where}: the server has no data; leave out data.holdout")


def check_alike(task: Task, groups: Sequence[Sequence[int]]) -> None:
    """Refuse probes that differ within a sum: at a learning rate of 0 for all sites but one it is that one's."""
    for name, values in task.probes.items():
        rows = dict(zip(task.clients, values.tolist(), strict=True))
        if any(rows[k] != rows[group[0]] for group in groups for k in group):
            said = f"sites of one sum train alike, but the settings give each a {name} of its own"
            raise FedtailError(f"{said}; use rates.name = 'uniform' or 'fedhoo_clusters', and one rates.base_rate")


def groups_of(settings: Settings, n_clients: int, least: int = LEAST) -> list[list[int]]:
    """The clusters, of at least so many, whose sums are told apart: those of FedHOO's labels, or all clients in one."""
    where = f"deploy.trust = {settings.deploy.trust!r}"
    if settings.rates.name == "fedhoo":
        raise FedtailError(
            f"{where}: rates 'fedhoo' compare the updates of single sites; use rates.name = 'fedhoo_clusters' with "
            f"rates.labels, at least {LEAST} sites each"
        )
    if settings.rates.name != "fedhoo_clusters":
        return [list(range(n_clients))]
    labels = settings.rates.options.get("labels")
    if not labels or len(labels) != n_clients:
        raise FedtailError(f"{where}: clusters are agreed, not found; give rates.labels, one for each of the sites")
    found = {name: [k for k, v in enumerate(labels) if str(v) == name] for name in sorted(map(str, labels))}
    if small := [name for name, members in found.items() if len(members) < least]:
        raise FedtailError(f"{where}: cluster {small[0]!r} has fewer than {least} sites; merge it with another")
    return list(found.values())
