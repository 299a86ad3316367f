"""The headline table: mean ± spread over seeds and a paired test, as HTML, Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedtail.core.metrics import METRICS, metrics, signed
from fedtail.core.significance import Paired, holm, paired
from fedtail.files import write_atomically
from fedtail.report.blocks import Cell, say, table_of, template
from fedtail.report.blocks import Table as TableBlock
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.facts import number_in
from fedtail.report.pictures import over_seeds
from fedtail.rounds.history import plain
from fedtail.runs.record import TITLES
from fedtail.words import NONE, fixed, mean_spread, p_value

NOTHING = "always the majority class"
CLEAR = 0.05
"""A difference with a smaller p is taken as one."""
LEAST_SEEDS = 6
"""Shared seeds below which no difference is marked: an exact sign-flip test could not give p below 0.05."""
MOST_COLUMNS = 5
"""Metrics of the page's headline table; all of them are folded away below it."""


def tested() -> list[str]:
    """Metrics that contenders may be ranked and tested by; false alarms alone are won by a model that finds nothing."""
    others = [m for m in metrics() if m.headline and (m.higher_is_better or m.needs != "background")]
    return [m.name for m in metrics() if m in others or m.needs == "scores"]


@dataclass(frozen=True)
class Row:
    """One contender: (mean, spread) of each metric, and how it compares with the baseline."""

    label: str
    seeds: int
    cells: dict[str, tuple[float, float]]
    versus: Paired | None = None
    """None for the baseline itself, or where no seed is shared."""
    p_holm: float = math.nan
    note: str = ""
    """Why the row is not quite like the others: cut short, another number of rounds."""

    @property
    def means(self) -> dict[str, float]:
        return {c: mean for c, (mean, _) in self.cells.items()}


@dataclass(frozen=True)
class Table:
    """The headline table of a comparison."""

    comparison: Comparison
    metric: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    yardsticks: tuple[Row, ...]
    """What the contenders are measured against, and are not ranked with."""
    winners: dict[str, str | None]
    """Per column the row that is better than all others; None where a test cannot tell."""

    @property
    def seeds(self) -> int:
        return max(row.seeds for row in self.rows)

    def block(
        self, columns: Sequence[str] | None = None, *, test: bool = True, colours: Mapping[str, int] | None = None
    ) -> TableBlock:
        """Return some columns, by default all, with the difference from the baseline and its p behind that tested."""
        chosen = self.columns if columns is None else columns
        several, test = self.seeds > 1, test and len(self.rows) > 1

        def line(row: Row) -> dict[str, str | Cell]:
            cells: dict[str, str | Cell] = {"Method": Cell(row.label, small=f"({row.note})" if row.note else "")}
            cells["Seeds"] = str(row.seeds) if several and row.seeds else ""
            for c in chosen:
                cells[METRICS[c].title] = _cell(row.cells[c], "best" if self.winners[c] == row.label else "")
                if c == self.metric and test:
                    against = "baseline" if row.label == self.comparison.reference.label else _difference(row)
                    cells |= {f"Δ {METRICS[c].title}": against, "p": (p_value(row.p_holm) or NONE) if against else ""}
            return cells

        floor = {c: (number_in(self.comparison.floor, c), math.nan) for c in self.columns}
        rest = map(line, [*([Row(NOTHING, 0, floor)] if self.comparison.floor else []), *self.yardsticks])
        return table_of(map(line, self.rows if chosen else ()), "Headline table", "headline", colours, rest=rest)

    def most_telling(self) -> list[str]:
        """Return the tested metric, then those that say most, no more than a screen has room for."""
        others = sorted(self.columns[1:], key=lambda c: -METRICS[c].priority)[: MOST_COLUMNS - 1]
        return [c for c in self.columns if c in others or c == self.metric]


