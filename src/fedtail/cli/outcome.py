"""What came of a run, class by class and site by site, as small tables on standard output."""

from __future__ import annotations

import math

import numpy as np

from fedtail.cli.progress import terminal
from fedtail.cli.tables import bare_table
from fedtail.report.facts import at_sites, found_and_missed
from fedtail.report.pictures import class_order
from fedtail.runs.record import RunRecord, promises
from fedtail.words import fixed, plural

NARROW = 60
"""Columns of the terminal below which these tables are left to the report."""
MOST = 12
"""Classes or sites that a terminal shows; the report has all."""
MOST_FOUND = 3


def print_findings(run: RunRecord) -> None:
    """Print what is found and missed of the rarest classes, in counts."""
    for one in found_and_missed(run, 1 if len(run.classes) == 2 else MOST_FOUND):
        terminal().print(str(one), soft_wrap=True)
    for sentence in promises(run):
        terminal().print(sentence, soft_wrap=True)


def print_classes(run: RunRecord) -> None:
    """Print support, precision, recall and PR-AUC of each class; of many, those with the fewest training samples."""
    support, counts = run.per_class("support"), run.train_counts
    if not support.size or terminal().width < NARROW:
        return
    columns = [run.per_class(key) for key in ("precision", "accuracy", "pr_auc")]
    order = class_order(run)
    table = bare_table()
    table.add_column("class, rarest first", no_wrap=True)
    for head in ("training", "test", "precision", "recall", "PR-AUC"):
        table.add_column(head, justify="right")
    for c in order[:MOST]:
        training = "–" if counts is None else f"{int(counts[c]):,}"
        cells = (fixed(float(values[c])) if values.size else "–" for values in columns)
        table.add_row(run.classes[c], training, f"{int(support[c]):,}", *cells)
    terminal().print(table)
    if len(order) > MOST:
        terminal().print(f"the {MOST} rarest of {len(order)} classes; the report lists all")


def print_sites(run: RunRecord) -> None:
    """Print the spread of macro F1 over sites, on test sets of their own where they have some, else on private
    validation splits, and the sites at its lower end with their samples of the rarest class."""
    split, rows = at_sites(run)
    values = np.array([v for site in rows if math.isfinite(v := site.value())])
    if len(values) < 2 or terminal().width < NARROW:
        return
    rare = int(class_order(run)[0])
    before = any(site.before for site in rows)
    table = bare_table()
    table.add_column("site, worst first", no_wrap=True)
    heads = (f"{split} samples", f"of {run.classes[rare]}", "macro F1")
    for head in (*heads, *(["plain argmax"] if before else []), "PR-AUC"):
        table.add_column(head, justify="right")
    for site in rows[:MOST]:
        plain = [fixed(site.argmax())] if before else []
        area = "rare_pr_auc" if len(run.classes) == 2 else "pr_auc"
        counts = (f"{site.samples:,}", f"{site.positives(rare):,}")
        table.add_row(site.name, *counts, fixed(site.value()), *plain, fixed(site.value(area)))
    terminal().print(table)
    text = f"macro F1 across {len(values)} sites: {values.mean():.3f} ± {values.std():.3f}, worst {values[0]:.3f}"
    terminal().print(f"{text} ({rows[0].name}, {plural(rows[0].samples, f'{split} sample')})", soft_wrap=True)
