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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedtail.core.metrics import METRICS
from fedtail.core.significance import holm, paired
from fedtail.errors import FedtailError, one_of, writing
from fedtail_experiments.paper.declared import load_grid
from fedtail_experiments.paper.grid import Grid
from fedtail_experiments.paper.overview import compared, raced, reached, studied
from fedtail_experiments.paper.recipes import load_toml
from fedtail_experiments.paper.records import Record, read_records
from fedtail_experiments.paper.search import TRIALS, Found, read_trials
from fedtail_experiments.paper.studies import FILE as STUDIES
from fedtail_experiments.paper.studies import Study, read_studies
from fedtail_experiments.paper.summaries import (
    Key,
    Summary,
    agreement,
    column_floor,
    difference,
    number,
    p_value,
    said,
    summaries,
)
from fedtail_experiments.paper.tables import markdown_table

BELOW = "‡"
"""Marks figures below always answering the most frequent class."""
MARK = re.compile(r"<!-- table ([\w.-]+) -->\n(.*?)<!-- end -->", re.S)
OLD = "†"
"""Marks figures with a run in them that was taken over from before there were records."""


@dataclass(frozen=True)
class Written:
    """What a page was made of."""

    tables: int
    records: int
    below: list[str]
    """Cells below always answering the most frequent class, in words; figures taken over from version 0.1 apart."""


def write_page(page: Path, folder: Path) -> Written:
    """Bring a page's tables up to date with a folder of records; trials and studies lie beside it."""
    if not page.is_file():
        raise FedtailError(f"{str(page)!r} does not exist here; run this in the repository, next to RESULTS.md")
    records = read_records(folder)
    if not records:
        raise FedtailError(f"no records in {str(folder)!r}; run a table first, e.g. `fedtail reproduce table-iid`")
    text = page.read_text(encoding="utf-8")
    with writing(page):
        beside = read_trials(folder.with_name(TRIALS)), read_studies(folder.with_name(STUDIES))
        page.write_text(filled(text, records, *beside), encoding="utf-8")
    names = [name for name, _ in MARK.findall(text)]
    return Written(len(names), len(records), [line for name in names for line in below_floor(name, records)])


def filled(text: str, records: Sequence[Record], races: Sequence[Found] = (), studies: Sequence[Study] = ()) -> str:
    """The page with its tables as records, recorded searches and studies give them."""
    return MARK.sub(lambda m: f"<!-- table {m[1]} -->\n{table(m[1], records, races, studies)}<!-- end -->", text)


def table(name: str, records: Sequence[Record], races: Sequence[Found] = (), studies: Sequence[Study] = ()) -> str:
    """One table of the page, in Markdown."""
    view = _view(name)
    if view.get("kind") == "raced":
        return raced(races)
    if view.get("kind") == "studied":
        return studied(view, studies)
    kinds = {"list": listed, "reached": reached, "compared": compared, "grid": tabulated}
    return kinds[view.get("kind", "grid")](view, records)