def winner(contenders: Sequence[Contender], metric: str) -> str | None:
    """Return the best contender, if a paired test over six shared seeds or more tells it from every other
    (Holm-corrected, p < 0.05): the largest of some means that are equal but for luck deserves no mark."""
    if len(contenders) < 2:
        return None
    best, *others = contenders
    tests = [paired(best.values(metric), one.values(metric)) for one in others]
    if any(t is None or t.n < LEAST_SEEDS for t in tests):
        return None
    apart = [0.0 if math.isnan(t.p_t) else t.p_t for t in tests if t is not None]
    return best.label if all(p < CLEAR for p in holm(apart)) else None


def headline(comparison: Comparison, metric: str = "macro_f1", *, ranked: bool = False) -> Table:
    """A row per contender, ``ranked`` from the best on; ``metric`` is the first column, and the one that is tested
    against the baseline."""
    two = len(comparison.runs[0].classes) == 2  # whose mean PR-AUC hides the rare one
    known = [m.name for m in metrics() if m.name == metric or (m.headline and not (two and m.name == "pr_auc"))]
    columns = [c for c in sorted(known, key=lambda name: name != metric) if comparison.scored(c)]
    base = comparison.reference
    tests = [None if one is base else paired(one.values(metric), base.values(metric)) for one in comparison.contenders]
    adjusted = holm([t.p_t if t else math.nan for t in tests])
    rows = [
        Row(
            one.label,
            len(one.runs),
            {c: (one.mean(c), one.spread(c)) for c in columns},
            test,
            p,
            length_note(one, comparison),
        )
        for one, test, p in zip(comparison.contenders, tests, adjusted, strict=True)
    ]
    if ranked and metric in columns:
        rows.sort(key=lambda row: -signed(metric, row.means[metric]))
    return Table(
        comparison=comparison,
        metric=metric,
        columns=tuple(columns),
        rows=tuple(rows),
        yardsticks=tuple(_yardsticks(comparison, columns)),
        winners={c: winner(comparison.scored(c), c) for c in columns},
    )


def _yardsticks(comparison: Comparison, columns: Sequence[str]) -> Iterator[Row]:
    """Yield what lies beside the runs, mean and spread over seeds."""
    for kind, title in TITLES.items():
        values = [[number_in(y.test, c) for c in columns] for y in comparison.yardsticks if y.kind == kind]
        if values and columns:
            cells = zip(*(column.tolist() for column in over_seeds(np.array(values))), strict=True)
            yield Row(title, len(values), dict(zip(columns, cells, strict=True)))


def length_note(one: Contender, comparison: Comparison) -> str:
    """What is unusual about a contender's length: a run that was cut short, that stopped by ``run.patience``, or that
    was asked for another number of rounds than the others were."""
    if short := {f"{len(r.history)} of {r.rounds}" for r in one.runs if not r.finished}:
        return f"incomplete: {', '.join(sorted(short))} rounds"
    ends = [len(r.history) for r in one.runs if len(r.history) < r.rounds and not (r.folder / "rates.toml").is_file()]
    if ends:
        return f"stopped after {', '.join(map(str, sorted(set(ends))))} rounds"
    asked = sorted({r.rounds for r in one.runs})
    return f"{', '.join(map(str, asked))} rounds" if len({r.rounds for r in comparison.runs}) > 1 else ""


def footnote(table: Table) -> str:
    """Which test, over how many seeds, and what it can and cannot show. Plain text."""
    sizes = [row.versus.n for row in table.rows if row.versus]
    words = METRICS[table.metric].words
    return say("footnote", table=table, words=words, n=min(sizes, default=0), several=len(sizes) > 1)


def _difference(row: Row) -> str | Cell:
    """Return the difference from the baseline with its interval."""
    if (v := row.versus) is None:
        return ""
    return Cell(f"{v.difference:+.3f}", small=f"[{v.low:+.3f}, {v.high:+.3f}]" if math.isfinite(v.low) else "")


def _cell(values: tuple[float, float], look: str = "") -> Cell:
    mean, spread = values
    return Cell(fixed(mean), small=f"± {spread:.3f}" if math.isfinite(spread) else "", look=look)


