"""The part of the page about answers: do probabilities mean something, what was decided, and what a threshold costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedtail.core.evidence import wilson
from fedtail.core.metrics import METRICS
from fedtail.report.chart import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Cell,
    Scale,
    axes,
    charts,
    colour,
    esc,
    figure,
    fold,
    html_table,
    legend,
    number,
    scroll,
)
from fedtail.report.classes import SHARES, number_of
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.lines import Dot, Line, line_chart
from fedtail.report.series import palette
from fedtail.report.sites import at_sites
from fedtail.runs.record import RunRecord

COMPARED = ("macro_f1", "balanced_accuracy", "calibration_error", "accuracy", "tail", "pr_auc", "log_loss", "brier")
MOST_COMPARED = 2
"""Of these, where several contenders are compared; every contender's worst site comes beside them."""
MOST_PANELS = 6
RATIOS = (1, 10, 100)
"""What a missed sample may cost, in false alarms, where no costs were declared."""
ODDS = (0.0001, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
"""Probabilities that the axis of thresholds is labelled at; it is even in log-odds, since rare classes live near 0."""


def decisions(comparison: Comparison) -> str:
    """Reliability, what was decided, before and after, the cost of a threshold."""
    colours = palette(comparison)
    said = "".join(_decided(one, len(comparison.contenders) > 1) for one in comparison.contenders)
    plots = [p for one in comparison.contenders if (p := _reliability_of(one, colours))]
    best = max(comparison.contenders, key=lambda one: np.nan_to_num(one.mean("macro_f1")))
    trades = _tradeoffs(best, colours)
    others = [p for one in comparison.contenders if one is not best for p in _tradeoffs(one, colours)]
    body = _before_and_after(comparison, colours)
    if not (plots or trades or body):
        return ""
    text = (
        "<p>Of the predictions made with 80 % probability, 80 % should be correct: points on the diagonal. Below it, "
        "the model is overconfident.</p>"
        if plots
        else ""
    )
    more = fold("Thresholds and their costs for the other methods", charts(others, "small"))
    if len(colours) == 1:
        return said + body + text + charts([*plots, *trades], "packed") + _site_curves(comparison)
    hidden = fold(f"{len(plots) - MOST_PANELS} more reliability plots", charts(plots[MOST_PANELS:], "small"))
    drawn = charts(plots[:MOST_PANELS], "small") + hidden + charts(trades) + more
    return said + body + text + drawn + _site_curves(comparison)


def _decided(contender: Contender, several: bool) -> str:
    """What was decided after training, in words."""
    run = contender.runs[0]
    found = run.result.get("decision") or {}
    parts = []
    if temperature := found.get("temperature"):
        sure = "more" if temperature > 1 else "less"
        parts.append(
            f"probabilities are scaled with temperature {temperature:.3g} (the model was {sure} confident than "
            "it should be)"
        )
    if found.get("bias"):
        parts.append("log-probabilities are shifted per class")
    if find := found.get("find"):
        parts.append(
            f"the model predicts {esc(find)} whenever its probability reaches {_percent(found.get('threshold', 0))}"
        )
    if found.get("weights"):
        parts.append(
            "the model predicts the class with the largest weighted probability (rarer classes have larger weights)"
        )
    if found.get("costs"):
        parts.append("the model predicts the class with the lowest expected cost")
    own = sum(bool(site.get("decision")) for site in run.result.get("sites") or [])
    if own:
        parts.append(
            f"{own} site{'s have their' if own > 1 else ' has its'} own decision rule, fitted to the local class mix"
        )
    if not parts:
        return ""
    who = f"<b>{esc(contender.label)}</b>: " if several else ""
    text = "; ".join(parts)
    return f"<p>{who}{text[:1].upper() if not who else text[:1]}{text[1:]}. Chosen on private validation splits.</p>"


def _percent(p: float) -> str:
    return f"{100 * p:.3g} %"


def _before_and_after(comparison: Comparison, colours: dict[str, int]) -> str:
    """Test metrics of the plain argmax and of the decision, and the worst site's."""
    rows: list[list[str | Cell]] = []
    runs = []
    for one in comparison.contenders:
        decided = [r for r in one.runs if r.result.get("before")]
        for name in COMPARED[: MOST_COMPARED if len(colours) > 1 else None] if decided else ():
            before = [_get(r.result["before"], name) for r in decided]
            after = [r.metric(name) for r in decided]
            if np.isfinite(before).all() and np.isfinite(after).all():
                rows.append(_change(one.label, METRICS[name].title, before, after, METRICS[name].higher_is_better))
                runs.append(colours[one.label])
        if worst := [w for r in decided if (w := _worst(r))]:
            rows.append(_change(one.label, "Worst site, macro F1", [w[0] for w in worst], [w[1] for w in worst], True))
            runs.append(colours[one.label])
    if not rows:
        return ""
    head = ["Test set", "Plain argmax", "With decision rule", "Change", ""]
    if len(comparison.contenders) > 1:
        head.insert(0, "Method")
    else:
        rows = [row[1:] for row in rows]
    look = "fit left2" if len(comparison.contenders) > 1 else "fit"
    return scroll(html_table(head, rows, runs=runs, look=look), "Before and after the decision")


def _change(label: str, title: str, before: Sequence[float], after: Sequence[float], up: bool) -> list[str | Cell]:
    """A row; better or worse only where every seed says so."""
    gap = np.array(after) - np.array(before)
    good = gap if up else -gap
    word = "better" if (good > 5e-4).all() else "worse" if (good < -5e-4).all() else ""
    values = (number_of(float(np.mean(v))) for v in (before, after))
    return [label, title, *values, f"{gap.mean():+.3f}", Cell(word, look=word)]


def _worst(run: RunRecord) -> tuple[float, float] | None:
    """(argmax, decided) macro F1 of the worst site of each."""
    _, rows = at_sites(run)
    before = [v for site in rows if math.isfinite(v := _get(site.before, "macro_f1"))]
    return (min(before), min(site.value() for site in rows)) if len(before) > 1 else None


def _get(found: Mapping[str, Any], name: str) -> float:
    value = found.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def _curves(run: RunRecord) -> tuple[str, dict[str, Any]]:
    found = run.result.get("curves") or {}
    split = "test" if found.get("test") else "validation"
    return split, dict(found.get(split) or {})


def _reliability_of(contender: Contender, colours: dict[str, int]) -> str:
    run = contender.runs[0]
    split, found = _curves(run)
    pairs = [("uncalibrated", 0, found.get("reliability_before")), ("calibrated", 1, found.get("reliability"))]
    if not found.get("reliability_before"):
        pairs = [("", 1, found.get("reliability"))]
    many = len(colours) > 1
    errors = [_get(run.result.get("before") or {}, "calibration_error"), run.metric("calibration_error")]
    said = [f"{e:.3f}" for e in (errors if len(pairs) > 1 else errors[1:]) if math.isfinite(e)]
    where = "the test set" if split == "test" else "the private validation splits"
    return reliability_chart(
        f"Reliability{f' of {contender.label}' if many else ''}",
        [(name, c, values) for name, c, values in pairs if values],
        caption=f"Seed {run.seed}, {where}; larger dots have more samples. Calibration error {' → '.join(said)}.",
        run=colours[contender.label] if many else None,
    )


def reliability_chart(
    title: str,
    series: Sequence[tuple[str, int, Mapping[str, Sequence[float]]]],
    *,
    caption: str,
    run: int | None = None,
) -> str:
    """Accuracy over mean probability of the top class; series are (name, colour, probability / accuracy / samples)."""
    if not series:
        return ""
    height = HEIGHT + 50
    x, y = Scale(0.0, 1.0, LEFT, WIDTH - RIGHT), Scale(0.0, 1.0, height - BOTTOM, TOP)
    out = [axes(x, y, SHARES, "mean predicted probability", "fraction correct")]
    out.append(f'<line class="mark" x1="{x(0)}" y1="{y(0)}" x2="{x(1)}" y2="{y(1)}"/>')
    rows: list[list[str]] = []
    for i, (name, c, found) in enumerate(series):
        points = list(zip(found["probability"], found["accuracy"], found["samples"], strict=True))
        most = max(n for _, _, n in points)
        path = "L".join(f"{x(p):g} {y(a):g}" for p, a, _ in points)
        out.append(f'<g class="series s{colour(c)}" data-series="{i}"><path class="line thin" d="M{path}"/>')
        for p, a, n in points:
            low, high = wilson(a, int(n))
            tip = f"{name or 'model'}: predicted {p:.3f}\ncorrect {a:.3f} ({low:.2f} to {high:.2f})\n{int(n):,} samples"
            ends = f'x1="{x(p)}" x2="{x(p)}" y1="{y(low)}" y2="{y(high)}"'
            out.append(f'<line class="whisker strong" {ends}/>')
            radius = 2.5 + 6 * math.sqrt(n / most)
            out.append(f'<circle class="dot" data-tip="{esc(tip)}" cx="{x(p)}" cy="{y(a)}" r="{radius:.1f}"/>')
            rows.append([name or "model", f"{p:.3f}", f"{a:.3f}", f"{int(n):,}"])
        out.append("</g>")
    return figure(
        title,
        "".join(out),
        summary="Fraction of correct predictions against predicted probability. Arrow keys step through the dots.",
        table=html_table(["", "probability", "right", "samples"], rows),
        caption=caption,
        legend=legend([(name, c) for name, c, _ in series]) if len(series) > 1 else "",
        size=(WIDTH, height),
        kind="marks",
        run=run,
    )


def _tradeoffs(contender: Contender, colours: dict[str, int]) -> list[str]:
    """What a threshold on one class finds, and what it costs."""
    run = contender.runs[0]
    found = run.result.get("tradeoff") or {}
    if not found.get("threshold"):
        return []
    x = _log_odds(np.array(found["threshold"], dtype=np.float64))
    rising = np.argsort(x, kind="stable")
    chosen = found.get("chosen")
    labels = {at: f"{p:g}" for p in ODDS if x.min() - 0.5 <= (at := float(_log_odds(np.array(p)))) <= x.max() + 0.5}
    many = len(colours) > 1
    who = f", {contender.label}" if many else ""
    name, support, n = str(found.get("class")), int(found.get("support") or 0), int(found.get("samples") or 0)
    split = found.get("split", "validation")
    common: dict[str, Any] = {
        "x_label": "threshold",
        "x_ticks": labels or {0.0: "0.5"},
        "between": True,
        "x_name": lambda v: f"{1 / (1 + math.exp(-v)):.3g}",
        "mark": None if chosen is None else float(_log_odds(np.array(chosen, dtype=np.float64))),
        "mark_label": "" if chosen is None else f"chosen: {_percent(chosen)}",
        "run": colours[contender.label] if many else None,
    }
    recall, precision = (np.array(found[k], dtype=np.float64)[rising] for k in ("recall", "precision"))
    out = [
        line_chart(
            f"Recall and precision of {name} by threshold{who}",
            [Line("recall", 1, x[rising], recall), Line("precision", 2, x[rising], precision)],
            y_label="share",
            floor=0.0,
            ceiling=1.0,
            caption=f"{support:,} of {n:,} {split} samples are {esc(name)}. {_at(found, chosen)}",
            **common,
        )
    ]
    costs = _costs(found, rising, support)
    lines, dots = [], []
    for i, (label, values) in enumerate(costs.items(), start=3 if len(costs) == 1 else 1):
        lines.append(Line(label, i, x[rising], values))
        least = int(np.nanargmin(values))
        dots.append(Dot(float(x[rising][least]), float(values[least]), i, f"minimum: {number(float(values[least]))}"))
    declared = "cost" in found
    out.append(
        line_chart(
            f"Cost of a threshold on {name}{who}",
            lines,
            y_label="cost per sample" if declared else "cost (1: never predicted)",
            floor=0.0,
            ceiling=None if declared else 2.0,
            dots=dots,
            caption="Cost of misses and false alarms for this class at the declared costs; the dot marks the minimum."
            if declared
            else "Total cost of misses and false alarms, if a miss costs as much as this many false alarms; 1 is the "
            "cost of never predicting the class. Dots: minimum.",
            **common,
        )
    )
    return out


def _log_odds(p: np.ndarray) -> np.ndarray:
    p = np.clip(p, 1e-5, 1 - 1e-5)
    return np.asarray(np.log(p) - np.log1p(-p))


def _at(found: Mapping[str, Any], chosen: float | None) -> str:
    """What the chosen threshold does, in counts."""
    if chosen is None:
        return "No threshold was chosen for this class."
    i = int(np.argmin(np.abs(np.array(found["threshold"], dtype=np.float64) - chosen)))
    missed, alarms = int(found["missed"][i]), int(found["false_alarms"][i])
    return f"At the chosen threshold, {missed:,} are missed and {alarms:,} alarms are false."


def _costs(found: Mapping[str, Any], rising: np.ndarray, support: int) -> dict[str, np.ndarray]:
    """Name -> cost at each threshold."""
    if "cost" in found:
        return {"cost per sample": np.array(found["cost"], dtype=np.float64)[rising]}
    missed, alarms = (np.array(found[k], dtype=np.float64)[rising] for k in ("missed", "false_alarms"))
    never = max(support, 1)
    return {
        f"a miss costs {r} false alarm{'s' if r > 1 else ''}": np.minimum((r * missed + alarms) / (r * never), 2.0)
        for r in RATIOS
    }


def _site_curves(comparison: Comparison) -> str:
    """Reliability at each site, folded away."""
    plots = []
    run = comparison.contenders[0].runs[0]
    for found in ((run.result.get("curves") or {}).get("validation") or {}).get("sites") or []:
        values = found.get("reliability") or {}
        if values.get("samples"):
            n = int(sum(values["samples"]))
            caption = f"{n:,} validation samples at this site."
            plots.append(reliability_chart(str(found.get("site")), [("", 1, values)], caption=caption))
    who = f" ({comparison.contenders[0].label})" if len(comparison.contenders) > 1 else ""
    return fold(f"Reliability at each of {len(plots)} sites{who}", charts(plots, "small"))
