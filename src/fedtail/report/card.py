"""The model card of a run: what it is, what it was trained and tested on, how good it is and where it is not."""

from __future__ import annotations

from pathlib import Path

from fedtail.files import write_atomically
from fedtail.report.blocks import plain_template
from fedtail.report.comparison import comparisons
from fedtail.report.facts import in_short, provenance
from fedtail.report.pictures import class_order
from fedtail.report.sections.classes import class_table
from fedtail.report.sections.federation import privacy
from fedtail.report.sections.sites import site_table
from fedtail.report.sections.yardsticks import verdict_of_federating
from fedtail.report.tables import headline
from fedtail.runs.record import RunRecord

NAME = "model-card.md"
SMALL = 30
"""Test samples of a class below which its numbers are called uncertain."""


def model_card(run: RunRecord) -> str:
    """Return the card as Markdown."""
    (comparison,) = comparisons([run])
    support = run.per_class("support")
    tested = [(run.classes[c], support[c]) for c in class_order(run) if support.size]
    return plain_template(
        "model-card.md",
        run=run,
        title=comparison.title,
        short=in_short(comparison),
        gain=verdict_of_federating(comparison, pooled=False),
        origin=provenance(run),
        n_sites=len(run.clients.get("sites") or []),
        sizes=[int(n) for n in run.clients.get("sizes") or []],
        classes=class_table(comparison, run) if support.size else "",
        metrics=headline(comparison).block(test=False),
        sites=site_table(run),
        thin=[name for name, n in tested if 0 < n < SMALL],
        untested=[name for name, n in tested if not n],
        decision=run.result.get("decision") or {},
        privacy=privacy(comparison),
        verdict=(run.result.get("verdict") or {}).get("said", ""),
        notes=[str(note) for note in run.clients.get("notes") or []],
    )


def write_card(run: RunRecord) -> Path:
    """Write the card into the run's folder and return its path."""
    path = run.folder / NAME
    write_atomically(path, model_card(run))
    return path
