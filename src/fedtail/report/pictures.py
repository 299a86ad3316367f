"""What is drawn of runs: one function per picture, which report, figures of papers and ``Result.plot`` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedtail.core.metrics import METRICS
from fedtail.core.movement import path_variation
from fedtail.plots import Heat, Line, Lines, Rows, Series
from fedtail.report.comparison import Comparison, Contender, finite
from fedtail.runs.record import RunRecord
from fedtail.words import number

FEW = 8
"""Clients up to which each has a line of its own."""
MOST_ROWS, MOST_CLIENTS = 100, 200
SEEDS = "Mean over seeds; the band is ± one standard deviation."


def class_order(run: RunRecord) -> np.ndarray:
    """Return the classes, those with the fewest training samples first; as they are where that is not known."""
    counts = run.train_counts
    places = np.arange(len(run.classes))
    return places if counts is None else np.lexsort((-places, counts))


def over_seeds(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return column means and standard deviations of (seeds, n); NaN where undefined."""
    frame = pd.DataFrame(table)
    return frame.mean().to_numpy(), frame.std().to_numpy()


def per_class(contender: Contender, name: str, n_classes: int) -> np.ndarray:
    """Return (seeds, C) of one number per class."""
    return np.array([v for r in contender.runs if (v := r.per_class(name)).size == n_classes])


def curve(comparison: Comparison, name: str, title: str, label: str, **more: Any) -> Lines:
    """Draw something over the rounds: a metric, the loss, the alignment of updates."""
    bands = [(one.label, *one.band(name)) for one in comparison.contenders]
    lines = [Line(label, comparison.colours[label], t + 1, mean, spread) for label, t, mean, spread in bands]
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
    rows = [
        (
            one.label,
            comparison.colours[one.label],
            finite({f"seed {comparison.seed(run)}": run.metric(metric) for run in one.runs}),
        )
        for one in comparison.contenders
    ]
    return seeds(f"Every seed: {METRICS[metric].words}", rows, METRICS[metric].words, runs=True)


def seeds(title: str, rows: Sequence[tuple[str, int, Mapping[str, float]]], label: str, *, runs: bool = False) -> Rows:
    """Draw (name, colour, {seed: value}), a row each."""
    rows = [one for one in rows if one[2]]
    means = [float(np.mean(list(values.values()))) for _, _, values in rows]
    series = [
        Series(name, c, np.where(own, means, np.nan), each=[values if here else {} for here in own])
        for own, (name, c, values) in zip(np.eye(len(rows), dtype=bool), rows, strict=True)
    ]
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


def scored(comparison: Comparison) -> RunRecord | None:
    """Return the first run with numbers per class."""
    return next((r for r in comparison.runs if np.isfinite(r.per_class()).any()), None)


def recall_by_class(comparison: Comparison) -> Rows:
    """Draw the recall of each class, rarest first, with its training samples in numbers; of the only contender its
    precision, too."""
    first, alone = scored(comparison) or comparison.runs[0], comparison.reference
    order, counts = class_order(first), first.train_counts
    stacks = [(one.label, comparison.colours[one.label], one, "accuracy") for one in comparison.contenders]
    if not comparison.several:
        stacks = [("recall", 1, alone, "accuracy"), ("precision", 0, alone, "precision")]
    series = [
        Series(name, c, *over_seeds(stack[:, order]))
        for name, c, one, key in stacks
        if (stack := per_class(one, key, len(order))).size
    ]
    spread = max(len(one.runs) for one in comparison.contenders) > 1
    return Rows(
        "Recall of each class" if len(series) == len(comparison.contenders) else "Recall and precision, class by class",
        [first.classes[c] for c in order],
        series,
        "recall" if comparison.several else "share",
        "class",
        sides=[f"{int(n):,}" for n in counts[order]] if counts is not None else (),
        side_label="training" if counts is not None else "",
        caption="Mean over seeds, ± one standard deviation." if spread else "",
        runs=len(series) == len(comparison.contenders),
    )


def groups(comparison: Comparison) -> Rows:
    """Draw the mean recall of the rarest and the most frequent third of the classes, and of few-, medium- and many-shot
    classes where there are such."""
    names = {"tail": "rarest third", "head": "most frequent third", "few": "few-shot", "medium": "medium-shot"}
    known = len(comparison.runs[0].classes) > 2
    names = {n: title for n, title in {**names, "many": "many-shot"}.items() if known and comparison.scored(n)}
    values = [
        (one, np.array([(one.mean(n), one.spread(n)) for n in names]).reshape(-1, 2)) for one in comparison.contenders
    ]
    series = [Series(one.label, comparison.colours[one.label], *table.T) for one, table in values]
    caption = (
        "Mean recall of the classes with the fewest and the most training samples; few-, medium- and many-shot: "
        "with at most 20, 21 to 99 and at least 100 training samples."
    )
    title = "Rare and frequent classes"
    return Rows(title, list(names.values()), series, "recall", "classes", caption=caption, runs=True)


def rates_of(comparison: Comparison, contender: Contender) -> Lines | Rows:
    """Draw the resampling rates of a run: steps of a few clients; of many the first and the last, a row each."""
    run = contender.runs[0]
    path, end = run.rate_path(), run.search_rounds()
    sites = [str(s) for s in run.clients.get("sites") or range(path.shape[1])]
    title, c = f"Rates of {contender.label}", comparison.filtered.get(contender.label)
    if len(sites) <= FEW:
        lines = [Line(name, k, np.arange(1, len(path) + 1), path[:, k]) for k, name in enumerate(sites)]
        mark = float(end) if 0 < end < len(path) else None
        look: dict[str, Any] = {"steps": True, "mark": mark, "mark_label": "search ends", "run": c}
        return Lines(title, lines, "resampling rate", caption=f"Seed {run.seed}.", **look)
    order = [k for k in np.argsort(-path[-1], kind="stable") if k in some_of(len(sites), MOST_ROWS)]
    series = [Series(name, i, path[t][order]) for name, i, t in (("first round", 0, 0), ("last round", 1, -1))]
    names = [sites[k] for k in order]
    over = f" The search ended after round {end}." if 0 < end < len(path) else ""
    part = f" {len(order)} of {len(sites):,} clients." if len(order) < len(sites) else ""
    caption = f"Seed {run.seed}.{over}{part}"
    look = {"whole": False, "link": True, "sides": [f"{path[-1, k]:.3f}" for k in order], "side_label": "last"}
    return Rows(title, names, series, "resampling rate", "client", caption=caption, run=c, **look)


def movement(contender: Contender) -> list[np.ndarray]:
    """Return the path variation after each round of each run that has rates of its clients."""
    paths = [(r, r.rate_path()) for r in contender.runs]
    return [path_variation(p, r.weights) for r, p in paths if p.size and p.shape[1] == r.weights.size]


def moved(contender: Contender) -> bool:
    """Whether the rates changed in any run."""
    return any(float(total[-1]) > 1e-12 for total in movement(contender))


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
        caption=f"Seed {run.seed}, before resampling; stronger colours: more samples, on a square-root scale{part}.",
    )


def some_of(n_clients: int, most: int = MOST_CLIENTS) -> list[int]:
    """Return all clients, or ``most`` of them at even distances."""
    return [int(k) for k in np.unique(np.linspace(0, n_clients - 1, min(n_clients, most)).round())]


def site_name(run: RunRecord, client: object) -> str:
    """Return the name of the site behind a client's number, where it has one."""
    sites = run.clients.get("sites") or []
    return str(sites[client]) if isinstance(client, int) and 0 <= client < len(sites) else str(client)
