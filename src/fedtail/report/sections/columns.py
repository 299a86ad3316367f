"""The part of the page about the columns of a table: what trees have split by."""

from __future__ import annotations

import pandas as pd

from fedtail.report.blocks import Block, Table, Text
from fedtail.report.comparison import Comparison

MOST = 15


def columns(comparison: Comparison, metric: str) -> list[Block]:
    """Each column's share of all gains, mean over seeds; nothing of networks."""
    blocks: list[Block] = []
    for contender in comparison.contenders:
        recorded = [shares for run in contender.runs if (shares := run.result.get("importance"))]
        share = pd.DataFrame(recorded).fillna(0.0).mean().sort_index().sort_values(ascending=False, kind="stable")
        rows = [[str(name), f"{value:.1%}"] for name, value in share.iloc[:MOST].items()]
        if len(share) > MOST:
            rows.append([f"{len(share) - MOST} more", f"{share.iloc[MOST:].sum():.1%}"])
        blocks += [Table(rows, ["Column", "Share of all gains"], f"Columns that {contender.label} split by")]
    text = "How much of what all splits gained in training was gained by splits of a column. It is no test of a cause."
    return [Text(text), *blocks] if any(blocks) else []
