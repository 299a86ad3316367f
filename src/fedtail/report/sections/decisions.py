"""The part of the page about answers: do probabilities mean something, what was decided, and what a threshold costs."""

from __future__ import annotations

import math

import numpy as np
from markupsafe import Markup

from fedtail.core.metrics import metrics
from fedtail.report.blocks import Block, Cell, Charts, Fold, Table, Text, first_of, say, table_of
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.facts import number_in, telling
from fedtail.report.probabilities import LEAST_POSITIVES, reliability, thresholds
from fedtail.runs.record import RunRecord, promises
from fedtail.words import fixed, signed

MOST_COMPARED = 2
"""Metrics shown before and after, where several contenders are; every contender's worst site comes beside them."""
MOST_PANELS = 6


def decisions(comparison: Comparison, metric: str) -> list[Block]:
    """Reliability, what was decided, before and after, what a threshold finds."""
    best, *others = comparison.scored("macro_f1") or comparison.contenders
    plots = [p for one in comparison.contenders if (p := reliability(comparison, one))]
    trades, (changed, note) = thresholds(comparison, best), _before_and_after(comparison)
    if not (plots or trades or changed):
        return []
    more = [*plots[MOST_PANELS:], *(p for one in others for p in thresholds(comparison, one))]
    return [
        *(_paragraph(one, comparison.several) for one in comparison.contenders),
        changed,
        note,
        Charts([*plots[:MOST_PANELS], *trades], "small" if comparison.several else "packed"),
        Text(say("too_few", tradeoff=best.runs[0].result.get("tradeoff") or {}, least=LEAST_POSITIVES), "note"),
        Fold("Reliability and thresholds of the other methods", [Charts(more, "small")]),
    ]


def _paragraph(contender: Contender, several: bool) -> Text:
    text = decided(contender.runs[0])
    return Text(Markup("<b>{}</b>: {}").format(contender.label, text) if several and text else text)


def decided(run: RunRecord) -> str:
    """Return what was decided after training, in words; empty where answers are the likeliest class."""
    decision = dict.fromkeys(("temperature", "bias", "find", "threshold", "weights", "costs"))
    decision |= run.result.get("decision") or {}
    own = sum(bool(site.get("decision")) for site in run.result.get("sites") or [])
    return say("decided", decision=decision, own=own, promises=promises(run))


def _before_and_after(comparison: Comparison) -> tuple[Table, Text]:
    """Test metrics of the plain argmax and of the decision, and the worst site's; and a note on those left out."""
    known = [m for m in metrics() if m.needs != "sites" and (m.headline or m.needs == "scores")]
    known.sort(key=lambda m: (not m.headline, -m.priority))
    lines: list[dict[str, str | Cell]] = []
    note = Text("")
    for one in comparison.contenders:
        decided = [r for r in one.runs if r.result.get("before")]
        pairs = [
            (m.title, [(number_in(r.result["before"], m.name), r.metric(m.name)) for r in decided], m.higher_is_better)
            for m in known
        ]
        told = [pair for pair in pairs if decided and np.isfinite(pair[1]).all()]
        shown, more = first_of(told, "metric", "result.json", MOST_COMPARED if comparison.several else len(told))
        note = more or note
        worst = ("Worst site, macro F1", [w for r in decided if (w := _worst(r))], True)
        for title, values, up in [*shown, *([worst] if worst[1] else [])]:
            before, after = np.array(values).T
            good = (after - before) * (1 if up else -1)
            word = "better" if (good > 5e-4).all() else "worse" if (good < -5e-4).all() else ""  # as every seed says
            line = {"Method": comparison.name(one), "Test set": title, "Plain argmax": fixed(float(before.mean()))}
            line |= {"With decision rule": fixed(float(after.mean())), "Change": signed(float((after - before).mean()))}
            lines.append({**line, "": Cell(word, look=word)})
    look = "fit left2" if comparison.several else "fit"
    return table_of(lines, "Before and after the decision", look, comparison.filtered), note


def _worst(run: RunRecord) -> tuple[float, float] | None:
    """(argmax, decided) macro F1 of the worst site of each."""
    rows = telling(run)
    before = [v for site in rows if math.isfinite(v := site.value(plain=True))]
    return (min(before), rows[0].value()) if len(before) > 1 else None
