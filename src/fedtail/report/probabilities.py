"""Pictures of probabilities: precision against recall, reliability, and what a threshold finds and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtail.core.evidence import wilson
from fedtail.plots import SHARES, Dot, Line, Lines
from fedtail.report.blocks import say
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.facts import SPLITS, number_in
from fedtail.report.pictures import class_order, over_seeds, per_class
from fedtail.runs.record import RunRecord
from fedtail.words import fixed, number, percent

GRID = np.linspace(0.0, 1.0, 51)
"""Recalls at which the curves of several seeds are averaged."""
LEAST_POSITIVES = 10
"""Samples of a class below which thresholds on it are not drawn: they would be drawn from luck."""
MOST_LINES = 7
"""Classes that share a chart of precision-recall curves, each with a colour of its own."""
ODDS = (0.0001, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
"""Probabilities that the axis of thresholds is labelled at; it is even in log-odds, since rare classes live near 0."""


def pr_charts(comparison: Comparison, first: RunRecord) -> list[Lines]:
    """Draw precision against recall, rarest class first: of one contender some classes a chart, of several one each."""
    known = [c for c in class_order(first).tolist() if any(_curve(r, first.classes[c]) for r in comparison.runs)]
    rule, support = "Each point is a threshold; the dot marks the current decision rule.", first.per_class("support")
    if comparison.several:
        several = [(one.label, comparison.colours[one.label], one) for one in comparison.contenders]
        counts = [f"{int(n):,} of {int(support.sum()):,} test samples are of this class. " for n in support]
        return [
            _precision_recall(
                f"Precision and recall of {first.classes[c]}",
                [(*one, c) for one in several],
                (counts[c] if counts else "") + rule,
                runs=True,
            )
            for c in known
        ]
    only = comparison.reference
    areas = over_seeds(per_class(only, "pr_auc", len(first.classes)))[0]
    names = {c: first.classes[c] + (f" ({areas[c]:.2f})" if areas.size > c else "") for c in known}
    return [
        _precision_recall(
            "Precision and recall of each class",
            # colour 0 is grey, which is for what others are compared with
            [(names[c], i, only, c) for i, c in enumerate(known[start : start + MOST_LINES], start=1)],
            f"{SPLITS[_curves(first)[0]]}. In parentheses: PR-AUC. {rule}",
        )
        for start in range(0, len(known), MOST_LINES)
    ]


def _precision_recall(
    title: str, series: Sequence[tuple[str, int, Contender, int]], caption: str, *, runs: bool = False
) -> Lines:
    """Draw (name, colour, contender, class), each with the point where the decision stands."""
    lines = [Line(name, i, *pr_curve(one, one.runs[0].classes[c])) for name, i, one, c in series]
    dots = [dot for _, i, one, c in series for dot in decision_dots(one, c, i)]
    look: dict[str, Any] = {"x_label": "recall", "floor": 0.0, "ceiling": 1.0, "full": True, "x_ticks": SHARES}
    return Lines(title, lines, "precision", between=True, dots=dots, caption=caption, runs=runs, **look)


def decision_dots(contender: Contender, c: int, colour: int) -> list[Dot]:
    """Return where the decision stands on the curve of a class, over seeds."""
    values = [(r.per_class("accuracy"), r.per_class("precision")) for r in contender.runs]
    points = [(a[c], p[c]) for a, p in values if a.size > c and p.size > c and math.isfinite(a[c])]
    recall, precision = np.mean(points, axis=0).tolist() if points else (0.0, 0.0)
    name = f"decision: recall {number(recall)}, precision {number(precision)}"
    return [Dot(recall, precision, colour, name)] if recall > 0 else []


def _curve(run: RunRecord, name: str) -> dict[str, list[float]]:
    """Return the precision-recall curve of a class as the run recorded it."""
    return dict((_curves(run)[1].get("pr") or {}).get(name) or {})


def pr_curve(contender: Contender, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (recall, precision): the recorded points of one run; of several, their mean at common recalls."""
    curves = [curve for r in contender.runs if (curve := _curve(r, name))]
    points = [np.array([c["recall"], c["precision"]], dtype=np.float64) for c in curves]
    if len(points) <= 1:
        return (points[0][0], points[0][1]) if points else (np.empty(0), np.empty(0))
    return GRID, np.mean([np.interp(GRID, p[0], p[1]) for p in points], axis=0)


def _curves(run: RunRecord) -> tuple[str, dict[str, Any]]:
    curves = run.result.get("curves") or {}
    split = "test" if curves.get("test") else "validation"
    return split, dict(curves.get(split) or {})


