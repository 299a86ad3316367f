"""RESULTS.md from the record: every table between its marks is written anew, the prose around them stays.

    <!-- table adult-iid-5 -->
    ...
    <!-- end -->

``page.toml`` says what each table shows: a part of a grid, or a list of single runs with what was changed in them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from fedtail.core.metrics import METRICS
from fedtail.core.significance import paired
from fedtail.errors import FedtailError, one_of, writing
from fedtail.study.paper.declared import load_grid
from fedtail.study.paper.grid import Grid
from fedtail.study.paper.recipes import load_toml
from fedtail.study.paper.records import Record, read_records
from fedtail.study.paper.tables import markdown_table

MARK = re.compile(r"<!-- table ([\w.-]+) -->\n(.*?)<!-- end -->", re.S)
OLD = "†"
"""Marks figures that were taken over from before there were records."""


@dataclass(frozen=True)
class Summary:
    """One cell of a table: a mean over seeds, and the values behind it where they are known."""

    mean: float
    spread: float
    seeds: int
    values: Mapping[object, float]
    imported: bool
    floor: float


def write_page(page: Path, file: Path) -> tuple[int, int]:
    """Bring a page's tables up to date with a record; how many tables and records there were."""
    if not page.is_file():
        raise FedtailError(f"{str(page)!r} does not exist here; run this in the repository, beside RESULTS.md")
    records = read_records(file)
    if not records:
        raise FedtailError(f"no records in {str(file)!r}; run a table first, e.g. `fedtail reproduce table-iid`")
    text = page.read_text(encoding="utf-8")
    with writing(page):
        page.write_text(filled(text, records), encoding="utf-8")
    return len(MARK.findall(text)), len(records)


def filled(text: str, records: Sequence[Record]) -> str:
    """The page with its tables as the records give them."""
    return MARK.sub(lambda m: f"<!-- table {m[1]} -->\n{table(m[1], records)}<!-- end -->", text)


def table(name: str, records: Sequence[Record]) -> str:
    """One table of the page, in Markdown."""
    views = load_toml("page.toml")
    if name not in views:
        raise one_of("table of the page", name, views)
    view = views[name]
    mine = [r for r in records if r.grid == view["grid"]]
    return listed(view, mine) if view.get("kind") == "list" else tabulated(view, mine)


def tabulated(view: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Part of a grid: rows of the grid, a column per (block, column), rank agreement with the paper below."""
    grid, metric = load_grid(view["grid"]), view["metric"]
    against = view.get("against", grid.rows[0].name)
    blocks = view.get("blocks", [b.name for b in grid.blocks])
    columns = [(b, c) for b in blocks for c in view.get("columns", [c.name for c in grid.columns])]
    found = {
        (b, c, row.name): summary
        for b, c in columns
        for row in grid.rows
        if (summary := summarize([r for r in records if (r.block, r.column, r.row) == (b, c, row.name)], metric))
    }
    columns = [place for place in columns if any(key[:2] == place for key in found)]
    head = [METRICS[metric].title, *(c if len(blocks) == 1 else f"{c}, {b}" for b, c in columns)]
    rows = [
        [row.name, *(_cell(grid, found, place, row.name, against) for place in columns)]
        for row in grid.rows
        if any((*place, row.name) in found for place in columns)
    ]
    floors = [_floor(found, place) for place in columns]
    if not all(map(math.isnan, floors)):
        rows.append(["*always the majority class*", *("" if math.isnan(v) else _number(v) for v in floors)])
    taus = [_agreement(grid, found, place) for place in columns]
    if any(taus):
        rows.append(["*rank agreement with the paper (Kendall's tau)*", *taus])
    return markdown_table(head, rows)


def summarize(records: Sequence[Record], metric: str) -> Summary | None:
    """The mean of a cell: of its runs, the last of each seed, or of a figure taken over where there are none."""
    plain = [r for r in records if not r.overrides and metric in r.metrics]
    runs = {r.seed: r for r in plain if r.seed is not None}
    if runs:
        values: dict[object, float] = {seed: r.metrics[metric] for seed, r in runs.items()}
        each = list(values.values())
        spread = float(np.std(each, ddof=1)) if len(each) > 1 else math.nan
        floor = next((r.floor[metric] for r in runs.values() if metric in r.floor), math.nan)
        old = all(r.source for r in runs.values())
        return Summary(
            mean=float(np.mean(each)), spread=spread, seeds=len(each), values=values, imported=old, floor=floor
        )
    if not plain:
        return None
    last = plain[-1]
    return Summary(
        mean=last.metrics[metric],
        spread=last.spread.get(metric, math.nan),
        seeds=last.seeds,
        values={},
        imported=True,
        floor=last.floor.get(metric, math.nan),
    )


def listed(view: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Single runs, one line each: row, what was changed, metrics."""
    chosen = [r for r in records if r.overrides and all(getattr(r, k) == v for k, v in view["where"].items())]
    metrics, rows = view["metrics"], []
    for r in chosen:
        said = ", ".join(f"{key.partition('.')[2]} {_value(value)}" for key, value in r.overrides.items())
        scores = (_number(r.metrics[m]) if m in r.metrics else "–" for m in metrics)
        rows.append([r.row, said, *scores, f"{r.seconds:.0f} s" if r.seconds == r.seconds else ""])
    return markdown_table(["", "changed", *(METRICS[m].title for m in metrics), ""], rows)


def _cell(grid: Grid, found: Mapping[Any, Summary], place: tuple[str, str], row: str, against: str) -> str:
    mine = found.get((*place, row))
    if mine is None:
        return "–"
    best = max(s.mean for key, s in found.items() if key[:2] == place)
    shown = _number(mine.mean) + ("" if math.isnan(mine.spread) else f" ± {_number(mine.spread)}")
    shown = f"**{shown}**" if mine.mean == best else shown
    base = found.get((*place, against))
    if base is not None and row != against and (test := paired(mine.values, base.values)) and test.n > 2:
        shown += f" ({test.difference:+.3f}, p {_p(test.p_t)})".replace("+0.", "+.").replace("-0.", "−.")
    shown += f" ×{mine.seeds}" + (OLD if mine.imported else "")
    paper = grid.reported(place[0], row, place[1])
    return shown if paper is None else f"{shown} [{_number(paper, 4)}]"


def _agreement(grid: Grid, found: Mapping[Any, Summary], place: tuple[str, str]) -> str:
    pairs = [
        (found[*place, row.name].mean, paper)
        for row in grid.rows
        if (*place, row.name) in found and (paper := grid.reported(place[0], row.name, place[1])) is not None
    ]
    if len(pairs) < 3:
        return ""
    tau = float(kendalltau(*zip(*pairs, strict=True)).statistic)
    return f"{tau:+.2f} over {len(pairs)} rows".replace("+0.", "+.").replace("-0.", "−.")


def _floor(found: Mapping[Any, Summary], place: tuple[str, str]) -> float:
    """Mean floor of a column's cells; NaN where none says."""
    known = [s.floor for key, s in found.items() if key[:2] == place and not math.isnan(s.floor)]
    return float(np.mean(known)) if known else math.nan


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}".removeprefix("0")


def _p(value: float) -> str:
    return "–" if math.isnan(value) else "< .001" if value < 0.001 else _number(value)
