"""What federating gains each site over being alone, and what not pooling costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedtail.core.metrics import METRICS
from fedtail.report.chart import html_table, scroll
from fedtail.report.comparison import Comparison
from fedtail.runs.yardstick import TITLES, Yardstick


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
        verb = "gains a site" if gain >= 0 else "costs a site"
        text = f"Federating {verb} {abs(gain):.3f} {name} over being alone, on the common test set"
        if sites:
            text += f"; on their own held-out data {better} of {len(sites)} sites do better than alone"
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


def yardsticks(comparison: Comparison) -> str:
    """A row per site: alone and federated."""
    rows = [
        [site.site, str(y.seed), f"{site.samples:,}", *(_shown(v) for v in (site.test, site.own, site.federated))]
        for y in comparison.yardsticks
        for site in y.sites
    ]
    if not rows:
        return ""
    text = (
        "<p>Macro F1 of each site that trains by itself, with the same model and method, on the common test set and on "
        "its own held-out validation split, beside the federated model on that split. A split of few samples says "
        "little.</p>"
    )
    head = ["Site", "Seed", "Samples", "Alone, test", "Alone, own split", "Federated, own split"]
    return text + scroll(html_table(head, rows), "Sites alone")


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


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
