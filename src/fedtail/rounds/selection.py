"""Which model a run keeps, and when it stops for want of a better one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from fedtail.core.metrics import signed
from fedtail.errors import FedtailError
from fedtail.rounds.state import Best, Problem, State
from fedtail.settings import RunSettings, Settings


def over(problem: Problem, run: RunSettings, state: State) -> bool:
    """Return whether there is nothing left to train for: the search alone was asked for, or patience is at an end."""
    return (problem.search_only and problem.rates.done) or exhausted(state, run)


def exhausted(state: State, run: RunSettings) -> bool:
    """Return whether validation has not improved for ``run.patience`` rounds; never while something is searched."""
    if not run.patience or state.best is None or state.history[-1]["searching"]:
        return False
    found = next(r["round"] for r in state.history if not r["searching"])
    return state.round - max(state.best.since, found) >= run.patience


def better(state: State, x: Tensor, validation: dict[str, Any], samples: int, metric: str) -> Best:
    """Return the model to keep by validation after one more round, of which ``x`` is the model."""
    if not np.isfinite(validation["accuracy"]):
        raise FedtailError(
            "run.select = 'best' and run.patience compare models, but there is no validation data at the clients; set "
            "data.validation"
        )
    now, done, best = signed(metric, validation.get(metric)), state.round, state.best
    if best is None or now > best.score:
        return Best(round=done, score=now, x=x, since=done)
    peak = best.score
    error = 0.5 * np.sqrt(peak * (1 - peak) / samples) if samples and 0 < peak < 1 else 0.0
    return replace(best, round=done, x=x) if now >= peak - error else best


def kept_model(problem: Problem, settings: Settings, state: State) -> Tensor:
    """Return the model that a run ends with, by ``run.select`` and what its method does after the last round."""
    sizes, method = problem.engine.sizes, problem.method
    view = problem.view(settings, state.x, state.round, sizes / sizes.sum(), 0.0)
    best = state.best if settings.run.select == "best" else None
    x = method.serve(view, state.method) if best is None else best.x
    return method.conclude(replace(view, x=x), state.method)
