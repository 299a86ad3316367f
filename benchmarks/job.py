"""One of our runs on the common workload, advanced a round at a time, and timing in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fedtail.data.federation import Federation
from fedtail.methods import METHODS
from fedtail.rates import RATES
from fedtail.rounds.loop import train_rounds
from fedtail.rounds.state import Problem, State
from fedtail.runs.build import assemble
from fedtail.settings import Settings
from workload import BATCH, Workload

WARM = 3
"""Rounds before the clock starts; steps are captured in the first."""


class Job:
    """One of our runs, advanced a round at a time."""

    def __init__(
        self, work: Workload, federation: Federation, method: str, *, rates: str = "uniform", path: str = "auto",
        workers: int = 1, participation: float = 1.0, rounds: int = 10**6, validate_every: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        strategy = RATES.build(rates, federation.n_clients, **options)
        self.problem: Problem = assemble(
            federation, work.module(), METHODS.build(method), strategy,
            Settings.of(batch_size=BATCH, path=path, workers=workers),
        )  # fmt: skip
        if path != "reference":
            self.problem.engine.programs.capture_after = 0.0
        self.plan: dict[str, Any] = {
            "lr": work.lr, "schedule": "constant", "participation": participation,
            "evaluate_every": rounds + 1, "validate_every": validate_every, "diagnostics": (),
        }  # fmt: skip
        self.state: State = self.problem.begin()
        self.first = self.round()

    def round(self) -> float:
        """The next round's seconds, as the loop tells them: without what a run begins with."""
        plan = Settings.of(rounds=self.state.round + 2, **self.plan)  # never the last round, which would be evaluated
        taken = [0.0]

        def stop(state: State, record: dict[str, Any], seconds: float) -> bool:
            taken[0] = seconds
            return True

        train_rounds(self.problem, plan, self.state, on_round=stop)
        return taken[0]


def in_turns(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Least seconds of each job, repeated in turns: what it tells, or what it takes."""
    best = dict.fromkeys(jobs, float("inf"))
    for i in range(WARM + repeats):
        for name, job in jobs.items():
            began = time.perf_counter()
            told = job()
            seconds = told if isinstance(told, float) else time.perf_counter() - began
            if i >= WARM:
                best[name] = min(best[name], seconds)
    return best
