"""The part of the page about answers: do probabilities mean something, what was decided, and what a threshold costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from fedtail.core.metrics import metrics
from fedtail.report.blocks import Block, Cell, Charts, Fold, Table, Text, say, table_of
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.facts import number_in, telling
from fedtail.report.probabilities import LEAST_POSITIVES, reliability, thresholds
from fedtail.runs.record import RunRecord, promises
from fedtail.words import fixed, plural, signed

MOST_COMPARED = 2
"""Metrics shown before and after, where several contenders are; every contender's worst site comes beside them."""
MOST_PANELS = 6


def decisions(comparison: Comparison, metric: str) -> list[Block]:
    """Reliability, what was decided, before and after, what a threshold finds."""
    best, *others = comparison.scored("macro_f1") or comparison.contenders
    plots = [p for one in comparison.contenders if (p := reliability(comparison, one))]
    trades, changed = thresholds(comparison, best), _before_and_after(comparison)
    if not (plots or trades or changed):
        return []
    words = [_paragraph(one, comparison.several) for one in comparison.contenders]
    few = _too_few(best.runs[0])
    if not comparison.several:
        return [*words, changed, Charts([*plots, *trades], "packed"), few]
    hidden = Fold(f"{len(plots) - MOST_PANELS} more reliability plots", [Charts(plots[MOST_PANELS:], "small")])
    drawn = [Charts(plots[:MOST_PANELS], "small"), hidden, Charts(trades), few]
    more = Charts([p for one in others for p in thresholds(comparison, one)], "small")
    return [*words, changed, *drawn, Fold("Thresholds of the other methods", [more])]


def _too_few(run: RunRecord) -> Text:
    tradeoff = run.result.get("tradeoff") or {}
    n = int(tradeoff.get("support") or 0)
    if not tradeoff.get("threshold") or n >= LEAST_POSITIVES:
        return Text("")
    samples = plural(n, f"{tradeoff.get('split', 'validation')} sample")
    return Text(
        f"{samples} of {tradeoff.get('class')}: too few to draw thresholds from ({LEAST_POSITIVES} at least).", "note"
    )


def _paragraph(contender: Contender, several: bool) -> Text:
    text = decided(contender.runs[0])
    return Text(Markup("<b>{}</b>: {}").format(contender.label, text) if several and text else text)


def decided(run: RunRecord) -> str:
    """Return what was decided after training, in words; empty where answers are the likeliest class."""
    decision = dict.fromkeys(("temperature", "bias", "find", "threshold", "weights", "costs"))
    decision |= run.result.get("decision") or {}
    own = sum(bool(site.get("decision")) for site in run.result.get("sites") or [])
    return say("decided", decision=decision, own=own, promises=promises(run))


def _before_and_after(comparison: Comparison) -> Table:
    """Test metrics of the plain argmax and of the decision, and the worst site's."""
    known = sorted((m for m in metrics() if m.needs != "sites"), key=lambda m: (not m.headline, -m.priority))
    rows: list[tuple[Contender, list[str | Cell]]] = []
    for one in comparison.contenders:
        decided = [r for r in one.runs if r.result.get("before")]
        changes = [
            _change(m.title, before, after, m.higher_is_better)
            for m in known
            if decided and (m.headline or m.needs == "scores")
            for before in [[number_in(r.result["before"], m.name) for r in decided]]
            for after in [[r.metric(m.name) for r in decided]]
            if np.isfinite([*before, *after]).all()
        ]
        rows += [(one, row) for row in changes[: MOST_COMPARED if comparison.several else None]]
        if worst := [w for r in decided if (w := _worst(r))]:
            rows.append((one, _change("Worst site, macro F1", [w[0] for w in worst], [w[1] for w in worst], True)))
    head = ["Test set", "Plain argmax", "With decision rule", "Change", ""]
    look = "fit left2" if comparison.several else "fit"
    return table_of(comparison, rows, head, "Before and after the decision", look)


def _change(title: str, before: Sequence[float], after: Sequence[float], up: bool) -> list[str | Cell]:
    """A row; better or worse only where every seed says so."""
    gap = np.array(after) - np.array(before)
    good = gap if up else -gap
    word = "better" if (good > 5e-4).all() else "worse" if (good < -5e-4).all() else ""
    return [
        title,
        *(fixed(float(np.mean(v))) for v in (before, after)),
        signed(float(gap.mean())),
        Cell(word, look=word),
    ]


def _worst(run: RunRecord) -> tuple[float, float] | None:
    """(argmax, decided) macro F1 of the worst site of each."""
    rows = telling(run)
    before = [v for site in rows if math.isfinite(v := site.argmax())]
    return (min(before), rows[0].value()) if len(before) > 1 else None
