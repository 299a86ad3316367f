"""The short tables of the page: what was reached of the paper's figures, and how each column compares with it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import ttest_1samp

from fedtail.core.significance import holm
from fedtail_experiments.paper.declared import load_grid
from fedtail_experiments.paper.recipes import load_recipes
from fedtail_experiments.paper.records import Record
from fedtail_experiments.paper.search import Found
from fedtail_experiments.paper.studies import Study
from fedtail_experiments.paper.summaries import agreement, difference, number, p_value, said, side_by_side, summaries
from fedtail_experiments.paper.tables import markdown_table


def raced(races: Iterable[Found]) -> str:
    """What every recorded search found, method by method."""
    rows = [
        [f.key, f.method, str(f.tried), str(f.seeds), str(len(f.trials) * f.seeds), said(f.settings), number(f.score)]
        for f in sorted(races, key=lambda f: (f.key, f.method, f.seeds))
    ]
    return markdown_table(["", "", "trials", "seeds", "runs", "the best", "validation"], rows)


def studied(view: Mapping[str, Any], studies: Sequence[Study]) -> str:
    """Measurements of a study: a line for each of ``rows``, a column for each place, means over seeds.

    A row shows a value, or with ``minus`` the paired difference of two with its p-value, corrected over the table by
    Holm's method."""
    mine = [s for s in studies if s.study == view["study"]]
    places = [p for p in view["places"] if any(s.place == p for s in mine)]
    shown: dict[tuple[int, str], str] = {}
    tests: dict[tuple[int, str], float] = {}
    for i, row in enumerate(view["rows"]):
        for place in places:
            values = np.array([s.values[row["value"]] for s in mine if s.place == place])
            if "minus" in row:
                values = values - np.array([s.values[row["minus"]] for s in mine if s.place == place])
                if len(values) > 2 and np.ptp(values) > 0:
                    tests[i, place] = float(ttest_1samp(values, 0.0).pvalue)
            digits, mean = row.get("digits", 3), float(values.mean())
            signed = "minus" in row or mean < 0
            spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
            beside = f" ± {number(spread, digits)}" if spread else ""
            shown[i, place] = f"{difference(mean, digits) if signed else number(mean, digits)}{beside}"
    for key, p in zip(tests, holm(list(tests.values())), strict=True):
        shown[key] += f" (p {p_value(p)})"
    seeds = ["seeds", *(str(sum(s.place == place for s in mine)) for place in places)]
    rows = [[row["name"], *(shown[i, place] for place in places)] for i, row in enumerate(view["rows"])]
    return markdown_table(["", *places], [*rows, seeds])


def reached(view: Mapping[str, Any], records: Sequence[Record]) -> str:
    """The figures aimed at: the recipe's over all its seeds, how far it is from the paper's cell and from those beside
    it in the paper's own ablation (their mean), the same with the settings ``inside`` the paper's grid, and the best of
    the readings that were tried under seed 0.

    A target is a row's figure or, with ``against``, its lead over another row under the same settings and seed. Runs of
    fewer rounds than the recipe's are counted and not compared.
    """
    full = int(load_recipes()[view["recipe"]]["set"]["run.rounds"])
    rows = []
    for target in view["targets"]:
        if tried := _readings(target, records):
            show = difference if "against" in target else number
            under_0 = {how: values[0] for how, values in tried.items() if 0 in values}
            first = {how: value for how, value in under_0.items() if rounds_of(how, full) >= full}
            best = max(first, key=lambda how: first[how], default=None)
            shorter = f"; {len(under_0) - len(first)} shorter" if len(under_0) > len(first) else ""
            reading = "–" if best is None else f"{show(first[best])} ({best or 'the recipe'}; of {len(first)}{shorter})"
            ours = tried.get("", {})
            aims = [f"{show(paper := _paper(target))}{_apart(ours, paper)}"]
            near = _beside(target, view["beside"])
            told = " to ".join(dict.fromkeys(show(value) for value in (min(near), max(near)))) if near else "–"
            aims.append(f"{told}{_apart(ours, float(np.mean(near)))}" if near else "–")
            inside = _over_seeds(tried.get(view["inside"], {}), show)
            rows.append([target["name"], _over_seeds(ours, show), *aims, inside, reading])
    head = ["", "ours", "the paper (ours − it)", "its ablation, beside that cell (ours − its mean)"]
    return markdown_table([*head, f"inside its grid: {view['inside']}", "the best reading, seed 0"], rows)


