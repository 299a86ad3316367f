"""The part of the page about what federating gains each site over being alone, and what not pooling costs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedtail.core.metrics import METRICS
from fedtail.plots import Rows, Series
from fedtail.report.blocks import Block, Charts, Text, say
from fedtail.report.comparison import Comparison, finite
from fedtail.report.facts import number_in
from fedtail.report.pictures import seeds
from fedtail.runs.record import TITLES
from fedtail.words import signed

SiteRow = tuple[str, float, float]
"""(site, alone and federated on its own rows)."""


def measured(comparison: Comparison) -> str:
    """Return the contender that the yardsticks were measured against."""
    names = {y.run for y in comparison.yardsticks}
    return next((one.label for one, run in comparison.each if run.folder.name in names), "")


def verdict_of_federating(comparison: Comparison, metric: str = "macro_f1", *, pooled: bool = True) -> str:
    """Return the sentences that a comparison with yardsticks opens with, in plain text; empty without any.

    They begin with what each site gains on its own rows; ``pooled``: and go on with the common test set.
    """
    rows = [(name, alone, together - alone) for name, alone, together in per_site(comparison)]
    gaps = _gaps(comparison, metric) if pooled else {}
    who, words = measured(comparison), METRICS[metric].words
    several = comparison.several
    return say("federating", who=who, several=several, rows=rows, words=words, gaps=gaps, titles=TITLES)


def yardsticks(comparison: Comparison, metric: str) -> list[Block]:
    """What the report opens with: gain and cost, everything on one scale, and every site alone and together."""
    text = verdict_of_federating(comparison, metric)
    if not text:
        return []
    ladder = seeds(f"All on one scale: {METRICS[metric].words}", _rungs(comparison, metric), METRICS[metric].words)
    return [Text(text, "lead"), Charts([ladder, _gains(comparison)], "packed")]


def _rungs(comparison: Comparison, metric: str) -> list[tuple[str, int, dict[str, float]]]:
    """(name, colour, {seed: value}) of the floor, the yardsticks and the contender that was measured, lowest first."""
    measures, seeds = comparison.yardsticks, _seeds(comparison)
    rows = [("majority class", 0, {"floor": number_in(comparison.floor, metric)})]
    for kind, title in TITLES.items():
        rows.append((title, 0, {seeds[y.run]: number_in(y.test, metric) for y in measures if y.kind == kind}))
    federated = {name: run.metric(metric) for run in comparison.runs if (name := seeds.get(run.folder.name))}
    rows.append((f"federated: {measured(comparison)}", 1, federated))
    known = [(title, c, values) for title, c, row in rows if (values := finite(row))]
    return sorted(known, key=lambda row: float(np.mean(list(row[2].values()))))


def _seeds(comparison: Comparison) -> dict[str, str]:
    """Return by the folder of each measured run what its dot is called."""
    runs = {run.folder.name: comparison.seed(run) for run in comparison.runs}
    return {y.run: f"seed {runs.get(y.run, y.seed)}" for y in comparison.yardsticks}


def per_site(comparison: Comparison) -> list[SiteRow]:
    """Return a row per site, over seeds; least gain first. Sites that are drawn anew under each seed are as many."""
    seeds = _seeds(comparison)
    several = len(set(seeds.values())) > 1
    sites: dict[str, list[tuple[float, float]]] = {}
    for y in comparison.yardsticks:
        for site in y.sites:
            if site.own is not None and site.federated is not None:
                drawn = several and site.site.startswith("client ")
                name = f"{site.site}, {seeds[y.run]}" if drawn else site.site
                sites.setdefault(name, []).append((site.own, site.federated))
    rows = [(name, *np.mean(values, axis=0).tolist()) for name, values in sites.items()]
    return sorted(rows, key=lambda row: row[2] - row[1])


def _gains(comparison: Comparison) -> Rows:
    rows = per_site(comparison)
    names, alone, federated = zip(*rows, strict=True) if rows else ((), (), ())
    return Rows(
        "Each site, alone and federated",
        names,
        [Series("alone", 0, np.array(alone)), Series("federated", 1, np.array(federated))],
        "macro F1 on the site's own held-out rows",
        "site",
        link=True,
        sides=[signed(row[2] - row[1]) for row in rows],
        side_label="gain",
        caption="Smallest gain first. A held-out split with few samples says little, and with few classes it is "
        "easy to do well alone.",
    )


def _gaps(comparison: Comparison, metric: str) -> dict[str, float]:
    """Return by kind of yardstick the mean over runs of federated minus yardstick, where there is one."""
    reached = {run.folder.name: run.metric(metric) for run in comparison.runs}
    gaps = [(y.kind, reached[y.run] - number_in(y.test, metric)) for y in comparison.yardsticks]
    return {str(k): float(v) for k, v in pd.DataFrame(gaps).dropna().groupby(0)[1].mean().items()} if gaps else {}
