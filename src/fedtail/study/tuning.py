"""Method, learning rate, batch size, resampling rate and weight decay within a time budget: ``fedtail tune --budget``.

Successive halving (Jamieson and Talwalkar, AISTATS 2016): many candidates are trained for a ninth of the rounds, the
better third of them for a third, the better third of those for all, and so on with further candidates while there is
time. The settings as given always go on: what wins has beaten them over as many rounds. Candidates are compared on the
clients' private validation splits, never on test data. The data are read and split once.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedtail.boosting.loop import run_rounds
from fedtail.core.halving import halving, lengths
from fedtail.core.metrics import signed
from fedtail.core.random import generator
from fedtail.errors import FedtailError
from fedtail.rounds.race import usual_lrs
from fedtail.rounds.state import State
from fedtail.runs.build import Prepared, build, build_federation, prepare
from fedtail.runs.config import changed
from fedtail.settings import Settings

SPACE: dict[str, tuple[Any, ...]] = {
    "method.name": ("fedcgnm", "fedavg", "logit_adjustment"),
    "local.lr": (0.03, 0.1, 0.3, 1.0),
    "local.batch_size": (16, 64),
    "rates.rate": (0.0, 0.6, 1.0),
    "method.weight_decay": (0.0, 1e-3),
}
"""What is raced, where the caller has not said it."""
SPACES: dict[str, dict[str, tuple[Any, ...]]] = {
    "trees": {
        "method.lr": (0.05, 0.1, 0.2, 0.3),
        "method.leaves": (8, 16, 31, 63),
        "method.power": (0.0, 0.25, 0.5, 0.75),
        "method.least_rows": (5, 20),
    },
    "logistic": {"method.power": (0.0, 0.5, 1.0), "method.strongest": (0.1, 1.0, 10.0)},
}
"""What is raced for methods that have other settings than networks."""
KEEP = 3
"""One of so many goes on to the next rung, for so many times the rounds."""
RUNGS = 3
FEWEST = 3
"""Rounds of the first rung, at least."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Trial:
    """One candidate on one rung."""

    values: dict[str, Any]
    """What it changes, by dotted key; empty for the settings as given."""
    rung: int
    rounds: int
    score: float
    """Its validation metric, higher is better; minus infinity if it diverged."""
    seconds: float


@dataclass
class Tuning:
    """What was tried, and the settings that won."""

    trials: list[Trial] = field(default_factory=list)
    candidates: int = 0

    @property
    def best(self) -> Trial:
        """The best on the highest rung that was reached; the first of equals."""
        return max(self.trials, key=lambda trial: (trial.rung, trial.score))


class _OutOfTime(Exception):
    """The budget is spent in the middle of a trial."""


def parse_budget(text: str) -> float:
    """``90s``, ``5m``, ``1.5h`` or plain seconds."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    seconds = float(matched[1]) * UNITS[matched[2] or "s"] if matched else 0.0
    if not seconds:
        raise FedtailError(f"--budget {text!r} is not a time; use e.g. 90s, 5m or 1h")
    return seconds


def tune_settings(
    settings: Settings,
    given: Collection[str],
    budget: float,
    on_trial: Callable[[Trial, float], None] | None = None,
) -> tuple[Settings, Tuning]:
    """The best settings found within ``budget`` seconds, and every trial.

    Args:
        given: dotted keys that the caller has set, which are not raced.
        on_trial: called after every trial with it and the seconds that are left.
    """
    began = time.perf_counter()
    ready = prepare(build_federation(settings), settings)
    if not sum(map(len, ready.federation.validation)):
        raise FedtailError("tune compares models, but there is no validation data at the clients; set data.validation")
    rounds = lengths(settings.run.rounds, RUNGS, KEEP, FEWEST)
    tuning, waiting = Tuning(), candidates(settings, given)
    tuning.candidates, field = len(waiting) + 1, [{}, *reversed(waiting)]

    def left() -> float:
        return budget - (time.perf_counter() - began)

    while True:
        share = max(left(), 0.0) / RUNGS  # every rung has as much time
        ends = [left() - (rung + 1) * share for rung in range(RUNGS)]

        def play(standing: Sequence[dict[str, Any]], rung: int) -> list[float]:
            scores: list[float] = []
            for values in standing:
                settled = bool(scores) or not rung  # the best of a rung goes on whatever the time
                if tuning.trials and values and settled and left() <= ends[rung]:  # noqa: B023
                    break
                try:  # there is always one result
                    trial = train(ready, settings, values, rung, rounds[rung], left if tuning.trials else None)
                except _OutOfTime:
                    break
                tuning.trials.append(trial)
                scores.append(trial.score)
                if on_trial is not None:
                    on_trial(trial, left())
            if not rung:
                del field[: len(scores)]
            return scores

        halving(list(field), rounds, play, keep=KEEP, always=lambda values: not values)
        if not field or left() <= 0:
            return changed(settings, tuning.best.values), tuning


def candidates(settings: Settings, given: Collection[str]) -> list[dict[str, Any]]:
    """All points of the space that the caller has left free, in an order drawn by the run's seed."""
    named = {key.partition(".")[0] for key in given if key in ("rates.name", "rates.rates")}
    of_networks = {**SPACE, "local.lr": sorted(usual_lrs(settings.local.optimizer)[: len(SPACE["local.lr"])])}
    space = SPACES.get(settings.method.name, of_networks)
    free = {k: v for k, v in space.items() if k not in given and k.partition(".")[0] not in named}
    points = [dict(zip(free, values, strict=True)) for values in itertools.product(*free.values())] if free else []
    order = generator(settings.run.seed, "tune").permutation(len(points))
    first = {"rates.name": "uniform"} if "rates.rate" in free else {}  # names come first, since they clear options
    return [first | points[int(i)] for i in order]


def train(
    ready: Prepared,
    settings: Settings,
    values: Mapping[str, Any],
    rung: int,
    rounds: int,
    left: Callable[[], float] | None,
) -> Trial:
    """Train one candidate; ``left`` says after every round how much time there is."""
    began = time.perf_counter()
    only = {"run.rounds": rounds, "run.evaluate_every": rounds, "run.patience": 0}
    tried = changed(settings, {**values, **only})
    problem = build(tried, ready).problem

    def check(state: State, record: dict[str, Any], seconds: float) -> None:
        if left is not None and left() <= 0 and state.round < rounds:
            raise _OutOfTime

    try:
        history = run_rounds(problem, tried, problem.begin(), check).history
        metric = tried.run.metric
        score = max(signed(metric, record.get("validation", {}).get(metric)) for record in history)
    except FedtailError:  # it diverged, or does not fit this data: it has lost
        score = -np.inf
    finally:
        problem.engine.close()
    return Trial(dict(values), rung, rounds, float(score), time.perf_counter() - began)
