"""The global model on the clients' private splits: pooled, and how far apart clients are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedtail.core.counts import total
from fedtail.core.evidence import Evidence, class_counts
from fedtail.core.metrics import METRICS
from fedtail.rounds.state import Problem

SITE_METRIC = "macro_f1"
"""What clients are compared by; accuracy, where they tell no counts per class."""


def validate_model(problem: Problem, x: Tensor, metric: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    """(every metric of the pooled private splits, the worst client and the spread over clients, samples).

    ``metric``: what the run compares by; probabilities are counted only if it needs them. Where only sums over clients
    are known, nothing is said of single ones.
    """
    engine = problem.engine
    parts = engine.confusions(x)
    counts = np.sum(list(parts.values()), axis=0) if parts else engine.confusion(x, "validation")
    scores = total(found for _, found in engine.scores(x, "validation")) if METRICS[metric].needs == "scores" else None
    by_class = counts.shape != (1, 2)
    compared = SITE_METRIC if by_class else "accuracy"
    each = site_values(parts, compared)
    told = problem.metrics(counts, scores, list(each.values()) if each and by_class else None)
    return told, over_sites(each, compared), int(counts.sum() if by_class else counts[0, 1])


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
    told = {k: v for k, v in values.items() if np.isfinite(v)}
    if not told:
        return {}
    worst = (min if METRICS[metric].higher_is_better else max)(told, key=lambda k: told[k])
    each = np.array(list(told.values()))
    return {
        "metric": metric,
        "client": worst,
        "worst": told[worst],
        "mean": float(each.mean()),
        "spread": float(each.std()),
        "n": len(told),
    }
