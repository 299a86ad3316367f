"""What is drawn of runs: one function per picture, which report, figures of papers and ``Result.plot`` share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedtail.core.metrics import METRICS
from fedtail.core.movement import path_variation
from fedtail.plots import Heat, Line, Lines, Rows, Series
from fedtail.report.comparison import Comparison, Contender
from fedtail.runs.record import RunRecord
from fedtail.words import number

FEW = 8
"""Clients up to which each has a line of its own."""
MOST_ROWS, MOST_ROUNDS, MOST_CLIENTS = 100, 60, 200
SEEDS = "Mean over seeds; the band is ± one standard deviation."


def palette(comparison: Comparison) -> dict[str, int]:
    """Label -> colour: the baseline takes the neutral colour 0, the rest follow in order."""
    others = [one.label for i, one in enumerate(comparison.contenders) if i != comparison.baseline]
    if len(comparison.contenders) == 1:
        return {comparison.contenders[0].label: 1}
    return {comparison.reference.label: 0} | {label: i for i, label in enumerate(others, start=1)}


def own_colour(comparison: Comparison, contender: Contender) -> int | None:
    """Return the colour by which the page's filter hides what is all about one contender; None where it is alone."""
    return palette(comparison)[contender.label] if len(comparison.contenders) > 1 else None


def class_order(run: RunRecord) -> np.ndarray:
    """Return the classes, those with the fewest training samples first; as they are where that is not known."""
    counts = run.train_counts
    places = np.arange(len(run.classes))
    return places if counts is None else np.lexsort((-places, counts))


