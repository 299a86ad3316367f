"""The files of a ranking: ``comparison.md``, ``comparison.csv`` and ``comparison.json``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtail.files import write_atomically
from fedtail.report.comparison import Comparison
from fedtail.report.tables import Table, to_csv, to_markdown
from fedtail.rounds.history import plain


def write_rankings(
    folder: Path, compared: Sequence[Comparison], rankings: Sequence[Table], **more: Any
) -> dict[str, Any]:
    """Write the files; returns the content of ``comparison.json``, to which ``more`` is added."""
    problems = [_described(table) for table in rankings]
    answer: dict[str, Any] = plain({"folder": str(folder), "problems": problems, **more})
    write_atomically(folder / "comparison.md", to_markdown(rankings))
    write_atomically(folder / "comparison.csv", to_csv(compared))
    write_atomically(folder / "comparison.json", json.dumps(answer, indent=1))
    return answer


def _described(table: Table) -> dict[str, Any]:
    return {
        "title": table.title,
        "metric": table.metric,
        "baseline": table.baseline,
        "floor": table.floor,
        "yardsticks": {
            row.label: {c: m for c, (m, _) in zip(table.columns, row.cells, strict=True)} for row in table.yardsticks
        },
        "ranking": [
            {
                "method": row.label,
                "seeds": row.seeds,
                "note": row.note or None,
                "mean": {c: mean for c, (mean, _) in zip(table.columns, row.cells, strict=True)},
                "spread": {c: spread for c, (_, spread) in zip(table.columns, row.cells, strict=True)},
                "difference": row.versus.difference if row.versus else None,
                "p": row.p_holm if row.versus else None,
                "p_sign_flip": row.versus.p_sign_flip if row.versus else None,
            }
            for row in table.rows
        ],
    }
