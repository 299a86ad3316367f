"""What records say of one cell, in numbers and as a page writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from fedtail_experiments.paper.grid import Grid
from fedtail_experiments.paper.records import Record

Key = tuple[str, str, str]
"""Block, column, row."""


@dataclass(frozen=True)
class Summary:
    """One cell of a table: a mean over seeds, and the values behind it where they are known."""

    mean: float
    spread: float
    seeds: int
    values: Mapping[object, float]
    imported: bool
    """Whether none of its runs is at hand."""
    older: bool
    """Whether one of them, at least, is not."""
    floor: float

    @property
    def below_floor(self) -> bool:
        """Whether always answering the most frequent class does better."""
        return self.mean < self.floor


def summarize(records: Sequence[Record], metric: str) -> Summary | None:
    """The mean of a cell: of its runs, the last of each seed, or of a figure taken over where there are none."""
    plain = [r for r in records if not r.overrides and metric in r.metrics]
    runs = {r.seed: r for r in plain if r.seed is not None}
    if runs:
        values: dict[object, float] = {seed: r.metrics[metric] for seed, r in runs.items()}
        each = list(values.values())
        spread = float(np.std(each, ddof=1)) if len(each) > 1 else math.nan
        floor = next((r.floor[metric] for r in runs.values() if metric in r.floor), math.nan)
        taken_over = [bool(r.source) for r in runs.values()]
        return Summary(
            mean=float(np.mean(each)),
            spread=spread,
            seeds=len(each),
            values=values,
            imported=all(taken_over),
            older=any(taken_over),
            floor=floor,
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
        older=True,
        floor=last.floor.get(metric, math.nan),
    )


def summaries(grid: Grid, records: Sequence[Record], metric: str) -> dict[Key, Summary]:
    """Every cell of a grid that records tell of. A cell without a floor takes that of its column, which data and
    partition give."""
    each: dict[Key, list[Record]] = {}
    for r in records:
        if r.grid == grid.name:
            each.setdefault((r.block, r.column, r.row), []).append(r)
    found = {key: s for key, mine in each.items() if (s := summarize(mine, metric))}
    floors: dict[tuple[str, str], list[float]] = {}
    for key, s in found.items():
        if not math.isnan(s.floor):
            floors.setdefault(key[:2], []).append(s.floor)
    means = {place: float(np.mean(values)) for place, values in floors.items()}
    return {
        key: replace(s, floor=means.get(key[:2], math.nan)) if math.isnan(s.floor) else s for key, s in found.items()
    }


def column_floor(found: Mapping[Key, Summary], place: tuple[str, str]) -> float:
    """Mean floor of a column's cells; NaN where none says."""
    known = [s.floor for key, s in found.items() if key[:2] == place and not math.isnan(s.floor)]
    return float(np.mean(known)) if known else math.nan


def agreement(grid: Grid, found: Mapping[Key, Summary], place: tuple[str, str]) -> tuple[float, int]:
    """Kendall's tau between ours and the paper's order of the rows of a column, and over how many; NaN below three."""
    pairs = [
        (found[*place, row.name], paper)
        for row in grid.rows
        if (*place, row.name) in found and (paper := grid.reported(place[0], row.name, place[1])) is not None
    ]
    if len(pairs) < 3:
        return math.nan, len(pairs)
    ours, papers = zip(*pairs, strict=True)
    return float(kendalltau(side_by_side(ours)[0], papers).statistic), len(pairs)


def side_by_side(cells: Sequence[Summary]) -> tuple[list[float], int]:
    """Means of cells over the seeds that all of them have, and how many those are: seeds differ by more than rows do.

    Each over all of its own, and 0, where there is no such seed."""
    common = set.intersection(*(set(s.values) for s in cells))
    return [float(np.mean([s.values[k] for k in common])) if common else s.mean for s in cells], len(common)


def number(value: float, digits: int = 3) -> str:
    """A share as papers write it: without the leading zero."""
    return f"{value:.{digits}f}".removeprefix("0")


def difference(value: float, digits: int = 3) -> str:
    """The same with its sign."""
    return f"{value:+.{digits}f}".replace("+0.", "+.").replace("-0.", "−.")


def p_value(value: float) -> str:
    """A p-value in three digits; a dash where there is none."""
    return "–" if math.isnan(value) else "< .001" if value < 0.001 else number(value)


def said(settings: Mapping[str, Any]) -> str:
    """Changed settings in a few words."""
    return ", ".join(
        f"{key.partition('.')[2]} {f'{v:g}' if isinstance(v, float) else v}" for key, v in settings.items()
    )
