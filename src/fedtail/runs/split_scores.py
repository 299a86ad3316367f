"""Scores of a finished model on its two splits, pooled and site by site: metrics, curves, what a threshold costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedtail.core.decisions import Decision, Decisions
from fedtail.core.scores import Scores, curve, reliability
from fedtail.data.inspection import About
from fedtail.rounds.state import Problem
from fedtail.rounds.validation import SITE_METRIC, over_sites
from fedtail.runs.decide import describe_decision

POINTS = 60
"""Points that are kept of a curve: enough to draw it."""
MOST_CLASSES = 50
"""Classes, the rarest, whose curves are kept."""
SPLITS = ("validation", "test")


@dataclass(frozen=True)
class SplitScores:
    """One split: the sum over sites, and each site's own metrics."""

    pooled: Scores | None
    sites: dict[int, dict[str, Any]]
    """client -> its metrics; -1 is nobody's own samples."""

    @property
    def own(self) -> dict[int, dict[str, Any]]:
        return {k: row for k, row in self.sites.items() if k >= 0}

    @property
    def comparable(self) -> dict[int, float]:
        """Client -> macro F1, but for those with samples of one class alone: always answering it would make it 1."""
        rows = {k: row for k, row in self.own.items() if np.count_nonzero(row["per_class_support"]) > 1}
        return {k: float(row[SITE_METRIC]) for k, row in rows.items()}


Splits = Mapping[str, SplitScores]
"""``validation`` and ``test``."""


def score_splits(problem: Problem, x: Tensor, decisions: Decisions | None = None) -> Splits:
    """A model on both splits; the counts of one site after the other are in memory."""
    splits = {}
    for split in SPLITS:
        pooled: Scores | None = None
        sites: dict[int, dict[str, Any]] = {}
        for k, scores in problem.engine.scores(x, split, decisions):
            pooled = scores if pooled is None else pooled + scores
            if scores.n:
                sites[k] = problem.metrics(scores.confusion, scores)
        splits[split] = SplitScores(pooled, sites)
    return splits


def metrics_of_test(problem: Problem, splits: Splits, confusion: np.ndarray | None = None) -> dict[str, Any]:
    """Return every metric of the test set, by its counts or by another confusion matrix; the worst site by private
    splits where the test set is nobody's own."""
    test = splits["test"]
    counts = test.pooled.confusion if confusion is None and test.pooled is not None else confusion
    assert counts is not None
    each = (test if test.own else splits["validation"]).comparable
    return problem.metrics(counts, test.pooled, list(each.values()) or None)


def curves_of(splits: Splits, before: Splits | None, classes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Precision-recall curves of classes and the reliability of the top class on each split, for ``result.json``."""
    curves = {s: _curves(one, None if before is None else before[s], classes) for s, one in splits.items()}
    return {split: drawn for split, drawn in curves.items() if drawn}


def _curves(split: SplitScores, before: SplitScores | None, classes: Sequence[str]) -> dict[str, Any]:
    if split.pooled is None or not split.pooled.n:
        return {}
    support = split.pooled.bins[:, 1].sum(-1)
    order = [int(c) for c in np.argsort(support, kind="stable") if support[c]][:MOST_CLASSES]
    out: dict[str, Any] = {
        "pr": {str(classes[c]): thinned(split.pooled.bins[c]) for c in sorted(order)},
        "reliability": reliable(split.pooled),
    }
    if before is not None and before.pooled is not None:
        out["reliability_before"] = reliable(before.pooled)
    return out


def thinned(bins: np.ndarray) -> dict[str, list[float]]:
    """At most ``POINTS`` points of a precision-recall curve, even in recall, its ends among them."""
    thresholds, precision, recall = curve(bins)
    at = np.unique(np.searchsorted(recall, np.linspace(recall[0], recall[-1], POINTS)).clip(0, len(recall) - 1))
    return {
        "threshold": thresholds[at].round(6).tolist(),
        "precision": precision[at].round(5).tolist(),
        "recall": recall[at].round(5).tolist(),
    }


def reliable(scores: Scores) -> dict[str, list[float]]:
    """Mean probability and accuracy of the top class, in the bins of the calibration error."""
    probability, accuracy, samples = reliability(scores.cells)
    return {
        "probability": probability.round(5).tolist(),
        "accuracy": accuracy.round(5).tolist(),
        "samples": samples.astype(int).tolist(),
    }


def tradeoff_of(scores: Scores | None, decision: Decision, classes: Sequence[str]) -> dict[str, Any]:
    """What each threshold of the class to find, or of the rarest, would give: how many of it are found, missed, and
    called in vain. With costs also what misses and false alarms of this class against the rest cost on average, each at
    its mean over the others. Empty without samples."""
    if scores is None or not scores.n:
        return {}
    cases = scores.bins[:, 1].sum(-1)
    target = int(np.where(cases > 0, cases, np.inf).argmin()) if decision.target is None else decision.target
    thresholds, precision, recall = curve(scores.bins[target])
    support, n = int(cases[target]), scores.n
    at = np.unique(np.linspace(0, len(thresholds) - 1, 2 * POINTS).astype(int)) if len(thresholds) else np.empty(0, int)
    hit = recall[at] * support
    alarms = np.rint(hit / np.maximum(precision[at], 1e-12) - hit)
    out: dict[str, Any] = {
        "class": classes[target],
        "split": "validation",
        "threshold": thresholds[at].round(6).tolist(),
        "recall": recall[at].round(5).tolist(),
        "precision": precision[at].round(5).tolist(),
        "false_alarms": alarms.astype(int).tolist(),
        "missed": np.rint(support - hit).astype(int).tolist(),
        "chosen": None if decision.target is None else decision.thresholds[target],
        "samples": n,
        "support": support,
    }
    if decision.costs:
        table = np.asarray(decision.costs, dtype=np.float64)
        others = np.arange(len(table)) != target
        miss, alarm = table[target, others].mean(), table[others, target].mean()
        out["cost"] = ((miss * (support - hit) + alarm * alarms) / max(n, 1)).round(6).tolist()
    return out


def site_rows(about: About, splits: Splits, before: Splits | None, decisions: Decisions) -> list[dict[str, Any]]:
    """A row per site that told something: its metrics on each split, and those of the plain argmax."""
    clients = sorted({k for split in splits.values() for k in split.own})
    rows = []
    for k in clients:
        row: dict[str, Any] = {
            "site": about.sites[k],
            **{name: split.own[k] for name, split in splits.items() if k in split.own},
        }
        if before is not None:
            row["before"] = {name: split.own[k] for name, split in before.items() if k in split.own}
        if k in decisions.sites:
            row["decision"] = describe_decision(decisions.sites[k], about.classes)
        rows.append(row)
    return rows


def worst_of(names: Sequence[str], splits: Splits, before: Splits | None) -> dict[str, Any]:
    """The worst site, the mean and the spread: on the sites' own test sets, or else on their private splits."""
    split = "test" if splits["test"].own else "validation"

    def named(scores: SplitScores) -> dict[str, Any]:
        found = over_sites(scores.comparable, SITE_METRIC)
        worst = {"site": names[found["client"]], "value": found["worst"]} if found else {}
        return worst | {key: found[key] for key in ("mean", "spread") if found}

    if not (worst := named(splits[split])):
        return {}
    out = {"metric": SITE_METRIC, "split": split, **worst}
    return out if before is None else {**out, "before": named(before[split])}
