"""The model card of a run: what it is, what it was trained and tested on, how good it is and where it is not."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from fedtail.core.evidence import wilson
from fedtail.core.metrics import shown
from fedtail.files import write_atomically
from fedtail.report.blocks import markdown
from fedtail.report.comparison import comparisons
from fedtail.report.facts import area_with_interval, found_and_missed, in_short, provenance, telling
from fedtail.report.pictures import class_order
from fedtail.report.sections.federation import privacy
from fedtail.report.sections.yardsticks import gain_of_sites
from fedtail.runs.record import RunRecord
from fedtail.words import fixed, percent

NAME = "model-card.md"
SMALL = 30
"""Test samples of a class below which its numbers are called uncertain."""


def model_card(run: RunRecord) -> str:
    """Return the card as Markdown."""
    comparison = comparisons([run])[0]
    counts, support = run.train_counts, run.per_class("support")
    rows = [
        {
            "name": found.name,
            "training": "–" if counts is None else f"{int(counts[found.place]):,}",
            "test": f"{found.support:,}",
            "found": f"{found.found:,}",
            "missed": f"{found.support - found.found:,}",
            "alarms": f"{found.false_alarms:,}",
            "recall": "{} ({:.2f} to {:.2f})".format(
                percent(found.found / found.support), *wilson(found.found / found.support, found.support)
            ),
            "area": _area(run, found.place),
        }
        for found in found_and_missed(run, len(run.classes))
    ]
    thin = [run.classes[c] for c in class_order(run) if support.size and 0 < support[c] < SMALL]
    untested = [run.classes[c] for c in class_order(run) if support.size and not support[c]]
    sizes = [int(n) for n in run.clients.get("sizes") or []]
    sites, rare = telling(run), int(class_order(run)[0])
    return markdown(
        "model-card.md",
        run=run,
        title=comparison.title,
        short=in_short(comparison),
        gain=gain_of_sites(comparison),
        origin=provenance(run),
        n_sites=len(run.clients.get("sites") or []),
        sizes=sizes,
        classes=rows,
        metrics=[(m.title, fixed(run.metric(m.name)), fixed((run.result.get("floor") or {}).get(m.name)))
                 for m in shown(run.test)],
        sites=[(s.name, f"{s.samples:,}", f"{s.positives(rare):,}", fixed(s.value())) for s in sites],
        rare=run.classes[rare],
        spread=float(np.std([s.value() for s in sites])) if sites else math.nan,
        thin=thin,
        untested=untested,
        decision=run.result.get("decision") or {},
        privacy=privacy(comparison),
        verdict=(run.result.get("verdict") or {}).get("said", ""),
        notes=[str(note) for note in run.clients.get("notes") or []],
    )  # fmt: skip


def _area(run: RunRecord, c: int) -> str:
    area, interval = area_with_interval(run, c)
    return f"{fixed(area)} ({interval})" if interval else "–"


def write_card(run: RunRecord) -> Path:
    """Write the card into the run's folder and return its path."""
    path = run.folder / NAME
    write_atomically(path, model_card(run))
    return path
