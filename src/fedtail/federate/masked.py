"""Questions under masks: the server learns sums over clients, and nothing of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.core.decisions import Decisions
from fedtail.core.masks import CHECKS, Release
from fedtail.core.records import DIVERGED, Refusal, Task, Update
from fedtail.core.scores import Scores
from fedtail.errors import FedtailError
from fedtail.federate.asking import Asking
from fedtail.federate.open_counts import score_shapes
from fedtail.federate.protocol.faults import CODES
from fedtail.federate.protocol.limits import Budget, Kind
from fedtail.federate.protocol.sums import LEAST, MASKED, ORDER, as_masked, size_of_counts
from fedtail.federate.protocol.transport import Phase
from fedtail.federate.protocol.wire import Parcel
from fedtail.federate.sums import Sums, pools, read_masked_counts, sum_of_counts
from fedtail.methods.base import Method


def train_masked(
    asking: Asking, sums: Sums, method: Method, task: Task, payloads: Mapping[int, Parcel], steps: Mapping[int, float]
) -> tuple[list[Update], list[Refusal]]:
    """One update for each axis of a search, or for all clients: their weighted mean. steps: most, of each client."""
    sets, refusals = pools(task, payloads, sums, asking.sizes, asking.job, method, steps)
    size = task.n_probes * (task.x.numel() + 1 + (DIVERGED in task.reports)) + CHECKS
    mine = {k: pool for pool in sets for k in pool.clients}
    asked = {
        k: Parcel({**payloads[k].meta, ORDER: pool.order.to_json()}, payloads[k].tensors) for k, pool in mine.items()
    }

    def add(client: int, parcel: Parcel) -> None:
        mine[client].add(client, as_masked(parcel.tensors, size, np.uint32))

    budget = Budget({MASKED: Kind(("I32",), (size,))})
    _, missing = asking.exchange(Phase.TRAIN, asked, add, budget)
    left = [pool for pool in sets if len(pool.there) >= LEAST]
    few = [
        Refusal(k, task.round, CODES["mask-few"], "mask-few") for pool in sets if pool not in left for k in pool.there
    ]
    asked = {k: Parcel({**asking.about(k), ORDER: pool.survivors().to_json()}) for pool in left for k in pool.there}

    def take(client: int, parcel: Parcel) -> Release:
        return mine[client].read_release(client, parcel)

    releases, silent = asking.exchange(Phase.UNMASK, asked, take, Budget(meta=1 << 22, items=1 << 16))
    updates = []
    for pool in left:
        found, reason = pool.update({k: releases[k] for k in pool.there if k in releases}, task, asking.sizes, steps)
        if found is not None:
            updates.append(found)
        said = {r.client: r.reason for r in silent}
        few += [Refusal(k, task.round, said.get(k, reason)) for k in pool.there if reason]
    return updates, refusals + missing + few


class MaskedCounts:
    """What sites count, where they tell it under masks only (``reveal`` is ``sums``): under -1, of all together."""

    def __init__(self, asking: Asking, sums: Sums) -> None:
        self.asking, self.sums = asking, sums

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        """(S, 3, C) counts of the candidates. Who misses one message counts in none, so all of them are asked again."""
        counts = np.zeros((len(candidates), 3, self.asking.job.n_classes), dtype=np.int64)
        for rows, parcel in self.asking.candidate_messages(candidates):
            shapes = {"counts": (len(rows), 3, self.asking.job.n_classes)}
            found, there = self._sum(Phase.VALIDATE, parcel, shapes, clients, len(clients))
            if len(there) < len(clients) and len(rows) < len(candidates):
                return self.validate(candidates, there)
            counts[rows] = found["counts"]
        return counts

    def confusions(
        self, x: Tensor, splits: Sequence[str], clients: Sequence[int], wanted: int
    ) -> dict[str, dict[int, np.ndarray]]:
        """Split -> -1 -> the confusion matrix."""
        n = self.asking.job.n_classes
        question, shapes = Parcel({"splits": list(splits)}, {"x": x}), dict.fromkeys(splits, (n, n))
        found, _ = self._sum(Phase.CONFUSION, question, shapes, clients, wanted)
        return {split: {-1: counts} for split, counts in found.items()}

    def scores(
        self, x: Tensor, split: str, rules: Decisions, clients: Sequence[int], wanted: int
    ) -> tuple[dict[int, Scores], list[int]]:
        """The counts under -1, and the clients."""
        if rules.sites:
            raise FedtailError("per-site decisions need per-site counts; set deploy.reveal = 'classes'")
        question = Parcel({"split": split, "decision": rules.common.to_json()}, {"x": x})
        found, there = self._sum(Phase.SCORES, question, score_shapes(self.asking.job.n_classes), clients, wanted)
        return {-1: Scores(**found)}, there

    def _sum(
        self, phase: Phase, parcel: Parcel, shapes: Mapping[str, tuple[int, ...]], clients: Sequence[int], wanted: int
    ) -> tuple[dict[str, np.ndarray], list[int]]:
        """Named counts added over clients under masks, and the clients. Where some do not answer, the others are asked
        for a new sum; whether they give it is theirs to decide."""
        members, read = self.sums.members(clients), partial(read_masked_counts, shapes=shapes)
        wanted = min(wanted, len(members))
        while True:
            order = {ORDER: self.sums.order(members).to_json()}
            asked = {k: Parcel({**self.asking.about(k), **parcel.meta, **order}, parcel.tensors) for k in members}
            kind = Kind(("I64",), (size_of_counts(shapes) + CHECKS,))
            replies = self.asking.ask(phase, asked, read, wanted, {MASKED: kind})
            if len(replies) == len(members):
                self.sums.last = tuple(members)
                return sum_of_counts(replies, shapes), members
            members = list(replies)
