"""How good a trained model is on labelled rows: every metric with an interval, per class and per site.

Everything is computed from ``Scores``, counts that sites can add up, so that the same figures come from rows at hand
and from sums over a federation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedtail.core.evidence import area_interval, evidence_of, rarest_class, wilson
from fedtail.core.metrics import METRICS, majority_floor, summarize
from fedtail.core.random import generator
from fedtail.core.scores import Scores, average_precision
from fedtail.runs.judged import Judged

RESAMPLES = 400
LEVEL = 0.95


class Evaluation(dict[str, Any]):
    """How good a model is: ``metrics`` with intervals, ``classes`` in order of rarity, ``sites``, ``confusion``."""

    def _repr_html_(self) -> str:
        metrics = {METRICS[k].title: v for k, v in self["metrics"].items() if METRICS[k].headline}
        classes = [{k: v["value"] if isinstance(v, dict) else v for k, v in row.items()} for row in self["classes"]]
        tables = pd.DataFrame.from_dict(metrics, orient="index"), pd.DataFrame(classes)
        return "".join(table.to_html(float_format="{:.3f}".format, na_rep="") for table in tables)


def evaluate(judged: Judged) -> Evaluation:
    """Judge labelled rows, and each site's by themselves where the rows name sites."""
    rows = judged.labelled
    return evaluation(rows.scores, rows.classes, {name: part.scores for name, part in rows.by_site().items()})


def evaluation(scores: Scores, classes: Sequence[str], sites: Mapping[str, Scores] | None = None) -> Evaluation:
    """Compute everything from counts: those of all rows, and of each site where sites tell theirs."""
    sites = sites or {}
    each = [float(summarize(s.confusion)["macro_f1"]) for s in sites.values() if _comparable(s)]
    metrics = summarize(scores.confusion, scores=scores, sites=each or None)
    intervals = _intervals(scores)
    return Evaluation(
        rows=scores.n,
        metrics={
            name: {"value": _plain(value), **({"interval": intervals[name]} if name in intervals else {})}
            for name, value in metrics.items()
            if name in METRICS
        },
        floor={name: _plain(v) for name, v in majority_floor(scores.confusion.sum(1)).items()},
        classes=_classes(scores, classes),
        sites={name: _site(part, classes) for name, part in sites.items()},
        confusion=scores.confusion.tolist(),
    )


def _classes(scores: Scores, classes: Sequence[str]) -> list[dict[str, Any]]:
    """One record per class, the rarest first: what is found, what is missed, what is a false alarm."""
    counts = evidence_of(scores.confusion)
    out = []
    for c in np.argsort(counts.support, kind="stable").tolist():
        hits, support = int(scores.confusion[c, c]), int(counts.support[c])
        called = int(scores.confusion[:, c].sum())
        out.append(
            {
                "class": classes[c],
                "cases": support,
                "found": hits,
                "missed": support - hits,
                "false_alarms": called - hits,
                "recall": _share(hits, support),
                "precision": _share(hits, called),
                "f1": _plain(float(counts.f1[c])) if support else None,
                "pr_auc": _plain(average_precision(scores.bins[c])),
            }
        )
    return out


def _site(scores: Scores, classes: Sequence[str]) -> dict[str, Any]:
    metrics = summarize(scores.confusion, scores=scores)
    if not _comparable(scores):
        metrics["macro_f1"] = metrics["pr_auc"] = float("nan")
    return {
        "rows": scores.n,
        **{name: _plain(metrics[name]) for name in ("accuracy", "macro_f1", "pr_auc", "calibration_error")},
        "classes": {
            name: {"cases": int(row.sum()), "found": int(row[c])}
            for c, (name, row) in enumerate(zip(classes, scores.confusion, strict=True))
        },
    }


def _comparable(scores: Scores) -> bool:
    """Whether there are rows of several classes: with one, always answering it would be perfect."""
    return bool(np.count_nonzero(scores.confusion.sum(1)) > 1)


def _share(hits: int, n: int) -> dict[str, Any]:
    """A share with its interval; nothing where there is nothing to take a share of."""
    return {"value": hits / n, "interval": list(wilson(hits / n, n))} if n else {"value": None}


def _intervals(scores: Scores) -> dict[str, list[float]]:
    """Bootstrap intervals of what the confusion matrix and the counts of probabilities tell: resampling rows is
    drawing these counts anew. Half a mistake is added per class, and half a hit: a model without one is not known to
    make none."""
    rng, n, c = generator(0, "evaluation"), scores.n, len(scores.confusion)
    if not n:
        return {}
    support = scores.confusion.sum(1)
    cells = (scores.confusion + 0.5 * (support[:, None] > 0) * np.where(np.eye(c), 1, 1 / max(c - 1, 1))).ravel()
    cells /= cells.sum()
    drawn: dict[str, list[float]] = {}
    for _ in range(RESAMPLES):
        confusion = rng.multinomial(n, cells).reshape(scores.confusion.shape)
        for name, value in summarize(confusion).items():
            if name in METRICS:
                drawn.setdefault(name, []).append(float(value))
    drawn["pr_auc"] = np.nanmean(
        [_resampled_areas(bins, rng) for bins in scores.bins if bins[1].any()], axis=0
    ).tolist()
    rest = 50 * (1 - LEVEL)
    intervals = {
        name: np.nanpercentile(values, [rest, 100 - rest]).tolist()
        for name, values in drawn.items()
        if np.isfinite(values).any()
    }
    rare = rarest_class(evidence_of(scores.confusion))
    areas = area_interval(average_precision(scores.bins[rare]), int(support[rare]))
    return {**intervals, "accuracy": list(wilson(np.trace(scores.confusion) / n, n)), "rare_pr_auc": list(areas)}


def _resampled_areas(bins: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(RESAMPLES,) areas under the precision-recall curve of one class, over draws of its counts."""
    kept = np.flatnonzero(bins.sum(0))
    small = bins[:, kept]
    return np.array(
        [
            average_precision(np.stack([rng.multinomial(int(row.sum()), row / max(row.sum(), 1)) for row in small]))
            for _ in range(RESAMPLES)
        ]
    )


def _plain(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
