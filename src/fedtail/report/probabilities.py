"""Pictures of probabilities: precision against recall, reliability, and what a threshold finds and costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedtail.core.evidence import wilson
from fedtail.plots import SHARES, Dot, Line, Lines
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.pictures import over_seeds, own_colour, palette, per_class
from fedtail.runs.record import RunRecord
from fedtail.words import fixed, number, percent, plural

GRID = np.linspace(0.0, 1.0, 51)
"""Recalls at which the curves of several seeds are averaged."""
LEAST_POSITIVES = 10
"""Samples of a class below which thresholds on it are not drawn: they would be drawn from luck."""
RATIOS = (1, 10, 100)
"""What a missed sample may cost, in false alarms, where no costs were declared."""
ODDS = (0.0001, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
"""Probabilities that the axis of thresholds is labelled at; it is even in log-odds, since rare classes live near 0."""


def precision_recall(title: str, lines: Sequence[Line], dots: Sequence[Dot], caption: str, **more: Any) -> Lines:
    """Draw precision against recall."""
    look: dict[str, Any] = {"x_label": "recall", "floor": 0.0, "ceiling": 1.0, "full": True, "x_ticks": SHARES}
    return Lines(title, lines, "precision", between=True, dots=dots, caption=caption, **look, **more)


def curves_of_classes(contender: Contender, group: Sequence[int]) -> Lines:
    """Draw the precision-recall curves of some classes of one contender."""
    first, lines, dots = contender.runs[0], [], []
    areas = over_seeds(per_class(contender, "pr_auc", len(first.classes)))[0]
    for i, c in enumerate(group, start=1):  # colour 0 is grey, which is for what others are compared with
        area = f" ({areas[c]:.2f})" if areas.size > c and math.isfinite(areas[c]) else ""
        lines.append(Line(first.classes[c] + area, i, *pr_curve(contender, first.classes[c])))
        dots += decision_dots(contender, c, i)
    split = "On the test set." if _curves(first)[0] == "test" else "On the private validation splits."
    caption = f"{split} In parentheses: PR-AUC. Each point is a threshold; the dot marks the current decision rule."
    return precision_recall("Precision and recall of each class", lines, dots, caption)


def curves_of_class(comparison: Comparison, first: RunRecord, c: int) -> Lines:
    """Draw the precision-recall curves of one class, a line per contender."""
    colours, lines, dots = palette(comparison), [], []
    for one in comparison.contenders:
        recall, precision = pr_curve(one, first.classes[c])
        if recall.size:
            lines.append(Line(one.label, colours[one.label], recall, precision))
            dots += decision_dots(one, c, colours[one.label])
    support = first.per_class("support")
    of = f"{int(support[c]):,} of {int(support.sum()):,} test samples belong to this class." if support.size else ""
    return precision_recall(first.classes[c], lines, dots, of, runs=True)


def decision_dots(contender: Contender, c: int, colour: int) -> list[Dot]:
    """Return where the decision stands on the curve of a class, over seeds."""
    values = [(r.per_class("accuracy"), r.per_class("precision")) for r in contender.runs]
    points = [(a[c], p[c]) for a, p in values if a.size > c and p.size > c and math.isfinite(a[c])]
    recall, precision = np.mean(points, axis=0).tolist() if points else (0.0, 0.0)
    name = f"decision: recall {number(recall)}, precision {number(precision)}"
    return [Dot(recall, precision, colour, name)] if recall > 0 else []


def recorded_curve(run: RunRecord, name: str) -> dict[str, list[float]]:
    """Return the precision-recall curve of a class as the run recorded it."""
    return dict((_curves(run)[1].get("pr") or {}).get(name) or {})


def pr_curve(contender: Contender, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (recall, precision): the recorded points of one run; of several, their mean at common recalls."""
    curves = [one for r in contender.runs if (one := recorded_curve(r, name))]
    points = [np.array([c["recall"], c["precision"]], dtype=np.float64) for c in curves]
    if len(points) <= 1:
        return (points[0][0], points[0][1]) if points else (np.empty(0), np.empty(0))
    return GRID, np.mean([np.interp(GRID, p[0], p[1]) for p in points], axis=0)


def _curves(run: RunRecord) -> tuple[str, dict[str, Any]]:
    curves = run.result.get("curves") or {}
    split = "test" if curves.get("test") else "validation"
    return split, dict(curves.get(split) or {})


def reliability(comparison: Comparison, contender: Contender) -> Lines:
    """Draw how often the top class is right against how probable it was said to be."""
    run, many = contender.runs[0], len(comparison.contenders) > 1
    split, curves = _curves(run)
    before = curves.get("reliability_before") if calibrated(run) else None
    pairs = [("before calibration", 0, before), ("calibrated" if before else "model", 1, curves.get("reliability"))]
    errors = [_get(run.result.get("before"), "calibration_error")] if before else []
    change = " → ".join(fixed(e) for e in [*errors, run.metric("calibration_error")] if math.isfinite(e))
    where = "the test set" if split == "test" else "the private validation splits"
    return reliability_of(
        f"Reliability{f' of {contender.label}' if many else ''}",
        [(name, c, values) for name, c, values in pairs if values],
        f"Seed {run.seed}, {where}; larger dots have more samples."
        + (f" Calibration error {change}." if change else "")
        + " On the diagonal, probabilities mean what they say; below it, the model is overconfident.",
        run=own_colour(comparison, contender),
    )


