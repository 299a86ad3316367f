"""What a grid's runs gave beside the paper's numbers, as Markdown and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedtail.runs.record import RunRecord, load_run
from fedtail.study.cells import Outcome
from fedtail_experiments.paper.grid import Grid, Place


@dataclass(frozen=True)
class Entry:
    """One cell of a table over its seeds."""

    block: str
    row: str
    column: str
    values: tuple[float, ...]
    """The metric of every finished seed."""
    paper: float | None
    seconds: float
    failed: int = 0

    @property
    def mean(self) -> float:
        return float(np.mean(self.values)) if self.values else math.nan

    @property
    def spread(self) -> float:
        """Standard deviation over seeds (n - 1); NaN with fewer than two."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else math.nan

    def text(self, digits: int = 3) -> str:
        if not self.values:
            return "failed" if self.failed else "–"
        spread = "" if math.isnan(self.spread) else f" ± {self.spread:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


@dataclass(frozen=True)
class GridResult:
    """Everything a grid's runs say."""

    grid: Grid
    entries: tuple[Entry, ...]
    runs: dict[Place, RunRecord]

    def entry(self, block: str, row: str, column: str) -> Entry | None:
        return next((e for e in self.entries if (e.block, e.row, e.column) == (block, row, column)), None)

    def used(self, axis: str) -> list[str]:
        """The names of ``block``, ``row`` or ``column`` that have entries, in the grid's order."""
        named = {"block": self.grid.blocks, "row": self.grid.rows, "column": self.grid.columns}[axis]
        present = {getattr(e, axis) for e in self.entries}
        return [a.name for a in named if a.name in present]


def collect(grid: Grid, outcomes: Mapping[Place, Outcome], *, with_paper: bool = True) -> GridResult:
    """Read the runs of a grid back; ``with_paper`` is for runs on the data that the paper's numbers are about."""
    runs = {place: load_run(outcome.folder) for place, outcome in outcomes.items() if outcome.error is None}
    seeds: dict[tuple[str, str, str], list[Place]] = {}
    for place in outcomes:
        seeds.setdefault((place.block, place.row, place.column), []).append(place)
    entries = []
    for (block, row, column), members in seeds.items():
        found = [runs[m] for m in members if m in runs]
        entry = Entry(
            block=block,
            row=row,
            column=column,
            values=tuple(v for r in found if math.isfinite(v := r.metric(grid.metric))),
            paper=grid.reported(block, row, column) if with_paper else None,
            seconds=sum(r.seconds for r in found),
            failed=len(members) - len(found),
        )
        entries.append(entry)
    return GridResult(grid, tuple(entries), runs)


def to_markdown(result: GridResult) -> str:
    """A table per block: ours (mean ± spread), the paper's in brackets, the best of a column in bold."""
    columns = result.used("column")
    parts = []
    for block in result.used("block"):
        best = {c: _best(result, block, c) for c in columns}
        rows = [[row, *(_text(result.entry(block, row, c), best[c]) for c in columns)] for row in result.used("row")]
        parts.append(markdown_table([block, *columns], [row for row in rows if any(row[1:])]))
    return "\n".join(parts)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, every cell as it stands."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines) + "\n"


def to_csv(result: GridResult) -> str:
    """One line per cell: ours, spread, seeds, the paper's, seconds."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["block", "row", "column", result.grid.metric, "spread", "seeds", "failed", "paper", "seconds"])
    for e in result.entries:
        ours = [_csv(e.mean), _csv(e.spread), len(e.values), e.failed]
        writer.writerow([e.block, e.row, e.column, *ours, "" if e.paper is None else e.paper, f"{e.seconds:.1f}"])
    return out.getvalue()


def _best(result: GridResult, block: str, column: str) -> float:
    """The best mean of a column; NaN, which nothing equals, where it has no rivals."""
    means = [e.mean for e in result.entries if (e.block, e.column) == (block, column) and e.values]
    return max(means, default=math.nan) if len(result.used("row")) > 1 else math.nan


def _text(entry: Entry | None, best: float) -> str:
    if entry is None:
        return ""
    ours = f"**{entry.text()}**" if entry.mean == best else entry.text()
    return ours if entry.paper is None else f"{ours} ({_paper(entry.paper)})"


def _paper(value: float) -> str:
    """As the paper prints it: ``.8568``."""
    return f"{value:.4f}".rstrip("0").removeprefix("0")


def _csv(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6f}"
