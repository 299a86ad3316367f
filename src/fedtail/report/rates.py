"""The part of the page about resampling rates: trajectories, path variation, what the search did."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fedtail.core.metrics import path_variation
from fedtail.report.chart import charts, html_table, number, scroll
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.lines import Line, line_chart
from fedtail.report.series import contender_line, mean_spread, palette
from fedtail.runs.record import RunRecord

MOST_PANELS = 8


def rates(comparison: Comparison) -> str:
    """Rate trajectories, path variation V_T and what the search did."""
    colours = palette(comparison)
    rows, panels = [], []
    variation: list[Line] = []
    scaled: list[Line] = []
    for contender in comparison.contenders:
        paths = [(r, r.rate_path()) for r in contender.runs]
        if not paths[0][1].size:
            continue
        totals = [path_variation(p, r.weights) for r, p in paths if p.shape[1] == r.weights.size]
        moves = any(float(t[-1]) > 1e-12 for t in totals)
        rows.append(_rate_row(contender, paths, totals))
        if moves:
            panels.append(_trajectory(contender, *paths[0]))
            length = min(len(t) for t in totals)
            mean, spread = mean_spread(np.array([t[:length] for t in totals]))
            spread, t = np.nan_to_num(spread), np.arange(1, length + 1)
            line = Line(name=contender.label, colour=colours[contender.label], x=t, y=mean, spread=spread)
            variation.append(line)
            scaled.append(replace(line, y=mean / np.sqrt(t), spread=spread / np.sqrt(t)))
    if not rows:
        return ""
    head = ["Method", "Search rounds", "V_T", "V_T / √T", "Final rates (first seed)"]
    text = (
        "<p>V<sub>T</sub> adds up how far the clients' resampling rates move, weighted by their share of the data; "
        "the convergence bound asks that it grows no faster than √T.</p>"
    )
    if not panels:
        text = "<p>The resampling rates were fixed, so they did not move.</p>"
    panels = panels[:MOST_PANELS]
    if variation:
        panels.append(line_chart("Path variation of the rates", variation, y_label="V_t", floor=0.0))
        panels.append(line_chart("Path variation over √t", scaled, y_label="V_t / √t", floor=0.0))
    return text + scroll(html_table(head, rows), "Rates") + charts([*panels, *_search(comparison, colours)])


def _rate_row(contender: Contender, paths: list[tuple[RunRecord, np.ndarray]], totals: list[np.ndarray]) -> list[str]:
    last = [float(t[-1]) for t in totals] or [math.nan]
    scaled = [float(t[-1]) / math.sqrt(len(t)) for t in totals] or [math.nan]
    final = paths[0][1][-1]
    if np.ptp(final) < 1e-12:
        shown = f"{final[0]:.3f} at all {final.size} clients"
    else:
        shown = ", ".join(f"{v:.3f}" for v in final[:12]) + (" …" if final.size > 12 else "")
    searched = sorted({r.search_rounds() for r, _ in paths})
    rounds = str(searched[0]) if len(searched) == 1 else f"{searched[0]} to {searched[-1]}"
    return [contender.label, rounds, number(float(np.mean(last))), number(float(np.mean(scaled))), shown]


def _trajectory(contender: Contender, run: RunRecord, path: np.ndarray) -> str:
    n_clients = path.shape[1]
    sites = [str(s) for s in run.clients.get("sites") or range(n_clients)]
    x = np.arange(1, len(path) + 1)
    shown = range(n_clients) if n_clients <= 8 else np.linspace(0, n_clients - 1, 8).round().astype(int)
    lines = [Line(sites[k], i, x, path[:, k]) for i, k in enumerate(shown)]
    end = run.search_rounds()
    some = f", {len(lines)} of {n_clients} clients" if n_clients > 8 else ""
    return line_chart(
        f"Rates of {contender.label}",
        lines,
        y_label="resampling rate",
        steps=True,
        mark=float(end) if 0 < end < len(path) else None,
        mark_label="search ends",
        caption=f"Seed {run.seed}{some}.",
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
    panels = [line_chart("Search: validation metric of the chosen candidate", rewards, y_label="pooled validation")]
    for key in list(names)[:MOST_PANELS]:
        lines = [contender_line(one, f"search.{key}", colours[one.label]) for one in comparison.contenders]
        lines = [li for li in lines if li.y.size]
        if lines and any(np.ptp(li.y[np.isfinite(li.y)]) > 0 for li in lines if np.isfinite(li.y).any()):
            panels.append(line_chart(f"Search: {key.replace('_', ' ')}", lines, y_label=key.replace("_", " ")))
    return panels
