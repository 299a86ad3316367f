"""What federating gains each site over being alone, and what not pooling costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedtail.core.metrics import METRICS
from fedtail.report.bars import dot_plot
from fedtail.report.chart import charts, esc, fold, html_table, scroll, tiles
from fedtail.report.comparison import Comparison
from fedtail.report.rows import row_chart
from fedtail.runs.yardstick import TITLES, AtSite, Yardstick

MOST_ROWS = 30
"""Sites drawn."""


def yardstick_cells(found: Sequence[Yardstick], columns: Sequence[str]) -> dict[str, tuple[tuple[float, float], ...]]:
    """Kind -> (mean, spread) of every column over seeds."""
    out = {}
    for kind in TITLES:
        mine = [y for y in found if y.kind == kind]
        if mine:
            out[kind] = tuple(_mean_spread([_value(y, column) for y in mine]) for column in columns)
    return out


def verdict_of_federating(comparison: Comparison, metric: str = "macro_f1") -> str:
    """The sentences that the report opens with, in plain text; empty without yardsticks."""
    name = METRICS[metric].words
    gain, cost = _difference(comparison, "alone", metric), _difference(comparison, "pooled", metric)
    text = ""
    if math.isfinite(gain):
        sites = [site for y in comparison.yardsticks for site in y.sites if None not in (site.own, site.federated)]
        better = sum((site.federated or 0.0) > (site.own or 0.0) for site in sites)
        verb = "gains each site" if gain >= 0 else "costs each site"
        text = (
            f"Federating {verb} {abs(gain):.3f} {name} on average compared with training alone, on the common test set"
        )
        if sites:
            text += f"; on their own held-out data, {better} of {len(sites)} sites do better than alone"
        text += ". "
    if math.isfinite(cost):
        text += f"Not pooling the data {'costs' if cost <= 0 else 'gains'} {abs(cost):.3f}. "
    others = {
        kind: _difference(comparison, kind, metric)
        for kind in ("boosting", "logistic")
        if any(y.kind == kind for y in comparison.yardsticks)
    }
    if others:
        said = ", ".join(f"{TITLES[kind]} by {value:+.3f}" for kind, value in others.items() if math.isfinite(value))
        text += f"It differs from {said}. " if said else ""
    return text.strip()


def yardsticks(comparison: Comparison, metric: str = "macro_f1") -> str:
    """What the report opens with: gain and cost, everything on one scale, and every site alone and together."""
    said = verdict_of_federating(comparison, metric)
    if not said:
        return ""
    ladder = dot_plot(
        f"All on one scale: {METRICS[metric].words}",
        _rungs(comparison, metric),
        x_label=METRICS[metric].words,
        caption="One dot per seed; the bar and the number show the mean.",
    )
    return (
        f"{_tiles(comparison, metric)}<p class='lead'>{esc(said)}</p>{charts([ladder, _gains(comparison)], 'packed')}"
        + (_site_table(comparison))
    )


def _tiles(comparison: Comparison, metric: str) -> str:
    name = METRICS[metric].words
    gain, cost = _difference(comparison, "alone", metric), _difference(comparison, "pooled", metric)
    rows = _per_site(comparison)
    better = sum(together > alone for _, _, _, alone, together in rows)
    found = []
    if math.isfinite(gain):
        found.append((f"{gain:+.3f}", f"{name} gained over training alone", "mean over sites, common test set"))
    if rows:
        found.append((f"{better} of {len(rows)}", "sites do better federated", "on their own held-out data"))
    if math.isfinite(cost):
        found.append((f"{cost:+.3f}", f"{name} against pooled data", "cost of not pooling"))
    return tiles(found)


def _rungs(comparison: Comparison, metric: str) -> list[tuple[str, int, dict[str, float]]]:
    """(name, colour, {seed: value}) of the floor, the yardsticks and the contender that was measured, lowest first."""
    runs = {run.folder.name: run for run in comparison.runs}
    rows: list[tuple[str, int, dict[str, float]]] = []
    floor = next((v for r in comparison.runs if (v := (r.result.get("floor") or {}).get(metric)) is not None), None)
    if floor is not None:
        rows.append(("majority class", 0, {"floor": float(floor)}))
    for kind, title in TITLES.items():
        values = {f"seed {y.seed}": _value(y, metric) for y in comparison.yardsticks if y.kind == kind}
        rows.append((title, 0, {k: v for k, v in values.items() if math.isfinite(v)}))
    measured = {y.run for y in comparison.yardsticks}
    federated = {f"seed {runs[n].seed}": runs[n].metric(metric) for n in sorted(measured) if n in runs}
    label = next((one.label for one in comparison.contenders if any(r.folder.name in measured for r in one.runs)), "")
    rows.append((f"federated: {label}", 1, {k: v for k, v in federated.items() if math.isfinite(v)}))
    return sorted((row for row in rows if row[2]), key=lambda row: float(np.mean(list(row[2].values()))))


def _per_site(comparison: Comparison) -> list[tuple[str, int, float, float, float]]:
    """(site, samples, alone on the test set, alone and federated on its own split), over seeds; least gain first."""
    found: dict[str, list[AtSite]] = {}
    seeds = len({y.seed for y in comparison.yardsticks}) > 1
    for y in comparison.yardsticks:
        for site in y.sites:
            if site.own is not None and site.federated is not None:
                drawn = seeds and site.site.startswith("client ")  # whose data are others under another seed
                found.setdefault(f"{site.site}, seed {y.seed}" if drawn else site.site, []).append(site)
    rows = [
        (
            name,
            int(np.mean([s.samples for s in each])),
            float(np.mean([math.nan if s.test is None else s.test for s in each])),
            float(np.mean([s.own or 0.0 for s in each])),
            float(np.mean([s.federated or 0.0 for s in each])),
        )
        for name, each in found.items()
    ]
    return sorted(rows, key=lambda row: row[4] - row[3])


def _gains(comparison: Comparison) -> str:
    every = _per_site(comparison)
    rows = every if len(every) <= MOST_ROWS else [*every[: MOST_ROWS // 2], *every[-MOST_ROWS // 2 :]]
    nothing = np.full(len(rows), math.nan)
    return row_chart(
        "Each site, alone and federated",
        [row[0] for row in rows],
        [
            ("alone", 0, np.array([row[3] for row in rows]), nothing),
            ("federated", 1, np.array([row[4] for row in rows]), nothing),
        ],
        x_label="macro F1 on the site's own held-out data",
        heading="site",
        link=True,
        sides=[f"{row[4] - row[3]:+.3f}" for row in rows],
        side_label="gain",
        caption="Smallest gain first"
        + (
            f", showing the {MOST_ROWS // 2} smallest and {MOST_ROWS // 2} largest of {len(every)}"
            if len(rows) < len(every)
            else ""
        )
        + ". A held-out split with few samples says little, and with few classes it is easy to do well alone.",
    )


def _site_table(comparison: Comparison) -> str:
    """A row per site: alone and federated."""
    rows = [
        [name, f"{samples:,}", *(_shown(v) for v in (test, own, together)), f"{together - own:+.3f}"]
        for name, samples, test, own, together in _per_site(comparison)
    ]
    head = ["Site", "Training samples", "Alone, common test set", "Alone, own split", "Federated, own split", "Gain"]
    return fold(f"{len(rows)} sites in numbers", scroll(html_table(head, rows), "Sites alone")) if rows else ""


def _difference(comparison: Comparison, kind: str, metric: str) -> float:
    """Mean over runs of federated minus yardstick; NaN where there is none."""
    runs = {run.folder.name: run for run in comparison.runs}
    gaps = [
        runs[y.run].metric(metric) - _value(y, metric)
        for y in comparison.yardsticks
        if y.kind == kind and y.run in runs
    ]
    gaps = [gap for gap in gaps if math.isfinite(gap)]
    return float(np.mean(gaps)) if gaps else math.nan


def _value(yardstick: Yardstick, metric: str) -> float:
    value = yardstick.test.get(metric)
    return float(value) if isinstance(value, int | float) else math.nan


def _mean_spread(values: list[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _shown(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"
