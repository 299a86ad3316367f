"""The page of a monitor: what a model has met since its training, look by look, and what has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedtail.core.evidence import wilson
from fedtail.core.shift import spent
from fedtail.plots import Line, Lines
from fedtail.report.blocks import Block, Charts, Section, Table, Text
from fedtail.report.page import page, write_text
from fedtail.runs.monitor import ALPHA, Watch
from fedtail.words import percent, plural

MOST = 6
"""Classes whose share is drawn, the rarest, and names of looks on an axis."""


def write_life_report(watch: Watch, path: Path) -> Path:
    """Write the page of a model's life so far."""
    blocks: list[Block] = [Text("Nobody has looked yet.")]
    if watch.looks:
        error = f"All looks of a life share one error of {percent(ALPHA)}: so often is a change reported without one."
        blocks = [Text(watch.looks[-1].sentence()), Text(error, look="note"), Charts(timeline(watch)), _looks(watch)]
    facts = [plural(len(watch.looks), "look"), f"{watch.reference.n:,} reference rows", ", ".join(watch.classes[:8])]
    parts = [{"prefix": "", "comparison": None, "sections": [Section("time", "Over time", blocks)]}]
    return write_text(path, page("A model after training", parts, facts, "from counts"))


def timeline(watch: Watch) -> list[Lines]:
    """Draw class mix, drift, strange rows and, where labels have come, recall over the looks."""
    looks, x = watch.looks, np.arange(1.0, len(watch.looks) + 1)
    named = {float(i + 1): looks[i].name for i in np.unique(np.linspace(0, len(looks) - 1, MOST).astype(int))}

    def chart(title: str, y_label: str, lines: list[Line], begins: bool = False, **more: Any) -> Lines:
        return Lines(
            title,
            lines,
            y_label,
            x_label="look",
            floor=0.0,
            x_ticks={**({0.0: "reference"} if begins else {}), **named},
            x_name=lambda v: looks[int(v) - 1].name if v else "reference",
            **more,
        )

    rarest = [(watch.classes[c], watch.shares[c]) for c in np.argsort(watch.shares, kind="stable")[:MOST].tolist()]
    mix = [
        Line(name, i, np.append(0.0, x), np.array([share, *(look.mix[name] for look in looks)]))
        for i, (name, share) in enumerate(rarest, start=1)
    ]
    p = np.array([max(min(row["p"] for row in look.drift), 1e-30) for look in looks])
    limit = np.array([spent(ALPHA / 2, i + 1) for i in range(len(looks))])
    drift = [Line("reported from here on", 0, x, -np.log10(limit)), Line("strongest test", 1, x, -np.log10(p))]
    charts = [
        chart("Class mix, estimated without labels", "share", mix, begins=True),
        chart("Drift: what no chance explains", "-log10 p", drift),
    ]
    if watch.inputs:
        n = np.maximum([look.seen.n for look in looks], 1)
        strange = Line("strange rows", 2, x, np.array([int(look.seen.strange) for look in looks]) / n)
        charts.append(chart("Rows with a value like none before", "share", [strange]))
    if watch.find is not None:
        counts = np.array([look.seen.found(watch.classes.index(watch.find)) for look in looks])
        known = counts[:, 1] > 0
        share = counts[known, 0] / counts[known, 1]
        low, high = np.array([wilson(s, int(n)) for s, n in zip(share, counts[known, 1], strict=True)]).reshape(-1, 2).T
        line = Line(f"recall of {watch.find}", 3, x[known], share, samples=counts[known, 1], low=low, high=high)
        level = (watch.recall, f"promised: {percent(watch.recall)}")
        kept = f"The dotted line is what was promised: {percent(watch.recall)}. Bars are 95 % intervals."
        charts.append(
            chart("Recall, where labels have come", "recall", [line], ceiling=1.0, full=True, level=level, caption=kept)
        )
    return charts


def _looks(watch: Watch) -> Table:
    rows = [
        [
            look.name,
            f"{look.seen.n:,}",
            f"{int(look.seen.truth.sum()):,}",
            percent(int(look.seen.strange) / max(look.seen.n, 1)),
            ", ".join(look.changed) or "nothing",
        ]
        for look in reversed(watch.looks)
    ]
    return Table(rows, ["Look", "Rows", "With labels", "Strange", "Changed"], "Looks, the latest first")
