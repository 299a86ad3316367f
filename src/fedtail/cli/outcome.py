"""What came of a run, class by class and site by site, as small tables on standard output."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedtail.cli.progress import terminal
from fedtail.cli.tables import bare_table
from fedtail.runs.result import Result

NARROW = 60
"""Columns of the terminal below which these tables are left to the report."""
MOST = 12
"""Classes or sites that a terminal shows; the report has all."""


def print_classes(result: Result) -> None:
    """Support, precision, recall and PR-AUC of each class; of many, those with the fewest training samples."""
    test = result.test
    if "per_class_support" not in test or terminal().width < NARROW:
        return
    counts = result.about.train_counts
    order = np.arange(len(result.about.classes)) if counts is None else np.argsort(-counts, kind="stable")
    shown = order[-MOST:]
    table = bare_table()
    table.add_column("class", no_wrap=True)
    for head in ("training", "test", "precision", "recall", "PR-AUC"):
        table.add_column(head, justify="right")
    for c in shown:
        cells = (test[f"per_class_{key}"][c] for key in ("precision", "accuracy", "pr_auc"))
        training = "–" if counts is None else f"{int(counts[c]):,}"
        table.add_row(
            result.about.classes[c], training, f"{test['per_class_support'][c]:,}", *(number(v) for v in cells)
        )
    terminal().print(table)
    if len(shown) < len(order):
        terminal().print(f"the {len(shown)} rarest of {len(order)} classes; the report lists all")


def print_sites(result: Result, metric: str = "macro_f1") -> None:
    """The spread over sites of one metric, on test sets of their own where they have some, else on private validation
    splits, and the sites at its lower end."""
    split = result.worst.get("split", "validation")
    rows = [(str(row["site"]), row[split]) for row in result.sites if split in row]
    rows = [(name, found) for name, found in rows if math.isfinite(found.get(metric, math.nan))]
    if len(rows) < 2 or terminal().width < NARROW:
        return
    rows.sort(key=lambda row: row[1][metric])
    values = np.array([found[metric] for _, found in rows])
    table = bare_table()
    table.add_column("site, worst first", no_wrap=True)
    before = {str(row["site"]): row["before"].get(split, {}) for row in result.sites if "before" in row}
    for head in (f"{split} samples", "accuracy", "macro F1", *(["likeliest class"] if before else []), "PR-AUC"):
        table.add_column(head, justify="right")
    for name, found in rows[:MOST]:
        support = sum(found["per_class_support"])
        plain = [number(before[name].get(metric))] if name in before else []
        cells = (number(found[key]) for key in ("accuracy", "macro_f1"))
        table.add_row(name, f"{support:,}", *cells, *plain, number(found["pr_auc"]))
    terminal().print(table)
    said = f"macro F1 across {len(rows)} sites: {values.mean():.3f} ± {values.std():.3f}, worst {values[0]:.3f}"
    n = sum(rows[0][1]["per_class_support"])
    terminal().print(f"{said} ({rows[0][0]}, {n:,} {split} sample{'' if n == 1 else 's'})", soft_wrap=True)


def number(value: Any) -> str:
    return "–" if value is None or value != value else f"{value:.3f}"