def tabulated(view: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Part of a grid: rows of the grid, a column per (block, column), rank agreement with the paper below."""
    grid, found, columns = _part(view, records)
    against = view.get("against", grid.rows[0].name)
    blocks = {block for block, _ in columns} if "blocks" not in view else view["blocks"]
    head = [METRICS[view["metric"]].title, *(c if len(blocks) == 1 else f"{c}, {b}" for b, c in columns)]
    named = view.get("rows", [row.name for row in grid.rows])
    tests = _tests(found, columns, named, against)
    rows = [
        [name, *(_cell(grid, found, place, name, tests) for place in columns)]
        for name in named
        if any((*place, name) in found for place in columns)
    ]
    if "rows" in view:  # two or three rows against each other: what follows belongs to whole columns
        return markdown_table(head, rows)
    floors = [column_floor(found, place) for place in columns]
    if not all(map(math.isnan, floors)):
        rows.append(["*always the majority class*", *("" if math.isnan(v) else number(v) for v in floors)])
    taus = [agreement(grid, found, place) for place in columns]
    if not all(math.isnan(tau) for tau, _ in taus):
        shown = ("" if math.isnan(tau) else f"{difference(tau, 2)} over {n} rows" for tau, n in taus)
        rows.append(["*rank agreement with the paper (Kendall's tau)*", *shown])
    return markdown_table(head, rows)


def below_floor(name: str, records: Sequence[Record]) -> list[str]:
    """The cells of a table that are worse than always answering the most frequent class."""
    view = _view(name)
    if view.get("kind", "grid") != "grid":
        return []
    _, found, columns = _part(view, records)
    return [
        f"{name}: {row}, {column}, {block}: {number(s.mean)} is below {number(s.floor)}"
        for (block, column, row), s in found.items()
        if (block, column) in columns and s.below_floor and not s.imported
    ]


def listed(view: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Single runs, one line each: row, what was changed, the seed unless 0, metrics on test and, if the view names any,
    on validation."""
    where = {"grid": view["grid"], **view["where"]}
    metrics, chosen_by, rows = view["metrics"], view.get("validation", []), []
    for r in records:
        if r.overrides and all(getattr(r, k) == v for k, v in where.items()):
            told = [*((r.metrics, m) for m in metrics), *((r.validation, m) for m in chosen_by)]
            scores = (number(split[m]) if m in split else "–" for split, m in told)
            changed = said(r.overrides) + (f", seed {r.seed}" if r.seed else "")
            rows.append([r.row, changed, *scores, f"{r.seconds:.0f} s" if r.seconds == r.seconds else ""])
    titles = [METRICS[m].title for m in metrics] + [f"{METRICS[m].title}, validation" for m in chosen_by]
    return markdown_table(["", "changed", *titles, ""], rows)


def _view(name: str) -> Mapping[str, Any]:
    views = load_toml("page.toml")
    if name not in views:
        raise one_of("table of the page", name, views)
    return dict(views[name])


def _part(view: Mapping[str, Any], records: Sequence[Record]) -> tuple[Grid, dict[Key, Summary], list[tuple[str, str]]]:
    """The grid of a table, its cells, and the (block, column) pairs to show: those that records tell of."""
    grid = load_grid(view["grid"])
    if not view.get("paper", True):  # its numbers are of another metric
        grid = replace(grid, paper={})
    found = summaries(grid, records, view["metric"])
    blocks, names = ([a.name for a in axis] for axis in (grid.blocks, grid.columns))
    wanted = [(b, c) for b in view.get("blocks", blocks) for c in view.get("columns", names)]
    return grid, found, [place for place in wanted if any(key[:2] == place for key in found)]


def _tests(
    found: Mapping[Any, Summary], places: Sequence[tuple[str, str]], rows: Sequence[str], against: str
) -> dict[Key, tuple[float, float]]:
    """(difference, p) of the cells of a table that have a paired test; p corrected for all of them by Holm's method."""
    tests = {}
    for place in places:
        base = found.get((*place, against))
        for row in rows:
            mine = found.get((*place, row))
            if mine and base and row != against and (test := paired(mine.values, base.values)) and test.n > 2:
                tests[*place, row] = test
    corrected = holm([test.p_t for test in tests.values()])
    return {key: (test.difference, p) for (key, test), p in zip(tests.items(), corrected, strict=True)}


def _cell(
    grid: Grid,
    found: Mapping[Any, Summary],
    place: tuple[str, str],
    row: str,
    tests: Mapping[Key, tuple[float, float]],
) -> str:
    mine = found.get((*place, row))
    if mine is None:
        return "–"
    column = [s for key, s in found.items() if key[:2] == place]
    most = max(s.seeds for s in column)
    best = max(s.mean for s in column if 2 * s.seeds >= most)  # a lucky seed or two does not win against ten
    shown = number(mine.mean) + ("" if math.isnan(mine.spread) else f" ± {number(mine.spread)}")
    shown = f"**{shown}**" if mine.mean == best else shown
    if (*place, row) in tests:
        apart, p = tests[*place, row]
        shown += f" ({difference(apart)}, p {p_value(p)})"
    shown += f" ×{mine.seeds}" + (OLD if mine.older else "") + (BELOW if mine.below_floor else "")
    paper = grid.reported(place[0], row, place[1])
    return shown if paper is None else f"{shown} [{number(paper, 4)}]"
