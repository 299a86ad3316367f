"""The part of the page about sites: the worst one and the spread, which site finds which class, how that came about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtail.core.metrics import METRICS, metrics
from fedtail.plots import Line, Lines, Rows, Series
from fedtail.report.blocks import Block, Cell, Charts, Fold, Heading, Table, Text
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.facts import METRIC, SMALL, AtSite, at_sites, number_in, telling
from fedtail.report.pictures import class_order, curve, line_of, own_colour, palette, site_name
from fedtail.runs.record import RunRecord
from fedtail.words import fixed, plural

MOST_ROWS = 24
"""Sites drawn, the worst of them; the map has all."""
MOST_CELLS = 1500
"""Cells of a map beyond which only the best contender has one."""
THIN = 5
"""Samples below which a share says next to nothing."""
LEVELS = 10
MOST_COLUMNS = 3
Found = tuple[Contender, str, list[AtSite]]


def sites(comparison: Comparison, metric: str) -> list[Block]:
    """Worst site and spread, before and after the decision, the site-by-class map, and the history of the worst."""
    results: list[Found] = [(one, *at_sites(one.runs[0])) for one in comparison.contenders]
    results = [(one, split, rows) for one, split, rows in results if len(telling(one.runs[0])) > 1]
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
    note = (
        f"Recall of each class on each site's own {results[0][1]} samples; stronger colour is higher. Italics: fewer "
        f"than {THIN} samples; –: none."
    )
    text = _worst_in_words(best)
    text = f"{best.label}: {text}" if len(comparison.contenders) > 1 else text[:1].upper() + text[1:]
    return [
        Text(text, "lead"),
        _summary(comparison),
        Charts([sites_chart(comparison, results), _history(comparison)], "packed"),
        *([Heading("Recall by site and class"), *maps, Text(note, "note")] if maps else []),
    ]


def _worst_in_words(contender: Contender) -> str:
    run = contender.runs[0]
    split, every = at_sites(run)
    rows = telling(run)
    values = np.array([site.value() for site in rows])
    where = "their own test sets" if split == "test" else "their private validation splits"
    name = METRICS[METRIC].words
    seed = f"in seed {run.seed}, " if len(contender.runs) > 1 else ""
    text = (
        f"{seed}the worst site is {rows[0].name} with {name} {values[0]:.3f}; {plural(len(rows), 'site')} have "
        f"{values.mean():.3f} ± {values.std():.3f} on {where}."
    )
    large = [site for site in rows if site.samples >= SMALL]
    if rows[0].samples < SMALL and large:
        text += (
            f" It has only {plural(rows[0].samples, 'sample')}; among sites with at least {SMALL}, the worst is "
            f"{large[0].name} with {large[0].value():.3f}."
        )
    if len(every) > len(rows):
        text += f" {plural(len(every) - len(rows), 'site')} with samples of one class alone cannot tell."
    return text


def _summary(comparison: Comparison) -> Table:
    """A row per contender: worst, mean and spread over sites, as means over seeds."""
    colours, rows, runs = palette(comparison), [], []
    if len(comparison.contenders) == 1:  # the lead says it, and the part about decisions what they changed
        return Table([], [])
    for one in comparison.contenders:
        each = [v for r in one.runs if len(v := [s.value() for s in telling(r)]) > 1]
        before = [v for r in one.runs if len(v := _before(telling(r))) > 1]
        if not each:
            continue
        row = [one.label]
        for values in (before, each):
            row += [fixed(float(np.mean([f(v) for v in values]))) if values else "–" for f in (min, np.mean, _sd)]
        rows.append(row)
        runs.append(colours[one.label])
    if all(row[1] == "–" for row in rows):
        rows = [[row[0], *row[4:]] for row in rows]
        head = ["Method", "Worst site", "Mean of sites", "Spread"]
    else:
        head = ["Method", *(f"{h}, argmax" for h in ("Worst", "mean", "spread"))]
        head += ["Worst, with decision", "mean", "spread"]
    return Table(head, rows, "Worst site and spread", runs=runs)


def _before(rows: Sequence[AtSite]) -> list[float]:
    return [v for site in rows if math.isfinite(v := site.argmax())]


def _sd(values: Sequence[float]) -> float:
    return float(np.std(values))


def sites_chart(comparison: Comparison, results: Sequence[Found], metric: str = METRIC) -> Rows:
    """Draw a row per site: the contenders beside each other, or before and after the decision of the only one."""
    colours, (first, split, rows) = palette(comparison), results[0]
    rows = sorted((s for s in rows if math.isfinite(s.value(metric))), key=lambda s: _badness(s, metric))
    shown = rows[:MOST_ROWS]
    names = [site.name for site in shown]
    part = f" The {len(shown)} worst of {len(rows)} sites." if len(shown) < len(rows) else ""
    if len(results) == 1:
        now = np.array([site.value(metric) for site in shown])
        series = [Series(METRICS[metric].words, 1, now)]
        if _before(rows):
            before = np.array([site.argmax(metric) for site in shown])
            series = [Series("plain argmax", 0, before), Series("with decision rule", 1, now)]
    else:
        series = []
        for one, _, theirs in results:
            by_name = {site.name: site.value(metric) for site in theirs}
            series.append(Series(one.label, colours[one.label], np.array([by_name.get(n, math.nan) for n in names])))
    mean = float(np.mean([site.value(metric) for site in rows])) if len(results) == 1 and rows else None
    return Rows(
        "Every site, worst first",
        names,
        series,
        METRICS[metric].words,
        "site",
        link=True,
        sides=[f"{site.samples:,}" for site in shown],
        side_label="samples",
        mark=mean,
        caption=f"Seed {first.runs[0].seed}, {split}.{' Dashed: mean.' if mean is not None else ''}{part}",
        runs=len(results) > 1,
    )


def _badness(site: AtSite, metric: str) -> float:
    return site.value(metric) * (1 if METRICS[metric].higher_is_better else -1)


def _history(comparison: Comparison) -> Lines:
    """Draw the worst site after every round that was validated."""
    known = [one for one in comparison.contenders if one.band("sites.worst")[0].size]
    if not known:
        return Lines("", [])
    records = [r["sites"] for r in known[0].runs[0].history if r.get("sites")]
    look: dict[str, Any] = {"floor": 0.0, "ceiling": 1.0}
    title, label = "The worst site by round", METRICS[str(records[-1].get("metric", METRIC))].words
    if len(comparison.contenders) > 1:
        caption = "The worst site of each round, on private validation splits."
        return curve(comparison, "sites.worst", title, label, caption=caption, **look)
    t, mean, _ = known[0].band("sites.mean")
    spread = known[0].band("sites.spread")[1]
    lines = [Line("mean of the sites", 0, t + 1, mean, spread), line_of(known[0], "sites.worst", 2)]
    lines[1] = Line("worst site", 2, lines[1].x, lines[1].y)
    who = [site_name(known[0].runs[0], r.get("client", r.get("site"))) for r in records]
    others = len(set(who)) - 1
    more = f"; {plural(others, 'other site')} in some rounds." if others else ", as in every round."
    caption = f"Private validation splits; band: the spread over sites. Worst in the last round: {who[-1]}{more}"
    return Lines(title, lines, label, caption=caption, **look)


def _map(comparison: Comparison, one: Contender, rows: Sequence[AtSite], is_open: bool) -> Block | None:
    """Recall of each class at each site as a table with coloured cells: it sorts, its row names stay in sight, and it
    can be read aloud."""
    run = one.runs[0]
    order = class_order(run)
    recall = [_list(site.values, "per_class_accuracy", run) for site in rows]
    if not np.isfinite(np.array(recall)).any():
        return None
    others = [m for m in sorted(metrics(), key=lambda m: -m.priority) if m.headline and m.needs in (None, "scores")]
    if len(order) == 2:  # whose mean hides the rare one
        others = [m for m in others if m.name != "pr_auc"]
    others = [m for m in others if m.name != METRIC and any(math.isfinite(site.value(m.name)) for site in rows)]
    others = others[:MOST_COLUMNS]
    rare = int(order[0])
    head = ["Site", "Samples", f"of {run.classes[rare]}", "Macro F1"]
    cells: list[list[str | Cell]] = [
        [
            site.name,
            f"{site.samples:,}",
            f"{site.positives(rare):,}",
            fixed(site.value()),
            *(_shaded(values[c], site.positives(int(c))) for c in order),
            *(_of_site(site, m.name, rare) for m in others),
        ]
        for site, values in zip(rows, recall, strict=True)
    ]
    head += [*(run.classes[c] for c in order), *(m.title for m in others)]
    look = "heat turned" if len(order) > 12 else "heat"
    table = Table(head, cells, f"{one.label}: sites by classes", look=look)
    run_colour = own_colour(comparison, one)
    return table if run_colour is None else Fold(one.label, [table], is_open=is_open, run=run_colour)


def _of_site(site: AtSite, metric: str, rare: int) -> Cell:
    thin = metric == "rare_pr_auc" and site.positives(rare) < THIN
    return Cell(fixed(site.value(metric)), look="thin" if thin else "")


def _shaded(value: float, n: int) -> Cell:
    if not math.isfinite(value):
        return Cell("–", look="h0")
    level = int(np.clip(np.ceil(value * LEVELS), 0, LEVELS))
    text = f"{value:.2f}".lstrip("0") if value < 1 else "1"
    return Cell(text, look=f"h{level}{' thin' if n < THIN else ''}", key=value)


def _list(values: dict[str, Any], key: str, run: RunRecord) -> list[float]:
    n, row = len(run.classes), values.get(key) or []
    return [number_in({key: v}, key) for v in row] if len(row) == n else [math.nan] * n