def reliability(comparison: Comparison, contender: Contender) -> Lines:
    """Draw how often the top class is right against how probable it was said to be, with 95 % intervals."""
    run = contender.runs[0]
    split, curves = _curves(run)
    before = curves.get("reliability_before") if calibrated(run) else None
    pairs = [("before calibration", 0, before), ("calibrated" if before else "model", 1, curves.get("reliability"))]
    lines = []
    for name, c, bins in pairs:
        if bins:
            p, a, n = (np.array(bins[key], dtype=np.float64) for key in ("probability", "accuracy", "samples"))
            ends = np.array([wilson(share, int(of)) for share, of in zip(a, n, strict=True)]).reshape(-1, 2)
            lines.append(Line(name, c, p, a, samples=n, low=ends[:, 0], high=ends[:, 1]))
    errors = [number_in(run.result.get("before"), "calibration_error")] if before else []
    change = " → ".join(fixed(e) for e in [*errors, run.metric("calibration_error")] if math.isfinite(e))
    look: dict[str, Any] = {"floor": 0.0, "ceiling": 1.0, "full": True, "x_ticks": SHARES, "x_name": "{:.3f}".format}
    return Lines(
        f"Reliability{f' of {contender.label}' if comparison.several else ''}",
        lines,
        "fraction correct",
        "mean predicted probability",
        diagonal=True,
        caption=f"{SPLITS[split]}, seed {run.seed}; larger dots have more samples."
        + (f" Calibration error {change}." if change else "")
        + " On the diagonal, probabilities mean what they say; below it, the model is overconfident.",
        run=comparison.filtered.get(contender.label),
        **look,
    )


def calibrated(run: RunRecord) -> bool:
    """Whether the decision rescales probabilities: thresholds and weights leave them as they are."""
    decision = run.result.get("decision") or {}
    own = [site.get("decision") or {} for site in run.result.get("sites") or [] if isinstance(site, dict)]
    return any(rule.get("temperature") or rule.get("bias") for rule in (decision, *own))


def thresholds(comparison: Comparison, contender: Contender) -> list[Lines]:
    """Draw what a threshold on one class finds, and its cost where costs were declared; nothing from fewer than ten
    samples of the class."""
    run = contender.runs[0]
    tradeoff = run.result.get("tradeoff") or {}
    if not tradeoff.get("threshold") or int(tradeoff.get("support") or 0) < LEAST_POSITIVES:
        return []
    x = _log_odds(np.array(tradeoff["threshold"], dtype=np.float64))
    rising = np.argsort(x, kind="stable")
    chosen = tradeoff.get("chosen")
    at = None if chosen is None else int(np.argmin(np.abs(np.array(tradeoff["threshold"], dtype=np.float64) - chosen)))
    labels = {v: f"{p:g}" for p in ODDS if x.min() - 0.5 <= (v := float(_log_odds(np.array(p)))) <= x.max() + 0.5}
    who = f", {contender.label}" if comparison.several else ""
    name = str(tradeoff.get("class"))
    common: dict[str, Any] = {
        "x_label": "threshold",
        "x_ticks": labels or {0.0: "0.5"},
        "between": True,
        "floor": 0.0,
        "x_name": lambda v: f"{1 / (1 + math.exp(-v)):.3g}",
        "mark": None if chosen is None else float(_log_odds(np.array(chosen, dtype=np.float64))),
        "mark_label": "" if chosen is None else f"chosen: {percent(chosen)}",
        "run": comparison.filtered.get(contender.label),
    }
    recall, precision, cost = (
        np.array(tradeoff.get(k) or [math.nan] * len(x), dtype=np.float64)[rising]
        for k in ("recall", "precision", "cost")
    )
    least = int(np.argmin(np.nan_to_num(cost, nan=math.inf)))
    return [
        Lines(
            f"Recall and precision of {name} by threshold{who}",
            [Line("recall", 1, x[rising], recall), Line("precision", 2, x[rising], precision)],
            "share",
            ceiling=1.0,
            caption=say("threshold", of=tradeoff, at=at),
            **common,
        ),
        Lines(
            f"Cost of a threshold on {name}{who}",
            [Line("cost per sample", 3, x[rising], cost)],
            "cost per sample",
            dots=[Dot(float(x[rising][least]), float(cost[least]), 3, f"minimum: {number(float(cost[least]))}")],
            caption="Misses and false alarms of this class at the declared costs; the dot marks the minimum.",
            **common,
        ),
    ]


def _log_odds(p: np.ndarray) -> np.ndarray:
    p = np.clip(p, 1e-5, 1 - 1e-5)
    return np.asarray(np.log(p) - np.log1p(-p))
