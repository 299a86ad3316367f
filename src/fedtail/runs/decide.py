"""After training: calibrate, and choose how probabilities become answers, on private validation splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fedtail.core.decisions import Decision, Decisions, best_temperature, f1_weights, recall_threshold
from fedtail.core.scores import Scores, total
from fedtail.errors import FedtailError, one_of
from fedtail.rounds.state import Problem
from fedtail.settings import Decision as DecisionSettings


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
                f"column j is what calling class i class j costs (order: {', '.join(classes)})"
            )


def choose_decision(problem: Problem, x: Tensor, wanted: DecisionSettings, classes: Sequence[str]) -> Decision:
    """The decision that the settings ask for, from counts that sites add up on their private validation splits."""
    if wanted.calibrate == "none" and wanted.goal == "argmax":
        return Decision()
    scores = _validation(problem, x, Decision())
    if scores is None or not scores.n:
        raise FedtailError(
            "decision: there is nothing to choose by; it needs validation data at the clients (data.validation) and, "
            "in a real federation, deploy.reveal = 'sums' or 'classes'"
        )
    decision = Decision()
    if wanted.calibrate == "temperature":
        decision = replace(decision, temperature=best_temperature(scores))
        scores = _validation(problem, x, decision) or scores
    if wanted.goal == "cost":
        return replace(decision, costs=tuple(tuple(float(v) for v in row) for row in wanted.costs or ()))
    if wanted.goal == "recall":
        target = list(classes).index(str(wanted.find))
        return replace(decision, target=target, threshold=recall_threshold(scores, target, wanted.recall))
    if wanted.goal == "macro_f1":
        weighted = replace(decision, weights=f1_weights(scores))
        after = _validation(problem, x, weighted)
        if after is not None and _macro_f1(problem, after) > _macro_f1(problem, scores):
            return weighted  # thresholds of single classes need not help together
    return decision


def _macro_f1(problem: Problem, scores: Scores) -> float:
    return float(problem.metrics(scores.confusion)["macro_f1"])


def _validation(problem: Problem, x: Tensor, decision: Decision) -> Scores | None:
    return total(found for _, found in problem.engine.scores(x, "validation", Decisions(decision)))


def describe_decision(decision: Decision, classes: Sequence[str]) -> dict[str, Any]:
    """For ``result.json`` and the report: only what differs from the plain argmax, with names."""
    out: dict[str, Any] = {}
    if decision.temperature != 1.0:
        out["temperature"] = decision.temperature
    if decision.weights:
        out["weights"] = dict(zip(classes, decision.weights, strict=True))
    if decision.target is not None:
        out |= {"find": classes[decision.target], "threshold": decision.threshold}
    if decision.costs:
        out["costs"] = [list(row) for row in decision.costs]
    return out
