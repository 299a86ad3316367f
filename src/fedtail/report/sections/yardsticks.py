"""The part of the page about what federating gains each site over being alone, and what not pooling costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedtail.core.metrics import METRICS
from fedtail.plots import Rows, Series
from fedtail.report.blocks import Block, Charts, Fold, Table, Text, Tiles
from fedtail.report.comparison import Comparison
from fedtail.report.facts import number_in
from fedtail.report.pictures import over_seeds, seeds
from fedtail.runs.yardstick import TITLES, AtSite, Yardstick
from fedtail.words import fixed, plural, signed

MOST_ROWS = 30
"""Sites drawn."""
SiteRow = tuple[str, int, float, float, float]
"""(site, samples, alone on the test set, alone and federated on its own rows)."""


def yardstick_cells(
    yardsticks: Sequence[Yardstick], columns: Sequence[str]
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Kind -> (mean, spread) of every column over seeds."""
    out = {}
    for kind in TITLES:
        table = np.array([[number_in(y.test, column) for column in columns] for y in yardsticks if y.kind == kind])
        if table.size:
            mean, spread = over_seeds(table)
            out[kind] = tuple(zip(mean.tolist(), spread.tolist(), strict=True))
    return out


def measured(comparison: Comparison) -> str:
    """Return the contender that the yardsticks were measured against."""
    names = {y.run for y in comparison.yardsticks}
    return next((one.label for one in comparison.contenders if any(r.folder.name in names for r in one.runs)), "")


def gain_of_sites(comparison: Comparison) -> str:
    """Return what each site gains on its own rows over being alone, in a sentence; empty where that is not known."""
    rows = per_site(comparison)
    if not rows:
        return ""
    gains = [row[4] - row[3] for row in rows]
    more = sum(gain > 0 for gain in gains)
    span = f", from {signed(gains[0])} ({rows[0][0]}) to {signed(gains[-1])} ({rows[-1][0]})" if len(rows) > 1 else ""
    return (
        f"On their own held-out rows, {more} of {len(rows)} sites do better with {measured(comparison)} than "
        f"alone: {signed(float(np.mean(gains)))} macro F1 on average{span}."
    )


def verdict_of_federating(comparison: Comparison, metric: str = "macro_f1") -> str:
    """Return the sentences that a comparison with yardsticks opens with, in plain text; empty without any."""
    name, who = METRICS[metric].words, measured(comparison)
    gain, cost = _difference(comparison, "alone", metric), _difference(comparison, "pooled", metric)
    text = gain_of_sites(comparison)
    if math.isfinite(gain):
        verb = "gains" if gain >= 0 else "loses"
        text += f" On the common test set, {who} {verb} {abs(gain):.3f} {name} over a site alone, on average."
    if math.isfinite(cost):
        text += f" Not pooling the data {'costs' if cost <= 0 else 'gains'} {abs(cost):.3f}."
    for kind in ("boosting", "logistic"):
        gap = _difference(comparison, kind, metric)
        if math.isfinite(gap):
            text += f" It {'beats' if gap > 0 else 'stays behind'} {TITLES[kind]} by {abs(gap):.3f}."
    return text.strip()


def yardsticks(comparison: Comparison, metric: str) -> list[Block]:
    """What the report opens with: gain and cost, everything on one scale, and every site alone and together."""
    text = verdict_of_federating(comparison, metric)
    if not text:
        return []
    ladder = seeds(f"All on one scale: {METRICS[metric].words}", _rungs(comparison, metric), METRICS[metric].words)
    return [
        Text(text, "lead"),
        _tiles(comparison, metric),
        Charts([ladder, _gains(comparison)], "packed"),
        _site_table(comparison),
    ]


def _tiles(comparison: Comparison, metric: str) -> Tiles:
    name, who = METRICS[metric].words, measured(comparison)
    gain, cost = _difference(comparison, "alone", metric), _difference(comparison, "pooled", metric)
    rows = per_site(comparison)
    tiles = []
    if rows:
        better = sum(together > alone for _, _, _, alone, together in rows)
        tiles.append((f"{better} of {len(rows)}", f"sites do better with {who}", "on their own held-out rows"))
        mean = float(np.mean([together - alone for _, _, _, alone, together in rows]))
        tiles.append((signed(mean), "macro F1 gained by a site on its own rows", "mean over sites"))
    if math.isfinite(gain):
        tiles.append((signed(gain), f"{name} gained over a site alone", "common test set, mean over sites"))
    if math.isfinite(cost):
        tiles.append((signed(cost), f"{name} against pooled data", "cost of not pooling"))
    return Tiles(tiles)


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
    sites: dict[str, list[AtSite]] = {}
    several = len({y.seed for y in comparison.yardsticks}) > 1
    for y in comparison.yardsticks:
        for site in y.sites:
            if site.own is not None and site.federated is not None:
                drawn = several and site.site.startswith("client ")
                sites.setdefault(f"{site.site}, seed {y.seed}" if drawn else site.site, []).append(site)

    def mean(values: Sequence[float | None]) -> float:
        return float(np.mean([math.nan if v is None else v for v in values]))

    rows = [
        (
            name,
            int(np.mean([s.samples for s in each])),
            mean([s.test for s in each]),
            mean([s.own for s in each]),
            mean([s.federated for s in each]),
        )
        for name, each in sites.items()
    ]
    return sorted(rows, key=lambda row: row[4] - row[3])


def _gains(comparison: Comparison) -> Rows:
    every = per_site(comparison)
    half = MOST_ROWS // 2
    rows = every if len(every) <= MOST_ROWS else [*every[:half], *every[-half:]]
    part = f", showing the {half} smallest and {half} largest of {len(every)}" if len(rows) < len(every) else ""
    return Rows(
        "Each site, alone and federated",
        [row[0] for row in rows],
        [
            Series("alone", 0, np.array([row[3] for row in rows])),
            Series("federated", 1, np.array([row[4] for row in rows])),
        ],
        "macro F1 on the site's own held-out rows",
        "site",
        link=True,
        sides=[signed(row[4] - row[3]) for row in rows],
        side_label="gain",
        caption=f"Smallest gain first{part}. A held-out split with few samples says little, and with few classes it is "
        "easy to do well alone.",
    )


def _site_table(comparison: Comparison) -> Fold:
    rows = [
        [name, f"{samples:,}", fixed(test), fixed(own), fixed(together), signed(together - own)]
        for name, samples, test, own, together in per_site(comparison)
    ]
    head = ["Site", "Training samples", "Alone, common test set", "Alone, own rows", "Federated, own rows", "Gain"]
    return Fold(f"{plural(len(rows), 'site')} in numbers", [Table(head, rows, "Sites alone and federated")])


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
