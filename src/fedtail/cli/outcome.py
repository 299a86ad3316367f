"""What came of a run, class by class and site by site, as small tables on standard output."""

from __future__ import annotations

from fedtail.cli.progress import terminal
from fedtail.cli.tables import print_block
from fedtail.core.metrics import shown
from fedtail.report.blocks import Table
from fedtail.report.comparison import comparisons
from fedtail.report.facts import found_and_missed, number_in
from fedtail.report.sections.classes import class_table
from fedtail.report.sections.sites import site_table, worst_in_words
from fedtail.runs.record import RunRecord, promises
from fedtail.words import fixed

NARROW = 60
"""Columns of the terminal below which classes and sites are left to the report."""
CLASS = ("Class", "Training", "Found", "Missed", "False alarms", "Precision", "Recall", "PR-AUC")


def print_outcome(run: RunRecord) -> None:
    """Print the metrics beside those of always answering the majority class, then what is found of each class, rarest
    first, and every site."""
    floor = run.result.get("floor") or {}
    rows = [[m.title, fixed(run.metric(m.name), 4), fixed(number_in(floor, m.name), 4)] for m in shown(run.test)]
    print_block(Table(rows, ["Test", "Model", "Majority only"]))
    (comparison,) = comparisons([run])
    if run.per_class("support").size and terminal().width >= NARROW:
        print_block(class_table(comparison, run), CLASS, of="classes, rarest first")
    sites = site_table(run)
    if len(sites.rows) > 1 and terminal().width >= NARROW:
        print_block(sites, of="sites, worst first")
        terminal().print(worst_in_words(comparison.reference), soft_wrap=True)
    for sentence in (*map(str, found_and_missed(run)), *promises(run)):
        terminal().print(sentence, soft_wrap=True)
