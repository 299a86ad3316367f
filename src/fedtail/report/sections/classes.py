"""The parts of the page about classes: what is found of each, how precisely, and what is mistaken for what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtail.core.evidence import wilson
from fedtail.plots import Chart, Heat, Lines
from fedtail.report.blocks import Block, Cell, Charts, Fold, Heading, Table, Text
from fedtail.report.comparison import Comparison
from fedtail.report.facts import area_with_interval
from fedtail.report.pictures import class_order, groups, over_seeds, palette, per_class, recall_by_class, shots
from fedtail.report.probabilities import curves_of_class, curves_of_classes, recorded_curve
from fedtail.runs.record import RunRecord
from fedtail.words import fixed, plural

MOST_PANELS = 8
MOST_LINES = 7
"""Classes that share a chart of precision-recall curves, each with a colour of its own."""
MOST_TABLE = 24
"""Rows beyond which the table of classes is folded away."""
MOST_CURVES = 6
"""Charts of precision-recall curves shown at once, of the rarest classes; the others are folded away."""
COLUMNS = {"precision": "Precision", "accuracy": "Recall", "f1": "F1", "pr_auc": "PR-AUC", "roc_auc": "ROC-AUC"}


def classes(comparison: Comparison, metric: str) -> list[Block]:
    """Recall of each class, rare and frequent thirds, precision-recall curves and all numbers."""
    first = scored(comparison)
    if first is None:
        return []
    panels: list[Chart] = [recall_by_class(comparison, first)]
    if first.train_counts is not None:
        panels.append(groups(comparison, first))
    panels.append(shots(comparison))
    drawn = pr_charts(comparison, first)
    table = _table(comparison, first)
    if len(comparison.contenders) == 1:  # its classes share a chart
        return [Charts([panels[0], *drawn[:1], *panels[1:]], "packed"), *table, *_more(drawn[1:])]
    text = (
        "Precision against recall for each class, rarest first. Each point on a curve is a threshold; the dot marks "
        "the current decision rule."
    )
    shown: list[Block] = [Heading("Precision and recall"), Text(text), Charts(drawn[:MOST_CURVES], "small")]
    return [Charts(panels, "packed"), *table, *(shown if drawn else []), *_more(drawn[MOST_CURVES:])]


def _more(drawn: Sequence[Chart]) -> list[Block]:
    title = f"Precision and recall of more classes, in {plural(len(drawn), 'chart')}"
    return [Fold(title, [Charts(drawn, "small")])]


def scored(comparison: Comparison) -> RunRecord | None:
    """Return the first run with numbers per class."""
    return next((r for r in comparison.runs if np.isfinite(r.per_class()).any()), None)


def pr_charts(comparison: Comparison, first: RunRecord) -> list[Lines]:
    """Draw precision-recall curves, rarest class first: of one contender some classes a chart, of several one each."""
    order = class_order(first).tolist()
    known = [c for c in order if any(recorded_curve(r, first.classes[c]) for r in comparison.runs)]
    if len(comparison.contenders) > 1:
        return [curves_of_class(comparison, first, c) for c in known]
    only = comparison.contenders[0]
    return [curves_of_classes(only, known[i : i + MOST_LINES]) for i in range(0, len(known), MOST_LINES)]


def _table(comparison: Comparison, first: RunRecord) -> list[Block]:
    """A row per class and contender, every number that runs have; those of one seed with their intervals."""
    order, counts = class_order(first), first.train_counts
    known = [key for key in COLUMNS if np.isfinite(first.per_class(key)).any()]
    colours, several = palette(comparison), len(comparison.contenders) > 1
    support = first.per_class("support")
    stacks = {(one.label, key): per_class(one, key, len(order)) for one in comparison.contenders for key in known}
    rows: list[list[str | Cell]] = []
    runs = []
    for c in order:
        for contender in comparison.contenders:
            row: list[str | Cell] = [first.classes[c], *([contender.label] if several else [])]
            row += [f"{int(counts[c]):,}"] if counts is not None else []
            row += [f"{int(support[c]):,}"] if support.size else []
            for key in known:
                stack = stacks[contender.label, key]
                mean, spread = (float(v[0]) for v in over_seeds(stack[:, [c]])) if stack.size else (math.nan,) * 2
                small = f"± {spread:.3f}" if math.isfinite(spread) else ""
                if support.size and len(contender.runs) == 1 and math.isfinite(mean):
                    if key == "accuracy":
                        low, high = wilson(mean, int(support[c]))
                        small = f"{low:.2f} to {high:.2f}"
                    elif key == "pr_auc":
                        small = area_with_interval(contender.runs[0], int(c))[1]
                row.append(Cell(fixed(mean), small=small))
            rows.append(row)
            runs.append(colours[contender.label] if several else None)
    head = ["Class", *(["Method"] if several else []), *(["Training"] if counts is not None else [])]
    head += [*(["Test"] if support.size else []), *(COLUMNS[key] for key in known)]
    table = Table(head, rows, "Classes", runs=runs, look="left2" if several else "")
    single = support.size and not all(len(one.runs) > 1 for one in comparison.contenders)
    note = "Below recall and PR-AUC: their 95 % intervals, which are wide for classes with few test samples."
    blocks: list[Block] = [table, Text(note if single else "", "note")]
    return [Fold(f"All {len(order)} classes in numbers", blocks)] if len(rows) > MOST_TABLE else blocks


def confusion(comparison: Comparison, metric: str) -> list[Block]:
    """Where each contender sends the samples of each class."""
    charts, n_classes, longest = [], 0, 0
    for contender in comparison.contenders[:MOST_PANELS]:
        tables = [r.confusion for r in contender.runs if r.confusion is not None and r.confusion.any()]
        if not tables:
            continue
        run, total = contender.runs[0], np.sum(tables, axis=0)
        order = class_order(run) if run.train_counts is not None else np.arange(len(total))
        share = total[np.ix_(order, order)] / np.maximum(total[order].sum(1, keepdims=True), 1)
        names = [run.classes[c] for c in order]
        n_classes, longest = len(names), max(map(len, names))
        look: dict[str, Any] = {"wide": n_classes > 12, "run": palette(comparison)[contender.label]}
        charts.append(
            Heat(contender.label, share.round(3), names, names, "true class", "predicted class", shade=share, **look)
        )
    if not charts:
        return []
    seeds = ", over all seeds" if len(comparison.runs) > len(comparison.contenders) else ""
    text = f"How the samples of each true class are classified, as fractions{seeds}; classes ordered rarest first."
    drawn = Charts(charts, "small" if len(charts) > 2 and n_classes * longest < 60 else "")
    return [Text(text), Fold(f"Confusion matrices of {n_classes} classes", [drawn]) if n_classes > 30 else drawn]
