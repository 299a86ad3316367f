"""The global model on the clients' private splits: pooled, and how far apart clients are; which model a run keeps, and
when it stops for want of a better one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from fedtail.core.evidence import Evidence, class_counts
from fedtail.core.metrics import METRICS, signed
from fedtail.core.totals import total
from fedtail.errors import FedtailError
from fedtail.rounds.state import Best, Problem, State
from fedtail.settings import RunSettings, Settings

SITE_METRIC = "macro_f1"
"""What clients are compared by; accuracy, where they tell no counts per class."""


def validate_model(
    problem: Problem, x: Tensor, metric: str, counts: np.ndarray | None = None
) -> tuple[dict[str, Any], int]:
    """(the record's part: every metric of the pooled private splits, the worst client and the spread; samples).

    ``metric``: what the run compares by; probabilities are counted only if it needs them. ``counts``: the confusion
    matrix, where it is known. Where only sums over clients are known, nothing is said of single ones.
    """
    engine = problem.engine
    parts = engine.confusions(x)
    if counts is None:
        counts = np.sum(list(parts.values()), axis=0) if parts else engine.confusion(x, "validation")
    scored = METRICS[metric].needs == "scores"
    scores = total(counted for _, counted in engine.scores(x, "validation")) if scored else None
    by_class = counts.shape != (1, 2)
    compared = SITE_METRIC if by_class else "accuracy"
    each = site_values(parts, compared)
    metrics = problem.metrics(counts, scores, list(each.values()) if each and by_class else None)
    told = {"validation": metrics, **({"sites": sites} if (sites := over_sites(each, compared)) else {})}
    return told, int(counts.sum() if by_class else counts[0, 1])


def site_values(parts: Mapping[int, np.ndarray], metric: str) -> dict[int, float]:
    """Return the metric of every client with samples, from their confusion matrices: of all at once, since there may be
    very many."""
    sites = [k for k, m in parts.items() if m.sum()]
    if not sites:
        return {}
    matrices = np.stack([parts[k] for k in sites]).astype(np.float64)
    hidden = matrices.shape[1:] == (1, 2)  # correct and all samples, where class counts stay at the clients
    counts = matrices[:, 0, [0, 1, 1], None] if hidden else class_counts(matrices)
    return dict(zip(sites, METRICS[metric](Evidence(counts)).tolist(), strict=True))


def over_sites(values: Mapping[int, float], metric: str) -> dict[str, Any]:
    """The worst client, the mean over clients and their spread, by a metric; empty if nobody tells."""
    known = {k: v for k, v in values.items() if np.isfinite(v)}
    if not known:
        return {}
    worst = (min if METRICS[metric].higher_is_better else max)(known, key=lambda k: known[k])
    each = np.array(list(known.values()))
    return {
        "metric": metric,
        "client": worst,
        "worst": known[worst],
        "mean": float(each.mean()),
        "spread": float(each.std()),
        "n": len(known),
    }


def exhausted(state: State, run: RunSettings) -> bool:
    """Return whether validation has not improved for ``run.patience`` rounds; never while something is searched."""
    if not run.patience or state.best is None or state.history[-1]["searching"]:
        return False
    settled = next(r["round"] for r in state.history if not r["searching"])
    return state.round - max(state.best.since, settled) >= run.patience


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
