"""Which model is kept by validation, and when a run stops because validation no longer improves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedtail.errors import FedtailError
from fedtail.rounds.state import Best, State
from fedtail.rounds.validation import better, exhausted, kept_model
from fedtail.settings import RunSettings, Settings


def played(scores: list[float], samples: int = 100, searching: int = 0) -> State:
    """A state after rounds with these validation accuracies; the first ``searching`` still searched."""
    state = State(0, torch.zeros(1))
    for t, score in enumerate(scores):
        state.round, state.x = t + 1, torch.tensor([float(t + 1)])
        state.best = better(state, state.x, {"accuracy": score}, samples, "accuracy")
        state.history.append({"round": t, "searching": t < searching})
    return state


def best(scores: list[float], samples: int = 100) -> Best:
    found = played(scores, samples).best
    assert found is not None and found.x.item() == found.round
    return found


def test_what_validation_cannot_tell_apart_is_decided_by_training_for_longer() -> None:
    assert best([0.5, 0.8, 0.79, 0.77]).round == 3  # half a standard error of 0.8 on 100 samples is 0.02
    assert best([0.5, 0.8, 0.79, 0.77], samples=10_000).round == 2
    assert best([0.5, 0.8, 0.77, 0.9]).round == 4


@pytest.mark.parametrize(("select", "kept"), [("best", 2.0), ("last", 4.0)])
def test_a_run_ends_with_the_model_that_it_was_asked_to_keep(select: str, kept: float) -> None:
    view = SimpleNamespace(x=torch.tensor([4.0]))
    problem = SimpleNamespace(
        engine=SimpleNamespace(sizes=np.ones(2)),
        method=SimpleNamespace(serve=lambda server, state: server.x, conclude=lambda server, state: server.x),
        view=lambda *given: replace(Seen(), x=view.x),
    )
    state = played([0.5, 0.8, 0.6, 0.5])
    assert kept_model(problem, Settings.of(select=select), state).item() == kept


@dataclass(frozen=True)
class Seen:
    x: torch.Tensor | None = None


def test_patience_counts_rounds_without_a_new_best_value() -> None:
    run = RunSettings(patience=2)
    assert not exhausted(played([0.5, 0.6, 0.6]), run)
    assert exhausted(played([0.5, 0.6, 0.6, 0.59]), run)
    assert not exhausted(played([0.5, 0.6, 0.6, 0.61]), run)
    assert not exhausted(played([0.5, 0.6, 0.6, 0.59]), RunSettings())


def test_a_run_never_stops_while_something_is_searched_and_patience_starts_after_it() -> None:
    run, flat = RunSettings(patience=2), [0.6] * 6
    assert not exhausted(played(flat, searching=6), run)
    assert not exhausted(played(flat, searching=5), run)
    assert exhausted(played([*flat, 0.6], searching=5), run)


def test_patience_needs_validation() -> None:
    with pytest.raises(FedtailError, match="patience needs validation"):
        Settings.of(patience=3, validate_every=0)