def _apart(ours: Mapping[int, float], aim: float) -> str:
    """How far the mean over seeds is from what was aimed at."""
    return f" ({difference(float(np.mean(list(ours.values()))) - aim)})" if ours else ""


def rounds_of(reading: str, usual: int) -> int:
    """Rounds of a run by what was changed in it, in words."""
    found = re.search(r"\brounds (\d+)", reading)
    return int(found[1]) if found else usual


def _over_seeds(values: Mapping[int, float], show: Callable[[float], str]) -> str:
    """Mean, spread and number of seeds."""
    if not values:
        return "–"
    each = list(values.values())
    spread = f" ± {number(float(np.std(each, ddof=1)))}" if len(each) > 1 else ""
    return f"{show(float(np.mean(each)))}{spread} ×{len(each)}"


def _paper(target: Mapping[str, Any]) -> float:
    """The paper's figure, or its lead."""
    of = [target["row"], *([target["against"]] if "against" in target else [])]
    told = [load_grid(target["grid"]).reported(target["block"], row, target["column"]) for row in of]
    one, *two = (math.nan if value is None else value for value in told)
    return one - sum(two)


def _beside(target: Mapping[str, Any], beside: Mapping[str, Any]) -> list[float]:
    """The same figure, or lead, by the cells of the paper's ablation that are beside the cell aimed at, if any."""
    grid, place = load_grid(beside["grid"]), (target["block"], target["column"])
    if target["grid"] != beside["of"] or target["column"] not in [c.name for c in grid.columns]:
        return []
    base = load_grid(target["grid"]).reported(place[0], target["against"], place[1]) if "against" in target else 0.0
    told = [grid.reported(place[0], row, place[1]) for row in beside["rows"]]
    return [value - base for value in told if value is not None and base is not None]


def _readings(target: Mapping[str, Any], records: Iterable[Record]) -> dict[str, dict[int, float]]:
    """changed settings, in words -> seed -> the figure."""
    place, metric = (target["grid"], target["block"], target["column"]), target["metric"]
    each: dict[str, dict[str, dict[int, float]]] = {target["row"]: {}, target.get("against", ""): {}}
    for r in records:
        if r.place[:3] == place and r.row in each and metric in r.metrics and r.seed is not None:
            each[r.row].setdefault(said(r.overrides), {})[r.seed] = r.metrics[metric]
    mine = each[target["row"]]
    if "against" not in target:
        return mine
    base = each[target["against"]]
    paired = {
        how: {seed: value - base[how][seed] for seed, value in values.items() if seed in base[how]}
        for how, values in mine.items()
        if how in base
    }
    return {how: values for how, values in paired.items() if values}


def compared(view: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Each column of some grids: how many cells and runs there are, rank agreement with the paper, and the lead of one
    row over another under the seeds that both have, beside the paper's."""
    one, two = view["rows"]
    rows, counted = [], [0, 0]
    for part in view["parts"]:
        grid = load_grid(part["grid"])
        found = summaries(grid, records, part["metric"])
        for place in [(b.name, c) for c in part["columns"] for b in grid.blocks]:
            cells = [s for key, s in found.items() if key[:2] == place]
            if not cells:
                continue
            runs = sum(s.seeds for s in cells)
            counted = [counted[0] + len(cells), counted[1] + runs]
            tau, n = agreement(grid, found, place)
            paper = [grid.reported(place[0], row, place[1]) for row in (one, two)]
            ours = [found.get((*place, row)) for row in (one, two)]
            lead = "–"
            if ours[0] and ours[1]:
                (first, second), seeds = side_by_side([ours[0], ours[1]])
                lead = difference(first - second) + (f" ×{seeds}" if seeds else "")
            theirs = difference(paper[0] - paper[1]) if paper[0] is not None and paper[1] is not None else "–"
            rows.append(
                [
                    f"{part['name']}, {place[1]}, {place[0]}",
                    f"{len(cells)} / {runs}",
                    "–" if math.isnan(tau) else f"{difference(tau, 2)} ({n} rows)",
                    lead,
                    theirs,
                ]
            )
    rows.append(["*in all*", f"{counted[0]} / {counted[1]}", "", "", ""])
    return markdown_table(["", "cells / runs", "rank agreement", f"{one} − {two}", "the paper"], rows)