def to_markdown(tables: Sequence[Table]) -> str:
    """Return GitHub-flavoured tables, one per comparison."""
    return "\n".join(f"### {t.comparison.title}\n\n{t.block().markdown()}\n\n{footnote(t)}\n" for t in tables)


def to_latex(tables: Sequence[Table]) -> str:
    """Return booktabs tables; in bold what is significantly better than all others of its column."""
    drawn = []
    for table in tables:
        block = table.block()
        kept = [i for i, head in enumerate(block.head) if head != "Seeds"]
        rows = [[_tex(str(row[0])), *(_tex_cell(row[i]) for i in kept[1:])] for row in block.rows]
        head = ["$p$" if block.head[i] == "p" else _tex(block.head[i]) for i in kept]
        drawn.append(
            {"caption": f"{_tex(table.comparison.title)}. {_tex(footnote(table))}", "head": head, "rows": rows}
        )
    return template("table.tex", tables=drawn)


def _tex_cell(cell: str | Cell) -> str:
    """Return a number as a formula, in bold where it is marked."""
    if isinstance(cell, str):
        return f"${cell}$" if cell[:1] in "<+-0123456789" else cell.replace("–", "--")
    text = str(cell) if cell.small.startswith("±") else cell.text
    text = text.replace("±", r"\pm").replace("–", r"\text{--}")
    return rf"$\mathbf{{{text}}}$" if cell.look == "best" else f"${text}$"


def to_csv(compared: Sequence[Comparison]) -> str:
    """One line per run, every scalar test metric: for whoever wants to compute for themselves."""
    rows = [
        {"problem": comparison.title, "method": contender.label, "seed": run.seed, "rounds": len(run.history)}
        | {m.name: run.metric(m.name) for m in metrics()}
        | {"seconds": f"{run.seconds:.3f}", "folder": run.folder.name}
        for comparison in compared
        for contender in comparison.contenders
        for run in contender.runs
    ]
    return pd.DataFrame(rows).to_csv(index=False, float_format="%.6f", lineterminator="\n")


def summary(comparison: Comparison, metric: str = "macro_f1") -> str:
    """What the table says, in a sentence or two of plain text."""
    if not (scored := comparison.scored(metric)):
        return "No run was scored on test samples."
    best, base = scored[0], comparison.reference
    return say(
        "summary",
        best=best,
        base=base,
        value=mean_spread(best.mean(metric), best.spread(metric)),
        words=METRICS[metric].words,
        test=None if best is base else paired(best.values(metric), base.values(metric)),
        up=METRICS[metric].higher_is_better,
        compared=len(scored),
        tail=(best.mean("tail"), base.mean("tail")),
    )


def _tex(text: str) -> str:
    special = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "±": r"$\pm$", "·": r"$\cdot$", "Δ": r"$\Delta$"}
    return "".join(special.get(c, c) for c in text)


def write_rankings(folder: Path, rankings: Sequence[Table], **more: Any) -> dict[str, Any]:
    """Write the files; returns the content of ``comparison.json``, to which ``more`` is added."""
    problems = [_described(table) for table in rankings]
    answer: dict[str, Any] = plain({"folder": str(folder), "problems": problems, **more})
    write_atomically(folder / "comparison.md", to_markdown(rankings))
    write_atomically(folder / "comparison.csv", to_csv([table.comparison for table in rankings]))
    write_atomically(folder / "comparison.json", json.dumps(answer, indent=1))
    return answer


def _described(table: Table) -> dict[str, Any]:
    return {
        "title": table.comparison.title,
        "metric": table.metric,
        "baseline": table.comparison.reference.label,
        "floor": table.comparison.floor,
        "yardsticks": {row.label: row.means for row in table.yardsticks},
        "ranking": [
            {
                "method": row.label,
                "seeds": row.seeds,
                "note": row.note or None,
                "mean": row.means,
                "spread": {c: spread for c, (_, spread) in row.cells.items()},
                "difference": row.versus.difference if row.versus else None,
                "p": row.p_holm if row.versus else None,
                "p_sign_flip": row.versus.p_sign_flip if row.versus else None,
            }
            for row in table.rows
        ],
    }