def reliability_of(
    title: str, series: Sequence[tuple[str, int, Mapping[str, Sequence[float]]]], caption: str, **more: Any
) -> Lines:
    """Draw (name, colour, probability / accuracy / samples) against the diagonal, with 95 % intervals."""
    lines = []
    for name, c, bins in series:
        p, a, n = (np.array(bins[key], dtype=np.float64) for key in ("probability", "accuracy", "samples"))
        ends = np.array([wilson(share, int(of)) for share, of in zip(a, n, strict=True)]).reshape(-1, 2)
        lines.append(Line(name, c, p, a, samples=n, low=ends[:, 0], high=ends[:, 1]))
    look: dict[str, Any] = {"floor": 0.0, "ceiling": 1.0, "full": True, "x_ticks": SHARES, "x_name": "{:.3f}".format}
    label = "mean predicted probability"
    return Lines(title, lines, "fraction correct", label, diagonal=True, caption=caption, **look, **more)


def calibrated(run: RunRecord) -> bool:
    """Whether the decision rescales probabilities: thresholds and weights leave them as they are."""
    decision = run.result.get("decision") or {}
    own = [site.get("decision") or {} for site in run.result.get("sites") or [] if isinstance(site, dict)]
    return any(rule.get("temperature") or rule.get("bias") for rule in (decision, *own))


def thresholds(comparison: Comparison, contender: Contender) -> list[Lines]:
    """Draw what a threshold on one class finds, and what it costs; nothing from fewer than ten samples of it."""
    run = contender.runs[0]
    tradeoff = run.result.get("tradeoff") or {}
    support, n = int(tradeoff.get("support") or 0), int(tradeoff.get("samples") or 0)
    if not tradeoff.get("threshold") or support < LEAST_POSITIVES:
        return []
    x = _log_odds(np.array(tradeoff["threshold"], dtype=np.float64))
    rising = np.argsort(x, kind="stable")
    chosen = tradeoff.get("chosen")
    labels = {at: f"{p:g}" for p in ODDS if x.min() - 0.5 <= (at := float(_log_odds(np.array(p)))) <= x.max() + 0.5}
    who = f", {contender.label}" if len(comparison.contenders) > 1 else ""
    name, split = str(tradeoff.get("class")), tradeoff.get("split", "validation")
    common: dict[str, Any] = {
        "x_label": "threshold",
        "x_ticks": labels or {0.0: "0.5"},
        "between": True,
        "floor": 0.0,
        "x_name": lambda v: f"{1 / (1 + math.exp(-v)):.3g}",
        "mark": None if chosen is None else float(_log_odds(np.array(chosen, dtype=np.float64))),
        "mark_label": "" if chosen is None else f"chosen: {percent(chosen)}",
        "run": own_colour(comparison, contender),
    }
    recall, precision = (np.array(tradeoff[k], dtype=np.float64)[rising] for k in ("recall", "precision"))
    lines, dots = [], []
    costs = _costs(tradeoff, rising, support)
    for i, (label, values) in enumerate(costs.items(), start=3 if len(costs) == 1 else 1):
        lines.append(Line(label, i, x[rising], values))
        least = int(np.nanargmin(values))
        dots.append(Dot(float(x[rising][least]), float(values[least]), i, f"minimum: {number(float(values[least]))}"))
    declared = "cost" in tradeoff
    about = (
        "Cost of misses and false alarms for this class at the declared costs; the dot marks the minimum."
        if declared
        else "Total cost of misses and false alarms, if a miss costs as much as this many false alarms; 1 is the cost "
        "of never predicting the class. Dots: minimum."
    )
    return [
        Lines(
            f"Recall and precision of {name} by threshold{who}",
            [Line("recall", 1, x[rising], recall), Line("precision", 2, x[rising], precision)],
            "share",
            ceiling=1.0,
            caption=f"{support:,} of {n:,} {split} samples are {name}. {_at(tradeoff, chosen)}",
            **common,
        ),
        Lines(
            f"Cost of a threshold on {name}{who}",
            lines,
            "cost per sample" if declared else "cost (1: never predicted)",
            ceiling=None if declared else 2.0,
            dots=dots,
            caption=about,
            **common,
        ),
    ]


def _log_odds(p: np.ndarray) -> np.ndarray:
    p = np.clip(p, 1e-5, 1 - 1e-5)
    return np.asarray(np.log(p) - np.log1p(-p))


def _at(tradeoff: Mapping[str, Any], chosen: float | None) -> str:
    """Return what the chosen threshold does, in counts."""
    if chosen is None:
        return "No threshold was chosen for this class."
    i = int(np.argmin(np.abs(np.array(tradeoff["threshold"], dtype=np.float64) - chosen)))
    missed, alarms = int(tradeoff["missed"][i]), int(tradeoff["false_alarms"][i])
    return f"At the chosen threshold, {missed:,} are missed and {alarms:,} alarms are false."


def _costs(tradeoff: Mapping[str, Any], rising: np.ndarray, support: int) -> dict[str, np.ndarray]:
    """Name -> cost at each threshold."""
    if "cost" in tradeoff:
        return {"cost per sample": np.array(tradeoff["cost"], dtype=np.float64)[rising]}
    missed, alarms = (np.array(tradeoff[k], dtype=np.float64)[rising] for k in ("missed", "false_alarms"))
    return {
        f"a miss costs {plural(r, 'false alarm')}": np.minimum((r * missed + alarms) / (r * max(support, 1)), 2.0)
        for r in RATIOS
    }


def _get(values: Any, name: str) -> float:
    value = values.get(name) if isinstance(values, dict) else None
    return float(value) if isinstance(value, int | float) else math.nan
