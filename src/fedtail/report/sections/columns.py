"""The part of the page about the columns of a table: what trees have split by."""

from __future__ import annotations

import numpy as np

from fedtail.report.blocks import Block, Table, Text
from fedtail.report.comparison import Comparison

MOST = 15


def columns(comparison: Comparison, metric: str) -> list[Block]:
    """Each column's share of all gains, mean over seeds; nothing of networks."""
    blocks: list[Block] = []
    for contender in comparison.contenders:
        told = [found for run in contender.runs if (found := run.result.get("importance"))]
        names = {name for shares in told for name in shares}
        share = {name: float(np.mean([shares.get(name, 0.0) for shares in told])) for name in names}
        order = sorted(share, key=lambda name: (-share[name], name))
        rows = [[name, f"{share[name]:.1%}"] for name in order[:MOST]]
        if rows:
            rest = sum(share[name] for name in order[MOST:])
            rows += [[f"{len(order) - MOST} more", f"{rest:.1%}"]] if len(order) > MOST else []
            blocks += [Table(["Column", "Share of all gains"], rows, f"Columns that {contender.label} split by")]
    said = "How much of what all splits gained in training was gained by splits of a column. It is no test of a cause."
    return [Text(said), *blocks] if blocks else []
