"""The part of the page about resampling rates: trajectories, path variation, what the search did."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from markupsafe import Markup

from fedtail.plots import Line, Lines
from fedtail.report.blocks import Block, Charts, Fold, Table, Text
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.pictures import curve, line_of, moved, movement, over_seeds, palette, rates_of
from fedtail.words import number, plural

MOST_PANELS = 8


def rates(comparison: Comparison, metric: str) -> list[Block]:
    """Rate trajectories, path variation V_T and what the search did."""
    colours, rows, runs, panels = palette(comparison), [], [], []
    variation: list[Line] = []
    searched = any(r.search_rounds() for r in comparison.runs)
    moving = any(moved(one) for one in comparison.contenders)
    for contender in comparison.contenders:
        paths = movement(contender)
        if not contender.runs[0].rate_path().size or contender.runs[0].result.get("importance"):  # trees have no rates
            continue
        rows.append(_row(contender, [t for _, _, t in paths], searched, moving))
        runs.append(colours[contender.label])
        if moved(contender):
            panels.append(rates_of(comparison, contender))
            length = min(len(t) for _, _, t in paths)
            mean, spread = over_seeds(np.array([t[:length] for _, _, t in paths]))
            line = Line(
                contender.label, colours[contender.label], np.arange(1, length + 1), mean, np.nan_to_num(spread)
            )
            variation.append(line)
    if not rows:
        return []
    head = ["Method", *(["Search rounds"] if searched else []), *(["V_T", "V_T / √T"] if moving else [])]
    head += ["Lowest rate", "Mean", "Highest rate"]
    text: str = (
        "The resampling rates were fixed." if not searched else "The search left the resampling rates as they were."
    )
    if moving:
        text = Markup(
            "V<sub>T</sub> is the total movement of the clients' resampling rates, weighted by their share of the "
            "data; the convergence bound requires that it grow no faster than √T."
        )
    scaled = [replace(li, y=li.y / np.sqrt(li.x), spread=li.spread / np.sqrt(li.x)) for li in variation]
    inside = [
        Lines("Path variation of the rates", variation, "V_t", floor=0.0, runs=True),
        Lines("Path variation over √t", scaled, "V_t / √t", floor=0.0, runs=True),
        *_search(comparison, colours),
    ]
    inside = [chart for chart in inside if chart]
    return [
        Text(text),
        Table(head, rows, "Rates", runs=runs),
        Charts(panels[:MOST_PANELS]),
        Fold(f"Inside the search, in {plural(len(inside), 'chart')}", [Charts(inside, "small")]),
    ]


def _row(contender: Contender, totals: list[np.ndarray], searched: bool, moving: bool) -> list[str]:
    last = [float(t[-1]) for t in totals] or [math.nan]
    scaled = [float(t[-1]) / math.sqrt(len(t)) for t in totals] or [math.nan]
    final = np.concatenate([r.rate_path()[-1] for r in contender.runs])
    ends = sorted({r.search_rounds() for r in contender.runs})
    rounds = str(ends[0]) if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"
    row = [contender.label, *([rounds] if searched else [])]
    row += [number(float(np.mean(v))) for v in (last, scaled)] if moving else []
    return [*row, *(f"{f(final):.3f}" for f in (np.min, np.mean, np.max))]


def _search(comparison: Comparison, colours: dict[str, int]) -> list[Lines]:
    """A chart per number that the search reports, where it changes."""
    names: dict[str, None] = {}
    for run in comparison.runs:
        for record in run.history[-1:]:
            for key, value in record.get("search", {}).items():
                if isinstance(value, int | float) and not isinstance(value, bool) and key != "rounds":
                    names[key] = None
    title = "Validation metric of the chosen candidate"
    panels = [curve(comparison, "reward", title, "validation", caption="")]
    for key in list(names)[:MOST_PANELS]:
        lines = [line_of(one, f"search.{key}", colours[one.label]) for one in comparison.contenders]
        lines = [li for li in lines if li.y.size]
        if any(np.ptp(li.y[np.isfinite(li.y)]) > 0 for li in lines if np.isfinite(li.y).any()):
            panels.append(Lines(key.replace("_", " ").capitalize(), lines, key.replace("_", " "), runs=True))
    return panels
