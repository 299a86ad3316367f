"""The part of the page about resampling rates: trajectories, path variation, what the search did."""

from __future__ import annotations

import math

import numpy as np

from fedtail.report.blocks import Block, Charts, Fold, Text, first_of, say, table_of
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.pictures import curve, moved, movement, rates_of
from fedtail.words import number


def rates(comparison: Comparison, metric: str) -> list[Block]:
    """Rate trajectories, path variation V_T and what the search did."""
    runs = [one.runs[0] for one in comparison.contenders]
    known = [c for c, run in zip(comparison.contenders, runs, strict=True) if run.rate_path().size and run.resamples]
    if not known:
        return []
    searched = any(r.search_rounds() for r in comparison.runs)
    moving = [one for one in known if moved(one)]
    drawn, note = first_of(moving, "chart", "history.jsonl")
    search = [
        curve(comparison, f"search.{key}", key.replace("_", " ").capitalize(), key.replace("_", " "), caption="")
        for key in dict.fromkeys(key for r in comparison.runs for record in r.history[-1:]
                                 for key in record.get("search", {}) if key != "rounds")
    ]  # fmt: skip
    inside = [
        curve(comparison, "reward", "Validation metric of the chosen candidate", "validation", caption=""),
        *(chart for chart in search if any(np.ptp(line.y) > 0 for line in chart.lines)),
    ]
    return [
        Text(say("rates", searched=searched, moving=bool(moving))),
        table_of([_line(one, searched, bool(moving)) for one in known], "Rates", colours=comparison.filtered),
        Charts([rates_of(comparison, one) for one in drawn]),
        note,
        Fold("Inside the search", [Charts(inside, "small")]),
    ]


def _line(contender: Contender, searched: bool, moving: bool) -> dict[str, str]:
    totals = movement(contender) if moving else []
    last = [float(t[-1]) for t in totals] or [math.nan]
    scaled = [float(t[-1]) / math.sqrt(len(t)) for t in totals] or [math.nan]
    final = np.concatenate([r.rate_path()[-1] for r in contender.runs])
    ends = sorted({r.search_rounds() for r in contender.runs})
    return {
        "Method": contender.label,
        "Search rounds": " to ".join(str(end) for end in dict.fromkeys((ends[0], ends[-1]))) if searched else "",
        "V_T": number(float(np.mean(last))),
        "V_T / √T": number(float(np.mean(scaled))),
        "Lowest rate": f"{final.min():.3f}",
        "Mean": f"{final.mean():.3f}",
        "Highest rate": f"{final.max():.3f}",
    }
