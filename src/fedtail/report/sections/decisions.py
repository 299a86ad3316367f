"""The part of the page about answers: do probabilities mean something, what was decided, and what a threshold costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from fedtail.core.metrics import metrics
from fedtail.report.blocks import Block, Cell, Charts, Fold, Table, Text
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.facts import number_in, telling
from fedtail.report.pictures import palette
from fedtail.report.probabilities import LEAST_POSITIVES, reliability, reliability_of, thresholds
from fedtail.runs.record import RunRecord, promises
from fedtail.words import fixed, percent, plural, signed

MOST_COMPARED = 2
"""Metrics shown before and after, where several contenders are; every contender's worst site comes beside them."""
MOST_PANELS = 6


def decisions(comparison: Comparison, metric: str) -> list[Block]:
    """Reliability, what was decided, before and after, the cost of a threshold."""
    contenders = comparison.contenders
    plots = [p for one in contenders if (p := reliability(comparison, one))]
    best = max(contenders, key=lambda one: np.nan_to_num(one.mean("macro_f1")))
    trades = thresholds(comparison, best)
    others = [p for one in contenders if one is not best for p in thresholds(comparison, one)]
    changed = _before_and_after(comparison)
    few = _too_few(best.runs[0])
    if not (plots or trades or changed):
        return []
    words = [_decided(one, len(contenders) > 1) for one in contenders]
    more = Fold("Thresholds and their costs for the other methods", [Charts(others, "small")])
    if len(contenders) == 1:
        return [*words, changed, Charts([*plots, *trades], "packed"), few, _site_curves(comparison)]
    hidden = Fold(f"{len(plots) - MOST_PANELS} more reliability plots", [Charts(plots[MOST_PANELS:], "small")])
    drawn = [Charts(plots[:MOST_PANELS], "small"), hidden, Charts(trades), few, more]
    return [*words, changed, *drawn, _site_curves(comparison)]


def _too_few(run: RunRecord) -> Text:
    tradeoff = run.result.get("tradeoff") or {}
    n = int(tradeoff.get("support") or 0)
    if not tradeoff.get("threshold") or n >= LEAST_POSITIVES:
        return Text("")
    samples = plural(n, f"{tradeoff.get('split', 'validation')} sample")
    return Text(
        f"{samples} of {tradeoff.get('class')}: too few to draw thresholds from ({LEAST_POSITIVES} at least).", "note"
    )


def _decided(contender: Contender, several: bool) -> Text:
    """What was decided after training, in words."""
    run = contender.runs[0]
    decision = run.result.get("decision") or {}
    parts = []
    if temperature := decision.get("temperature"):
        sure = "more" if temperature > 1 else "less"
        parts.append(
            f"probabilities are scaled with temperature {temperature:.3g} (the model was {sure} confident than it "
            "should be)"
        )
    if decision.get("bias"):
        parts.append("log-probabilities are shifted per class")
    if find := decision.get("find"):
        limit = percent(decision.get("threshold", 0))
        parts.append(f"the model predicts {find} whenever its probability reaches {limit}")
    if decision.get("weights"):
        parts.append(
            "the model predicts the class with the largest weighted probability (rarer classes have larger weights)"
        )
    if decision.get("costs"):
        parts.append("the model predicts the class with the lowest expected cost")
    own = sum(bool(site.get("decision")) for site in run.result.get("sites") or [])
    if own:
        has = "has its" if own == 1 else "have their"
        parts.append(f"{plural(own, 'site')} {has} own decision rule, fitted to the local class mix")
    parts += promises(run)
    if not parts:
        return Text("")
    text = "; ".join(parts)
    if several:
        return Text(Markup("<b>{}</b>: {}. Chosen on private validation splits.").format(contender.label, text))
    return Text(f"{text[:1].upper()}{text[1:]}. Chosen on private validation splits.")


def _before_and_after(comparison: Comparison) -> Table:
    """Test metrics of the plain argmax and of the decision, and the worst site's."""
    colours, several = palette(comparison), len(comparison.contenders) > 1
    known = sorted((m for m in metrics() if m.needs != "sites"), key=lambda m: (not m.headline, -m.priority))
    known = [m for m in known if m.headline or m.needs == "scores"]
    rows: list[list[str | Cell]] = []
    runs = []
    for one in comparison.contenders:
        decided = [r for r in one.runs if r.result.get("before")]
        pairs = [(m, [number_in(r.result["before"], m.name) for r in decided]) for m in known if decided]
        pairs = [
            (m, before) for m, before in pairs if np.isfinite([*before, *(r.metric(m.name) for r in decided)]).all()
        ]
        for m, before in pairs[: MOST_COMPARED if several else None]:
            after = [r.metric(m.name) for r in decided]
            rows.append(_change(one.label, m.title, before, after, m.higher_is_better))
            runs.append(colours[one.label])
        if worst := [w for r in decided if (w := _worst(r))]:
            rows.append(_change(one.label, "Worst site, macro F1", [w[0] for w in worst], [w[1] for w in worst], True))
            runs.append(colours[one.label])
    head = [*(["Method"] if several else []), "Test set", "Plain argmax", "With decision rule", "Change", ""]
    rows = rows if several else [row[1:] for row in rows]
    return Table(head, rows, "Before and after the decision", runs=runs, look="fit left2" if several else "fit")


def _change(label: str, title: str, before: Sequence[float], after: Sequence[float], up: bool) -> list[str | Cell]:
    """A row; better or worse only where every seed says so."""
    gap = np.array(after) - np.array(before)
    good = gap if up else -gap
    word = "better" if (good > 5e-4).all() else "worse" if (good < -5e-4).all() else ""
    values = (fixed(float(np.mean(v))) for v in (before, after))
    return [label, title, *values, signed(float(gap.mean())), Cell(word, look=word)]


def _worst(run: RunRecord) -> tuple[float, float] | None:
    """(argmax, decided) macro F1 of the worst site of each."""
    rows = telling(run)
    before = [v for site in rows if math.isfinite(v := site.argmax())]
    return (min(before), rows[0].value()) if len(before) > 1 else None


def _site_curves(comparison: Comparison) -> Fold:
    """Reliability at each site, folded away."""
    plots = []
    run = comparison.contenders[0].runs[0]
    for site in ((run.result.get("curves") or {}).get("validation") or {}).get("sites") or []:
        values = site.get("reliability") or {}
        if values.get("samples"):
            caption = f"{plural(sum(values['samples']), 'validation sample')} at this site."
            plots.append(reliability_of(str(site.get("site")), [("model", 1, values)], caption))
    who = f" ({comparison.contenders[0].label})" if len(comparison.contenders) > 1 else ""
    return Fold(f"Reliability at each of {plural(len(plots), 'site')}{who}", [Charts(plots, "small")])
