"""The parts of the page about classes: what is found of each, how precisely, what is mistaken for what, and by which
columns trees tell them apart."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from fedtail.core.evidence import wilson
from fedtail.plots import Heat
from fedtail.report.blocks import Block, Cell, Charts, Fold, Table, Text, first_of, folded, map_of, table_of
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.facts import area_with_interval, in_counts
from fedtail.report.pictures import class_order, groups, over_seeds, recall_by_class, scored
from fedtail.report.probabilities import pr_charts
from fedtail.runs.record import RunRecord
from fedtail.words import NONE, fixed, plural

MOST_COLUMNS = 15
MOST_TABLE = 24
"""Rows beyond which the table of classes is folded away."""
MOST_CURVES = 6
"""Charts of precision-recall curves shown at once, of the rarest classes; the others are folded away."""
COLUMNS = {"precision": "Precision", "accuracy": "Recall", "f1": "F1", "pr_auc": "PR-AUC", "roc_auc": "ROC-AUC"}


def classes(comparison: Comparison, metric: str) -> list[Block]:
    """Recall of each class, rare and frequent ones, precision-recall curves and all numbers."""
    first = scored(comparison)
    if first is None:
        return []
    drawn, table = pr_charts(comparison, first), class_table(comparison, first)
    few = MOST_CURVES if comparison.several else 1  # where there are no others, classes share a chart
    single = min(len(one.runs) for one in comparison.contenders) == 1
    note = "Below recall and PR-AUC: their 95 % intervals, which are wide for classes with few test samples."
    numbers: list[Block] = [table, Text(note if first.per_class("support").size and single else "", "note")]
    if len(table.rows) > MOST_TABLE:
        numbers = [Fold(f"All {len(first.classes)} classes in numbers", numbers)]
    more = f"Precision and recall of more classes, in {plural(len(drawn[few:]), 'chart')}"
    return [
        Charts([recall_by_class(comparison), groups(comparison), *drawn[:few]], "small" if few > 1 else "packed"),
        *numbers,
        Fold(more, [Charts(drawn[few:], "small")]),
    ]


def class_table(comparison: Comparison, first: RunRecord) -> Table:
    """A row per class and contender, every number that runs have; those of one seed in counts and with intervals."""
    counts, support = first.train_counts, first.per_class("support")
    counted = {f.place: f for f in in_counts(first)} if len(comparison.runs) == 1 else {}
    lines = []
    for c in class_order(first).tolist():
        f = counted.get(c)
        lines += [
            {
                "Class": first.classes[c],
                "Method": comparison.name(one),
                "Training": "" if counts is None else f"{int(counts[c]):,}",
                "Test": f"{int(support[c]):,}" if support.size else "",
                "Found": f"{f.found:,}" if f else NONE,
                "Missed": f"{f.support - f.found:,}" if f else NONE,
                "False alarms": f"{f.false_alarms:,}" if f else NONE,
                **{title: _share(one, key, c, support) for key, title in COLUMNS.items()},
            }
            for one in comparison.contenders
        ]
    return table_of(lines, "Classes", "left2" if comparison.several else "", comparison.filtered)


def _share(contender: Contender, key: str, c: int, support: np.ndarray) -> Cell:
    """A number of a class over seeds, or of one seed with its interval."""
    values = np.array([v[c] for r in contender.runs if (v := r.per_class(key)).size > c])
    mean, spread = (float(v[0]) for v in over_seeds(values[:, None])) if values.size else (math.nan,) * 2
    small = f"± {spread:.3f}" if math.isfinite(spread) else ""
    if support.size and len(contender.runs) == 1 and math.isfinite(mean):
        if key == "accuracy":
            small = "{:.2f} to {:.2f}".format(*wilson(mean, int(support[c])))
        elif key == "pr_auc":
            small = area_with_interval(contender.runs[0], c)[1]
    return Cell(fixed(mean), small=small)


def confusion(comparison: Comparison, metric: str) -> list[Block]:
    """Where each contender sends the samples of each class."""
    counted = [
        (one, tables)
        for one in comparison.contenders
        if (tables := [r.confusion for r in one.runs if r.confusion is not None and r.confusion.any()])
    ]
    shown, note = first_of(counted, "map", "result.json")
    maps = []
    for one, tables in shown:
        run, total = one.runs[0], np.sum(tables, axis=0)
        order = class_order(run)
        share = total[np.ix_(order, order)] / np.where(total.any(1), total.sum(1), np.nan)[order, None]
        names = [run.classes[c] for c in order]
        table = map_of(Heat(f"{one.label}: confusion", share, names, names, "true class", "predicted class", share))
        maps.append(folded(one.label, table, comparison.filtered.get(one.label), is_open=len(names) <= MOST_TABLE))
    seeds = ", over all seeds" if len(comparison.runs) > len(comparison.contenders) else ""
    text = f"How the samples of each true class are classified, as fractions{seeds}; classes ordered rarest first."
    return [Text(text), *maps, note] if maps else []


def columns(comparison: Comparison, metric: str) -> list[Block]:
    """Each column's share of all gains, mean over seeds; nothing of networks."""
    blocks: list[Block] = []
    for contender in comparison.contenders:
        recorded = [shares for run in contender.runs if (shares := run.result.get("importance"))]
        share = pd.DataFrame(recorded).fillna(0.0).mean().sort_index().sort_values(ascending=False, kind="stable")
        rows = [[str(name), f"{value:.1%}"] for name, value in share.iloc[:MOST_COLUMNS].items()]
        if (more := len(share) - MOST_COLUMNS) > 0:
            rows.append([f"{more} more", f"{share.iloc[MOST_COLUMNS:].sum():.1%}"])
        blocks += [Table(rows, ["Column", "Share of all gains"], f"Columns that {contender.label} split by")]
    text = "How much of what all splits gained in training was gained by splits of a column. It is no test of a cause."
    return [Text(text), *blocks] if any(blocks) else []
