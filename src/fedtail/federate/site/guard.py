"""What guards a site's data beyond what its policy says of a job: models that a run cannot have led to, epochs of
absurd length, counts that would tell of a class, and what releases cost."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedtail.core.privacy import secure_normal
from fedtail.core.records import Task, Update
from fedtail.data.federation import Client
from fedtail.federate.protocol.faults import CodedError
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.policy import Policy, PolicyError
from fedtail.federate.site.ledger import Ledger
from fedtail.methods.base import Method
from fedtail.models.flat import FlatModel
from fedtail.rounds.batches import batch_of
from fedtail.rounds.privacy import row_digest

FIRST_TOLERANCE = 1e-3
"""How far a run's first model may be from the one its seed gives, as a share of its norm: versions of torch differ."""
MOST_ROUNDS = 10
"""A site that was away for more rounds than this lets a model come no further."""
LONGEST_EPOCH = 16
"""Times the classes times the samples: more than this no epoch may have."""


@dataclass
class Guard:
    """A policy, and the ledger of what was given out under it."""

    policy: Policy
    ledger: Ledger
    own: bool
    """Whether the data are the site's own. A rehearsal's are not, and it is to be the simulator's bit by bit, so
    crafted models are of no concern there."""

    def check_model(self, job: Job, client: Client, method: Method, task: Task) -> dict[str, Any]:
        """What the ledger keeps of a model that is to be trained; ``PolicyError`` for one that this run cannot have led
        to. A site that joins late has nothing to compare with but the method's own bound."""
        run = hashlib.sha256(json.dumps(job.to_json(), sort_keys=True).encode()).hexdigest()[:24]
        about: dict[str, Any] = {"run": run, "round": task.round, "model": self.ledger.sketch(task.x), "moved": 0.0}
        about |= {"rival": task.rival} if task.rival else {}
        if not self.policy.max_move or not self.own:
            return about
        before = self.ledger.last("rounds", run=run, rival=task.rival or None)  # each rival is a way of its own
        if before is not None and before.about is not None:
            start, rounds = before.about["model"], abs(task.round - before.about["round"])
            most = self.policy.max_move * before.about["moved"] * min(max(rounds, 1), MOST_ROUNDS)
            about["moved"] = before.about["moved"]
        else:
            first = FlatModel(job.build_model(job.seed)).vector
            start, most = self.ledger.sketch(first), FIRST_TOLERANCE * float(torch.linalg.vector_norm(first))
            if task.round:
                steps = job.local.epochs * math.ceil(len(client.train) / batch_of(job.local))
                bound = method.bound(max(task.lr, largest_lr(job)), steps, job.n_classes)
                most = math.inf if bound is None else most + self.policy.max_move * task.round * bound
        distance = math.dist(start, about["model"])
        if not distance <= most:
            raise PolicyError(
                "policy-model",
                f"site policy: the model of round {task.round} is {distance:.3g} away from "
                f"{'the last one trained here' if before else 'the one the seed gives'}, at most {most:.3g} may be; "
                "see policy.max_move",
            )
        return about

    def charge_releases(self, update: Update, noise: float, bounds: Sequence[float | None]) -> bytes:
        """Enter what an update costs, unless it was entered before; the secret to draw its noise by."""
        keys = {
            self.ledger.sign("release", row_digest(row), repr((noise, b)))
            for row, b in zip(update.delta, bounds, strict=True)
        }
        new = self.ledger.unknown("releases", keys)
        spent = self.ledger.releases()
        self.policy.check_epsilon({**spent, noise: spent.get(noise, 0) + len(new)})
        for each in new:
            self.ledger.charge("releases", each, 0, noise=noise)
        return self.ledger.secret

    def charge_split(self, seed: int, client: int) -> None:
        self.ledger.charge("splits", f"{seed}/{client}", self.policy.max_seeds_per_day)

    def blur(self, matrix: np.ndarray, split: str) -> int:
        """What is added to how many samples a model gets right, where it has one answer for (nearly) all and so counts
        a class. matrix: (C, C). One draw for each answer and split, for good: asking in other ways averages nothing."""
        answers = matrix.sum(0)
        least = min(self.policy.min_cell, max(int(answers.sum()) // 10, 1)) if self.own else 0
        if answers.sum() - answers.max(initial=0) >= least:
            return 0
        drawn = secure_normal(self.ledger.secret, f"cell/{split}/{int(answers.argmax())}", 1)[0]
        right = int(np.trace(matrix))
        return int(np.clip(right + round(least * drawn), 0, answers.sum())) - right


def largest_lr(job: Job) -> float:
    """That the job itself names."""
    return 1.0 if job.local.lr == "auto" else job.local.lr


def check_rates(counts: np.ndarray, task: Task) -> None:
    """Raise unless an epoch at the rates of a task has a sane length: a rate of 20 would repeat a rare row for ever."""
    rates, there = task.probes["rate"], counts[counts > 0].astype(np.float64)
    with np.errstate(over="ignore"):
        longest = float((there * (there.max(initial=1) / there) ** np.abs(rates).max()).sum())
    if not ((rates >= 0) & np.isfinite(rates)).all() or not longest <= LONGEST_EPOCH * len(there) * there.sum():
        raise CodedError("policy-training", f"the server asks for resampling rates up to {float(np.max(rates)):g}")
