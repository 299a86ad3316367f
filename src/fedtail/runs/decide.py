"""After training: calibrate, and choose how probabilities become answers, on private validation splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from fedtail.core.decisions import (
    EQUAL,
    POWERS,
    Decision,
    Decisions,
    SiteGoal,
    best_temperature,
    bias_step,
    class_shares,
    share_weights,
    worth_of_powers,
)
from fedtail.core.promise import promise_recall
from fedtail.core.scores import Scores
from fedtail.core.totals import total
from fedtail.errors import FedtailError, one_of
from fedtail.rounds.state import Problem
from fedtail.settings import DecisionSettings

MOST_STEPS, SETTLED = 12, 0.02
"""Most steps of vector scaling, an exchange each; it ends when a step moves no log-probability by more than this."""


def check_decision(wanted: DecisionSettings, classes: Sequence[str]) -> None:
    """Refuse before the first round what could not be decided after the last."""
    if wanted.goal == "recall":
        if wanted.find is None:
            raise FedtailError(f"decision.goal = 'recall' needs decision.find, one of: {', '.join(classes)}")
        if wanted.find not in classes:
            raise one_of("decision.find", wanted.find, classes)
    if wanted.goal == "cost":
        rows = wanted.costs or ()
        if len(rows) != len(classes) or any(len(row) != len(classes) for row in rows):
            raise FedtailError(
                f"decision.goal = 'cost' needs decision.costs, {len(classes)} rows of {len(classes)} numbers: row i, "
                f"column j is the cost of calling class i class j (order: {', '.join(classes)})"
            )


def choose_decisions(problem: Problem, x: Tensor, wanted: DecisionSettings, classes: Sequence[str]) -> Decisions:
    """The decisions that the settings ask for, from counts that sites add up on their private validation splits, and
    where each site is to have its own, what sites find there by themselves."""
    if wanted.calibrate == "none" and wanted.goal == "argmax" and wanted.scope == "global":
        return Decisions()

    def ask(decision: Decision) -> Scores | None:
        return total(found for _, found in problem.engine.scores(x, "validation", Decisions(decision)))

    goal = common_goal(ask, wanted, classes)
    if wanted.scope == "global":
        return Decisions(goal.common)
    return Decisions(goal.common, problem.engine.site_decisions(x, goal))


def common_goal(ask: Callable[[Decision], Scores | None], wanted: DecisionSettings, classes: Sequence[str]) -> SiteGoal:
    """The decision that the settings ask for, with what sites need to find one of their own.

    ask: counts of all validation rows under a decision.
    """
    scores = ask(Decision())
    if scores is None or not scores.n:
        raise FedtailError("decision: choosing it needs validation data at the clients (data.validation)")
    decision, scores = calibrated(ask, wanted.calibrate, scores)
    shares = class_shares(scores)
    curve: tuple[float, ...] = ()
    if wanted.goal == "cost":
        decision = replace(decision, costs=tuple(tuple(float(v) for v in row) for row in wanted.costs or ()))
    elif wanted.goal == "recall":
        target = list(classes).index(str(wanted.find))
        promise = promise_recall(scores.bins[target], wanted.recall, wanted.confidence)
        if promise.positives:  # else none keeps it: 0 would call every row by the class
            decision = decision.with_promise(target, promise, len(classes))
    elif wanted.goal == "macro_f1":
        decision, curve = best_power(ask, decision, scores)
    elif wanted.goal == "balanced_accuracy":
        decision = replace(decision, weights=share_weights(shares, EQUAL))
    return SiteGoal(
        common=decision.with_sets(scores),
        goal=wanted.goal,
        shares=tuple(shares.tolist()),
        curve=curve,
        recall=wanted.recall,
        confidence=wanted.confidence,
    )


def best_power(
    ask: Callable[[Decision], Scores | None], decision: Decision, scores: Scores
) -> tuple[Decision, tuple[float, ...]]:
    """The decision with the weights of the best macro F1, and what each of ``POWERS`` is worth."""
    tried = [replace(decision, weights=share_weights(class_shares(scores), power)) for power in POWERS]
    worth = worth_of_powers([(ask(one) or scores).confusion for one in tried])
    return tried[int(np.argmax(worth))], tuple(worth.tolist())


def calibrated(
    ask: Callable[[Decision], Scores | None], how: str, scores: Scores, start: Decision | None = None
) -> tuple[Decision, Scores]:
    """Refit a temperature, or one and a bias per class by turns, and return the counts under them too.

    ask: counts of all rows under a decision; scores: those under ``start``.
    """
    decision = start or Decision()
    for step in range(0 if how == "none" else 1 if how == "temperature" else MOST_STEPS):
        if step % 2 == 0:
            by = best_temperature(scores)
            bias = tuple(b / by for b in decision.bias)
            decision, moved = replace(decision, temperature=decision.temperature * by, bias=bias), abs(by - 1)
        else:
            added = bias_step(scores)
            bias = tuple((np.asarray(decision.bias or 0.0) + added).tolist())
            decision, moved = replace(decision, bias=bias), float(np.abs(added).max())
        scores = ask(decision) or scores
        if step > 1 and moved < SETTLED:
            break
    return decision, scores


def describe_decision(decision: Decision, classes: Sequence[str]) -> dict[str, Any]:
    """For ``result.json`` and the report: only what differs from the plain argmax, with names."""
    out: dict[str, Any] = {}
    if decision.temperature != 1.0:
        out["temperature"] = decision.temperature
    for name, values in (("weights", decision.weights), ("bias", decision.bias)):
        if values:
            out[name] = dict(zip(classes, values, strict=True))
    named = {name: t for name, t in zip(classes, decision.thresholds, strict=False) if t is not None}
    if named:
        out["thresholds"] = named
    if decision.target is not None:
        out |= {"find": classes[decision.target], "threshold": decision.thresholds[decision.target]}
    if decision.promise is not None:
        out["promise"] = decision.promise.to_json()
    if decision.costs:
        out["costs"] = [list(row) for row in decision.costs]
    return out
