"""The part of the page about resampling rates: trajectories, path variation, what the search did."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fedtail.core.movement import path_variation
from fedtail.report.chart import charts, fold, html_table, number, scroll
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.heatmap import heatmap
from fedtail.report.lines import Line, line_chart
from fedtail.report.series import contender_line, mean_spread, palette
from fedtail.runs.record import RunRecord

MOST_PANELS = 8
FEW = 8
"""Clients up to which each has a line of its own."""
MOST_ROWS, MOST_ROUNDS = 100, 60


def rates(comparison: Comparison) -> str:
    """Rate trajectories, path variation V_T and what the search did."""
    colours = palette(comparison)
    rows, runs, panels = [], [], []
    variation: list[Line] = []
    scaled: list[Line] = []
    for contender in comparison.contenders:
        paths = [(r, r.rate_path()) for r in contender.runs]
        if not paths[0][1].size:
            continue
        totals = [path_variation(p, r.weights) for r, p in paths if p.shape[1] == r.weights.size]
        moves = any(float(t[-1]) > 1e-12 for t in totals)
        rows.append(_rate_row(contender, paths, totals))
        runs.append(colours[contender.label])
        if moves:
            panels.append(_trajectory(contender, *paths[0], colours[contender.label] if len(colours) > 1 else None))
            length = min(len(t) for t in totals)
            mean, spread = mean_spread(np.array([t[:length] for t in totals]))
            spread, t = np.nan_to_num(spread), np.arange(1, length + 1)
            line = Line(name=contender.label, colour=colours[contender.label], x=t, y=mean, spread=spread)
            variation.append(line)
            scaled.append(replace(line, y=mean / np.sqrt(t), spread=spread / np.sqrt(t)))
    if not rows:
        return ""
    head = ["Method", "Search rounds", "V_T", "V_T / √T", "Lowest rate", "Mean", "Highest rate"]
    text = (
        "<p>V<sub>T</sub> is the total movement of the clients' resampling rates, weighted by their share of the data; "
        "the convergence bound requires that it grow no faster than √T.</p>"
    )
    if not panels:
        text = "<p>The resampling rates were fixed.</p>"
    inside = [
        line_chart("Path variation of the rates", variation, y_label="V_t", floor=0.0, runs=True),
        line_chart("Path variation over √t", scaled, y_label="V_t / √t", floor=0.0, runs=True),
        *_search(comparison, colours),
    ]
    inside = [chart for chart in inside if chart]
    table = scroll(html_table(head, rows, runs=runs), "Rates")
    more = fold(f"Inside the search, in {len(inside)} chart{'s' if len(inside) != 1 else ''}", charts(inside, "small"))
    return text + table + charts(panels[:MOST_PANELS]) + more


def _rate_row(contender: Contender, paths: list[tuple[RunRecord, np.ndarray]], totals: list[np.ndarray]) -> list[str]:
    last = [float(t[-1]) for t in totals] or [math.nan]
    scaled = [float(t[-1]) / math.sqrt(len(t)) for t in totals] or [math.nan]
    final = np.concatenate([path[-1] for _, path in paths])
    searched = sorted({r.search_rounds() for r, _ in paths})
    rounds = str(searched[0]) if len(searched) == 1 else f"{searched[0]} to {searched[-1]}"
    moved = (number(float(np.mean(v))) for v in (last, scaled))
    return [contender.label, rounds, *moved, *(f"{f(final):.3f}" for f in (np.min, np.mean, np.max))]


def _trajectory(contender: Contender, run: RunRecord, path: np.ndarray, c: int | None) -> str:
    """Steps of a few clients; of many a map, a row per client with the rate that it ends at."""
    n_clients, end = path.shape[1], run.search_rounds()
    sites = [str(s) for s in run.clients.get("sites") or range(n_clients)]
    title, seed = f"Rates of {contender.label}", f"Seed {run.seed}"
    if n_clients <= FEW:
        return line_chart(
            title,
            [Line(sites[k], k, np.arange(1, len(path) + 1), path[:, k]) for k in range(n_clients)],
            y_label="resampling rate",
            steps=True,
            mark=float(end) if 0 < end < len(path) else None,
            mark_label="search ends",
            caption=f"{seed}.",
            run=c,
        )
    rows = np.argsort(-path[-1], kind="stable")
    rows = rows[np.unique(np.linspace(0, n_clients - 1, min(n_clients, MOST_ROWS)).round().astype(int))]
    rounds = np.unique(np.linspace(0, len(path) - 1, min(len(path), MOST_ROUNDS)).round().astype(int))
    shown = path[np.ix_(rounds, rows)].T
    low, high = float(path.min()), float(path.max())
    part = f" {len(rows)} of {n_clients:,} clients, from highest to lowest rate." if len(rows) < n_clients else ""
    over = f" The search ended after round {end}." if 0 < end < len(path) else ""
    return heatmap(
        title,
        shown.round(3),
        [sites[k] for k in rows],
        [str(t + 1) for t in rounds],
        row_label="client",
        column_label="round",
        shade=0.05 + 0.95 * (shown - low) / max(high - low, 1e-12),
        caption=f"{seed}. Colours range from {low:.3f} to {high:.3f}; each row ends with its last rate.{over}{part}",
        numbers=False,
        every=math.ceil((len(rounds) + 1) / 10),
        sides=[f"{path[-1, k]:.3f}" for k in rows],
        run=c,
    )


def _search(comparison: Comparison, colours: dict[str, int]) -> list[str]:
    """A chart per number that the search reports, where it changes."""
    names: dict[str, None] = {}
    for run in comparison.runs:
        for record in run.history[-1:]:
            for key, value in record.get("search", {}).items():
                if isinstance(value, int | float) and not isinstance(value, bool) and key != "rounds":
                    names[key] = None
    rewards = [
        contender_line(one, "reward", colours[one.label]) for one in comparison.contenders if one.band("reward")[0].size
    ]
    panels = [line_chart("Validation metric of the chosen candidate", rewards, y_label="validation", runs=True)]
    for key in list(names)[:MOST_PANELS]:
        lines = [contender_line(one, f"search.{key}", colours[one.label]) for one in comparison.contenders]
        lines = [li for li in lines if li.y.size]
        if lines and any(np.ptp(li.y[np.isfinite(li.y)]) > 0 for li in lines if np.isfinite(li.y).any()):
            panels.append(
                line_chart(key.replace("_", " ").capitalize(), lines, y_label=key.replace("_", " "), runs=True)
            )
    return panels
