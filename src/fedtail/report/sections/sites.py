"""The part of the page about sites: the worst one and the spread, which site finds which class, how that came about."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedtail.core.metrics import METRICS, signed
from fedtail.plots import Lines, Rows, Series
from fedtail.report.blocks import Block, Cell, Charts, Table, Text, first_of, folded, map_look, say, shaded, table_of
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.facts import METRIC, SMALL, SPLITS, AtSite, at_sites, rarest_there, telling
from fedtail.report.pictures import class_order, curve
from fedtail.runs.record import RunRecord
from fedtail.words import fixed

MOST_ROWS = 24
"""Sites drawn, the worst of them; the map has all."""
MOST_CELLS = 1500
"""Cells of a map beyond which only the best contender has one."""
THIN = 5
"""Samples below which a share says next to nothing."""
Found = tuple[Contender, str, list[AtSite]]


def sites(comparison: Comparison, metric: str) -> list[Block]:
    """Worst site and spread, before and after the decision, the site-by-class map, and the history of the worst."""
    results = [found for found in at_all_sites(comparison) if len(telling(found[0].runs[0])) > 1]
    if not results:
        return []
    best = max(results, key=lambda item: item[0].mean(METRIC))[0]
    large = len(results[0][2]) * len(class_order(results[0][0].runs[0])) > MOST_CELLS
    maps = [
        block
        for one, _, rows in results
        if one is best or not large
        if (block := _map(comparison, one, rows, is_open=one is best))
    ]
    about = (
        f"Recall of each class on each site's own {results[0][1]} samples; stronger colour is higher. Italics: fewer "
        f"than {THIN} samples; –: none."
    )
    return [
        Text((f"{best.label}. " if comparison.several else "") + worst_in_words(best), "lead"),
        Charts([sites_chart(comparison, results), _history(comparison)], "packed"),
        Text(about if maps else "", "note"),
        *maps,
        first_of(results if maps and large else [], "map", "result.json", 1)[1],
    ]


def worst_in_words(contender: Contender) -> str:
    """Return which site is the worst, and whether that says something."""
    run = contender.runs[0]
    (split, every), rows = at_sites(run), telling(run)
    values = [site.value() for site in rows]
    return say(
        "worst_site",
        seed=run.seed if len(contender.runs) > 1 else None,
        rows=rows,
        words=METRICS[METRIC].words,
        mean=float(np.mean(values)),
        spread=float(np.std(values)),
        split=split,
        small=SMALL,
        large=[site for site in rows if site.samples >= SMALL],
        untold=len(every) - len(rows),
    )


def site_table(run: RunRecord) -> Table:
    """Return each site's samples, those of the rarest class among them, and macro F1, worst first."""
    split, rows = at_sites(run)
    rare = rarest_there(run, rows)
    return table_of(
        {
            "Site, worst first": site.name,
            f"{split.capitalize()} samples": f"{site.samples:,}",
            f"of {run.classes[rare]}": f"{site.positives(rare):,}",
            "Macro F1": fixed(site.value()),
            "Plain argmax": fixed(site.value(plain=True)),
        }
        for site in rows
    )


def at_all_sites(comparison: Comparison) -> list[Found]:
    """Return (contender, split, sites) of the contenders that were judged at sites."""
    found = [(one, *at_sites(one.runs[0])) for one in comparison.contenders]
    return [one for one in found if one[2]]


def sites_chart(comparison: Comparison, results: Sequence[Found], metric: str = METRIC) -> Rows | None:
    """Draw a row per site: the contenders beside each other, or before and after the decision of the only one."""
    if not results:
        return None
    first, split, rows = results[0]
    rows = sorted((s for s in rows if math.isfinite(s.value(metric))), key=lambda s: signed(metric, s.value(metric)))
    shown = rows[:MOST_ROWS]
    part = f" The {len(shown)} worst of {len(rows)} sites." if len(shown) < len(rows) else ""
    marks = [
        (one.label, comparison.colours[one.label], {site.name: site.value(metric) for site in theirs})
        for one, _, theirs in results
    ]
    if len(results) == 1:
        plain = {site.name: value for site in rows if math.isfinite(value := site.value(metric, plain=True))}
        name = "with decision rule" if plain else METRICS[metric].words
        marks = [*([("plain argmax", 0, plain)] if plain else []), (name, 1, marks[0][2])]
    series = [Series(name, c, np.array([of.get(site.name, math.nan) for site in shown])) for name, c, of in marks]
    mean = float(np.mean([site.value(metric) for site in rows])) if len(results) == 1 and rows else None
    return Rows(
        "Every site, worst first",
        [site.name for site in shown],
        series,
        METRICS[metric].words,
        "site",
        link=True,
        sides=[f"{site.samples:,}" for site in shown],
        side_label="samples",
        mark=mean,
        caption=f"{SPLITS[split]}, seed {first.runs[0].seed}.{' Dashed: mean.' if mean is not None else ''}{part}",
        runs=len(results) > 1,
    )


def _history(comparison: Comparison) -> Lines:
    """Draw the worst site of every round that was validated."""
    records = [r["sites"] for r in comparison.runs[0].history if r.get("sites")]
    label = METRICS[str(records[-1].get("metric", METRIC)) if records else METRIC].words
    caption = "The worst site of each round, on private validation splits."
    return curve(comparison, "sites.worst", "The worst site by round", label, floor=0.0, ceiling=1.0, caption=caption)


def _map(comparison: Comparison, one: Contender, rows: Sequence[AtSite], is_open: bool) -> Block | None:
    """Recall of each class at each site."""
    run = one.runs[0]
    order, rare = class_order(run).tolist(), rarest_there(run, rows)
    recall = [_recall(site, len(run.classes)) for site in rows]
    if not np.isfinite(np.array(recall)).any():
        return None
    names = [run.classes[c] for c in order]

    def about(site: AtSite) -> tuple[str, ...]:
        return f"{site.samples:,}", f"{site.positives(rare):,}", fixed(site.value())

    cells: list[list[str | Cell]] = [
        [
            site.name,
            *(Cell(text, look="plain") for text in about(site)),
            *(shaded(values[c], values[c], "thin" if site.positives(c) < THIN else "") for c in order),
        ]
        for site, values in zip(rows, recall, strict=True)
    ]
    head = ["Site", "Samples", f"of {run.classes[rare]}", "Macro F1", *names]
    table = Table(cells, head, f"{one.label}: sites by classes", map_look(names))
    return folded(one.label, table, comparison.filtered.get(one.label), is_open=is_open)


def _recall(site: AtSite, n_classes: int) -> np.ndarray:
    recorded = site.values.get("per_class_accuracy") or []
    return np.array(recorded if len(recorded) == n_classes else [math.nan] * n_classes, dtype=np.float64)