def over_seeds(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return column means and standard deviations of (seeds, n); NaN where undefined."""
    seen = np.isfinite(table)
    n = seen.sum(axis=0)
    mean = np.where(n > 0, np.where(seen, table, 0.0).sum(axis=0) / np.maximum(n, 1), np.nan)
    square = np.where(seen, (table - mean) ** 2, 0.0).sum(axis=0) / np.maximum(n - 1, 1)
    return mean, np.where(n > 1, np.sqrt(square), np.nan)


def per_class(contender: Contender, name: str, n_classes: int) -> np.ndarray:
    """Return (seeds, C) of one number per class."""
    return np.array([v for r in contender.runs if (v := r.per_class(name)).size == n_classes])


def line_of(contender: Contender, name: str, c: int) -> Line:
    """Return a curve of a contender, with the spread over its seeds."""
    t, mean, spread = contender.band(name)
    return Line(contender.label, c, t + 1, mean, spread)


def curve(comparison: Comparison, name: str, title: str, label: str, **more: Any) -> Lines:
    """Draw something over the rounds: a metric, the loss, the alignment of updates."""
    colours = palette(comparison)
    lines = [line_of(one, name, colours[one.label]) for one in comparison.contenders]
    more = {"caption": SEEDS if max(len(one.runs) for one in comparison.contenders) > 1 else "", **more}
    return Lines(title, lines, label, runs=True, **more)


def progress(comparison: Comparison, metric: str) -> Lines:
    """Draw a metric of one run over the rounds on both splits, and the worst site."""
    run = comparison.contenders[0].runs[0]
    names = ((f"test.{metric}", "test", 1), (f"validation.{metric}", "validation", 0))
    lines = [Line(label, c, t + 1, v) for name, label, c in names for t, v in [run.curve(name)]]
    if any(r.get("sites", {}).get("metric") == metric for r in run.history):
        t, worst = run.curve("sites.worst")
        lines.append(Line("worst site", 2, t + 1, worst))
    floor = (run.result.get("floor") or {}).get(metric)
    level = None if floor is None else (float(floor), "majority only")
    return Lines("", lines, METRICS[metric].words, level=level)


def every_seed(comparison: Comparison, metric: str) -> Rows:
    """Draw a dot per seed and a bar at the mean of each contender."""
    colours = palette(comparison)
    rows = [(one.label, colours[one.label], one.by_seed(metric)) for one in comparison.contenders]
    return seeds(f"Every seed: {METRICS[metric].words}", rows, METRICS[metric].words, runs=True)


def seeds(title: str, rows: Sequence[tuple[str, int, Mapping[str, float]]], label: str, *, runs: bool = False) -> Rows:
    """Draw (name, colour, {seed: value}), a row each."""
    rows = [one for one in rows if one[2]]
    means = [float(np.mean(list(values.values()))) for _, _, values in rows]
    series = [
        Series(name, c, np.where(np.arange(len(rows)) == i, means[i], np.nan), each=[{}] * i + [dict(values)])
        for i, (name, c, values) in enumerate(rows)
    ]
    series = [replace(s, each=[*s.each, *[{}] * (len(rows) - len(s.each))]) for s in series]
    return Rows(
        title,
        [one[0] for one in rows],
        series,
        label,
        "",
        whole=False,
        sides=[number(mean) for mean in means],
        owners=[one[1] for one in rows],
        caption="One dot per seed; the bar and the number show the mean.",
        runs=runs,
    )


def recall_by_class(comparison: Comparison, first: RunRecord, *, precision: bool = False) -> Rows:
    """Draw the recall of each class, rarest first, with its training samples in numbers."""
    colours, order, counts = palette(comparison), class_order(first), first.train_counts
    several = max(len(one.runs) for one in comparison.contenders) > 1
    series = []
    for one in comparison.contenders:
        stack = per_class(one, "accuracy", len(order))
        if stack.size:
            name = "recall" if precision else one.label
            series.append(Series(name, colours[one.label], *over_seeds(stack[:, order])))
        if precision and (stack := per_class(one, "precision", len(order))).size:
            series.append(Series("precision", 0, *over_seeds(stack[:, order])))
    return Rows(
        "Recall of each class",
        [first.classes[c] for c in order],
        series,
        "share" if precision else "recall",
        "class",
        sides=[f"{int(n):,}" for n in counts[order]] if counts is not None else (),
        side_label="training samples" if precision else "training" if counts is not None else "",
        caption="Mean over seeds, ± one standard deviation." if several else "",
        runs=not precision,
    )


def thirds(values: np.ndarray) -> np.ndarray:
    """(seeds, C) per-class values, rarest class first -> (seeds, 3) tail, middle and head means.

    Thirds as the head and tail metrics count them; two columns where nothing is left for the middle.
    """
    n = values.shape[1]
    size = max(1, n // 3)
    parts = [values[:, :size], values[:, size : n - size], values[:, n - size :]]
    return np.stack([_nanmean(p) for p in parts if p.shape[1]], axis=1)


def _nanmean(values: np.ndarray) -> np.ndarray:
    """Return means over the classes that have test samples; NaN if none has."""
    seen = np.isfinite(values)
    total = np.where(seen, values, 0.0).sum(axis=1)
    return np.where(seen.any(axis=1), total / np.maximum(seen.sum(axis=1), 1), np.nan)


def groups(comparison: Comparison, first: RunRecord) -> Rows:
    """Draw mean recall by thirds of the classes."""
    colours, order, n = palette(comparison), class_order(first), len(first.classes)
    size = max(1, n // 3)
    between = n - 2 * size
    names = [f"rarest ({size})", *([f"middle ({between})"] if between else []), f"most frequent ({size})"]
    stacks = [(one, per_class(one, "accuracy", n)) for one in comparison.contenders] if n > 2 else []
    series = [
        Series(one.label, colours[one.label], *over_seeds(thirds(stack[:, order])))
        for one, stack in stacks
        if stack.size
    ]
    caption = "Mean recall by thirds of the classes by training samples (number of classes in parentheses)."
    return Rows("Rare and frequent classes", names, series, "recall", "classes", caption=caption, runs=True)


def shots(comparison: Comparison) -> Rows:
    """Draw the recall of many-, medium- and few-shot classes."""
    names = [n for n in ("few", "medium", "many") if any(math.isfinite(one.mean(n)) for one in comparison.contenders)]
    colours = palette(comparison)
    series = [
        Series(one.label, colours[one.label], np.array([*map(one.mean, names)]), np.array([*map(one.spread, names)]))
        for one in comparison.contenders
    ]
    caption = "Classes with at most 20, 21 to 99 and at least 100 training samples."
    title = "Few-, medium- and many-shot classes"
    return Rows(title, names if len(names) > 1 else [], series, "recall", "classes", caption=caption, runs=True)


def rates_of(comparison: Comparison, contender: Contender) -> Lines | Heat:
    """Draw the resampling rates of a run: steps of a few clients; of many a map, each with the rate that it ends at."""
    run = contender.runs[0]
    path, end = run.rate_path(), run.search_rounds()
    n_clients = path.shape[1]
    sites = [str(s) for s in run.clients.get("sites") or range(n_clients)]
    title, c = f"Rates of {contender.label}", own_colour(comparison, contender)
    if n_clients <= FEW:
        lines = [Line(sites[k], k, np.arange(1, len(path) + 1), path[:, k]) for k in range(n_clients)]
        mark = float(end) if 0 < end < len(path) else None
        look: dict[str, Any] = {"steps": True, "mark": mark, "mark_label": "search ends", "run": c}
        return Lines(title, lines, "resampling rate", caption=f"Seed {run.seed}.", **look)
    rows = np.argsort(-path[-1], kind="stable")
    rows = rows[np.unique(np.linspace(0, n_clients - 1, min(n_clients, MOST_ROWS)).round().astype(int))]
    rounds = np.unique(np.linspace(0, len(path) - 1, min(len(path), MOST_ROUNDS)).round().astype(int))
    shown = path[np.ix_(rounds, rows)].T
    low, high = float(path.min()), float(path.max())
    part = f" {len(rows)} of {n_clients:,} clients, from highest to lowest rate." if len(rows) < n_clients else ""
    over = f" The search ended after round {end}." if 0 < end < len(path) else ""
    return Heat(
        title,
        shown.round(3),
        [sites[k] for k in rows],
        [str(t + 1) for t in rounds],
        "client",
        "round",
        shade=0.05 + 0.95 * (shown - low) / max(high - low, 1e-12),
        unit="rate",
        numbers=False,
        every=math.ceil((len(rounds) + 1) / 10),
        sides=[f"{path[-1, k]:.3f}" for k in rows],
        caption=f"Seed {run.seed}. Colours range from {low:.3f} to {high:.3f}; each row ends with its last rate."
        f"{over}{part}",
        run=c,
    )


def movement(contender: Contender) -> list[tuple[RunRecord, np.ndarray, np.ndarray]]:
    """Return (run, rate path, path variation after each round) of each run that has rates of its clients."""
    paths = [(r, r.rate_path()) for r in contender.runs]
    return [(r, p, path_variation(p, r.weights)) for r, p in paths if p.size and p.shape[1] == r.weights.size]


def moved(contender: Contender) -> bool:
    """Whether the rates changed in any run."""
    return any(float(total[-1]) > 1e-12 for _, _, total in movement(contender))


def label_map(run: RunRecord) -> Heat | None:
    """Draw the training samples by client and class; None where sites keep their label histograms."""
    table = run.label_map
    if table is None:
        return None
    order = class_order(run)
    some = some_of(len(table))
    shown = table[some][:, order]
    part = f"; {len(some)} of {len(table):,} clients" if len(some) < len(table) else ""
    return Heat(
        "Training samples by client and class",
        shown,
        [site_name(run, k) for k in some],
        [run.classes[c] for c in order],
        "client",
        "class, rarest first",
        shade=np.sqrt(shown / max(shown.max(), 1)),
        unit="samples",
        wide=True,
        caption=f"Seed {run.seed}, before resampling; stronger colours: more samples, on a square-root scale{part}.",
    )


def some_of(n_clients: int) -> list[int]:
    """Return all clients, or ``MOST_CLIENTS`` of them at even distances."""
    return [int(k) for k in np.unique(np.linspace(0, n_clients - 1, min(n_clients, MOST_CLIENTS)).round())]


def site_name(run: RunRecord, client: object) -> str:
    """Return the name of the site behind a client's number, where it has one."""
    sites = run.clients.get("sites") or []
    return str(sites[client]) if isinstance(client, int) and 0 <= client < len(sites) else str(client)
