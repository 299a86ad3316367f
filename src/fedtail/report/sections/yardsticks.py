"""The part of the page about what federating gains each site over being alone, and what not pooling costs."""

from __future__ import annotations

import math

import numpy as np

from fedtail.core.metrics import METRICS
from fedtail.plots import Rows, Series
from fedtail.report.blocks import Block, Charts, Text, say
from fedtail.report.comparison import Comparison
from fedtail.report.facts import number_in
from fedtail.report.pictures import seeds
from fedtail.runs.record import TITLES
from fedtail.words import signed

MOST_ROWS = 30
"""Sites drawn."""
SiteRow = tuple[str, float, float]
"""(site, alone and federated on its own rows)."""


def measured(comparison: Comparison) -> str:
    """Return the contender that the yardsticks were measured against."""
    names = {y.run for y in comparison.yardsticks}
    return next((one.label for one in comparison.contenders if any(r.folder.name in names for r in one.runs)), "")


def verdict_of_federating(comparison: Comparison, metric: str = "macro_f1", *, pooled: bool = True) -> str:
    """Return the sentences that a comparison with yardsticks opens with, in plain text; empty without any.

    They begin with what each site gains on its own rows; ``pooled``: and go on with the common test set.
    """
    rows = [(name, alone, together - alone) for name, alone, together in per_site(comparison)]
    gaps = {kind: gap for kind in TITLES if math.isfinite(gap := _difference(comparison, kind, metric))}
    who, words = measured(comparison), METRICS[metric].words
    return say("federating", who=who, rows=rows, words=words, gaps=gaps if pooled else {}, titles=TITLES)


def yardsticks(comparison: Comparison, metric: str) -> list[Block]:
    """What the report opens with: gain and cost, everything on one scale, and every site alone and together."""
    text = verdict_of_federating(comparison, metric)
    if not text:
        return []
    ladder = seeds(f"All on one scale: {METRICS[metric].words}", _rungs(comparison, metric), METRICS[metric].words)
    return [
        Text(text, "lead"),
        Charts([ladder, _gains(comparison)], "packed"),
    ]


def _rungs(comparison: Comparison, metric: str) -> list[tuple[str, int, dict[str, float]]]:
    """(name, colour, {seed: value}) of the floor, the yardsticks and the contender that was measured, lowest first."""
    runs = {run.folder.name: run for run in comparison.runs}
    rows: list[tuple[str, int, dict[str, float]]] = []
    floor = next((v for r in comparison.runs if (v := (r.result.get("floor") or {}).get(metric)) is not None), None)
    if floor is not None:
        rows.append(("majority class", 0, {"floor": float(floor)}))
    for kind, title in TITLES.items():
        values = {f"seed {y.seed}": number_in(y.test, metric) for y in comparison.yardsticks if y.kind == kind}
        rows.append((title, 0, {k: v for k, v in values.items() if math.isfinite(v)}))
    names = sorted({y.run for y in comparison.yardsticks} & set(runs))
    federated = {f"seed {runs[n].seed}": runs[n].metric(metric) for n in names}
    kept = {k: v for k, v in federated.items() if math.isfinite(v)}
    rows.append((f"federated: {measured(comparison)}", 1, kept))
    return sorted((row for row in rows if row[2]), key=lambda row: float(np.mean(list(row[2].values()))))


def per_site(comparison: Comparison) -> list[SiteRow]:
    """Return a row per site, over seeds; least gain first. Sites that are drawn anew under each seed are as many."""
    several = len({y.seed for y in comparison.yardsticks}) > 1
    sites: dict[str, list[tuple[float, float]]] = {}
    for y in comparison.yardsticks:
        for site in y.sites:
            if site.own is not None and site.federated is not None:
                drawn = several and site.site.startswith("client ")
                name = f"{site.site}, seed {y.seed}" if drawn else site.site
                sites.setdefault(name, []).append((site.own, site.federated))
    rows = [(name, *np.mean(values, axis=0).tolist()) for name, values in sites.items()]
    return sorted(rows, key=lambda row: row[2] - row[1])


def _gains(comparison: Comparison) -> Rows:
    every = per_site(comparison)
    half = MOST_ROWS // 2
    rows = every if len(every) <= MOST_ROWS else [*every[:half], *every[-half:]]
    part = f", showing the {half} smallest and {half} largest of {len(every)}" if len(rows) < len(every) else ""
    return Rows(
        "Each site, alone and federated",
        [row[0] for row in rows],
        [
            Series("alone", 0, np.array([row[1] for row in rows])),
            Series("federated", 1, np.array([row[2] for row in rows])),
        ],
        "macro F1 on the site's own held-out rows",
        "site",
        link=True,
        sides=[signed(row[2] - row[1]) for row in rows],
        side_label="gain",
        caption=f"Smallest gain first{part}. A held-out split with few samples says little, and with few classes it is "
        "easy to do well alone.",
    )


def _difference(comparison: Comparison, kind: str, metric: str) -> float:
    """Return the mean over runs of federated minus yardstick; NaN where there is none."""
    runs = {run.folder.name: run for run in comparison.runs}
    gaps = [
        runs[y.run].metric(metric) - number_in(y.test, metric)
        for y in comparison.yardsticks
        if y.kind == kind and y.run in runs
    ]
    gaps = [gap for gap in gaps if math.isfinite(gap)]
    return float(np.mean(gaps)) if gaps else math.nan
