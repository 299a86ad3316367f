"""The part of the page about sites: the worst one and the spread, which site finds which class, how that came about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.core.metrics import METRICS
from fedtail.report.bars import Series
from fedtail.report.chart import Cell, charts, esc, html_table, run_mark, scroll
from fedtail.report.classes import class_order, number_of
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.federation import site_name
from fedtail.report.heatmap import THIN, heat_table
from fedtail.report.lines import Line, line_chart
from fedtail.report.rows import row_chart
from fedtail.report.series import contender_line, palette
from fedtail.runs.record import RunRecord

METRIC = "macro_f1"
MOST_ROWS = 24
"""Sites drawn, the worst of them; the map has all."""
MOST_CELLS = 1500
"""Of a map, beyond which only the best contender has one."""
SMALL = 30
"""Samples below which a site's number says little."""
COLUMNS = ("accuracy", "pr_auc", "log_loss", "calibration_error")


@dataclass(frozen=True)
class AtSite:
    """The final model at one site."""

    name: str
    found: dict[str, Any]
    before: dict[str, Any]
    """The same with the plain argmax; empty where that is what the answers are."""

    @property
    def samples(self) -> int:
        return int(sum(self.found.get("per_class_support") or []))

    def value(self, metric: str = METRIC) -> float:
        return _value(self.found, metric)


def at_sites(run: RunRecord) -> tuple[str, list[AtSite]]:
    """(split, sites), worst first: by the split that the run tells its worst site of; where it says none, on their own
    test sets if all have one, else on their private splits."""
    rows = [row for row in run.result.get("sites") or [] if isinstance(row, dict)]
    split = (run.result.get("worst") or {}).get("split")
    if split not in ("test", "validation"):
        split = "test" if rows and all(row.get("test") for row in rows) else "validation"
    found = [
        AtSite(str(row["site"]), row[split], (row.get("before") or {}).get(split) or {})
        for row in rows
        if row.get(split) and math.isfinite(_value(row[split], METRIC))
    ]
    return split, sorted(found, key=lambda site: site.value())


def sites(comparison: Comparison) -> str:
    """Worst site and spread, before and after the decision, the site-by-class map, and the history of the worst."""
    found = [(one, *at_sites(one.runs[0])) for one in comparison.contenders]
    found = [(one, split, rows) for one, split, rows in found if len(rows) > 1]
    if not found:
        return ""
    colours = palette(comparison)
    panels = [_spread_chart(found, colours), _history(comparison, colours)]
    best = max(found, key=lambda item: item[0].mean(METRIC))[0]
    large = len(found[0][2]) * len(class_order(found[0][0].runs[0])) > MOST_CELLS
    drawn = [(one, rows) for one, _, rows in found if one is best or not large]
    maps = "".join(_map(one, rows, colours, is_open=one is best) for one, rows in drawn)
    if maps:
        maps = (
            f"<h3>Recall by site and class</h3>{maps}<p class='note'>Recall of each class on each site's own "
            f"{found[0][1]} samples; stronger colour is higher. Italics: fewer than {THIN} samples; –: none.</p>"
        )
    said = _said(best)
    said = f"{best.label}: {said}" if len(colours) > 1 else said[:1].upper() + said[1:]
    return f"<p class='lead'>{esc(said)}</p>{_summary(comparison, colours)}{charts(panels, 'packed')}{maps}"


def worst_site(contender: Contender) -> tuple[AtSite, float] | None:
    """The worst site of a contender's first run, and the value of each run's worst site, as mean over runs."""
    each = [rows for run in contender.runs if len(rows := at_sites(run)[1]) > 1]
    return (each[0][0], float(np.mean([rows[0].value() for rows in each]))) if each else None


def _said(contender: Contender) -> str:
    split, rows = at_sites(contender.runs[0])
    values = np.array([site.value() for site in rows])
    where = "their own test sets" if split == "test" else "their private validation splits"
    name = METRICS[METRIC].words
    seed = f"in seed {contender.runs[0].seed}, " if len(contender.runs) > 1 else ""
    text = (
        f"{seed}the worst site is {rows[0].name} with {name} {values[0]:.3f}; the {len(rows)} sites have "
        f"{values.mean():.3f} ± {values.std():.3f} on {where}."
    )
    large = [site for site in rows if site.samples >= SMALL]
    if rows[0].samples < SMALL and large:
        text += (
            f" It has only {rows[0].samples} sample{'' if rows[0].samples == 1 else 's'}; among sites with at least "
            f"{SMALL}, the worst is {large[0].name} with {large[0].value():.3f}."
        )
    return text


def _summary(comparison: Comparison, colours: dict[str, int]) -> str:
    """A row per contender: worst, mean and spread over sites, as means over seeds."""
    rows: list[list[str | Cell]] = []
    runs = []
    for one in comparison.contenders:
        each = [v for r in one.runs if len(v := [s.value() for s in at_sites(r)[1]]) > 1]
        before = [v for r in one.runs if len(v := _before(at_sites(r)[1])) > 1]
        if not each:
            continue
        row: list[str | Cell] = [one.label]
        for values in (before, each):
            row += [number_of(float(np.mean([f(v) for v in values]))) if values else "–" for f in (min, np.mean, _sd)]
        rows.append(row)
        runs.append(colours[one.label])
    if all(row[1] == "–" for row in rows):
        rows = [[row[0], *row[4:]] for row in rows]
        head = ["Method", "Worst site", "Mean of sites", "Spread"]
    else:
        head = [
            "Method",
            *(f"{h}, argmax" for h in ("Worst", "mean", "spread")),
            *("Worst, with decision", "mean", "spread"),
        ]
    if len(comparison.contenders) == 1:  # the lead says it, and the part about decisions what they changed
        return ""
    return scroll(html_table(head, rows, runs=runs), "Worst site and spread")


def _before(rows: Sequence[AtSite]) -> list[float]:
    values = [_value(site.before, METRIC) for site in rows if site.before]
    return [v for v in values if math.isfinite(v)]


def _sd(values: Sequence[float]) -> float:
    return float(np.std(values))


def _spread_chart(found: Sequence[tuple[Contender, str, list[AtSite]]], colours: dict[str, int]) -> str:
    """A row per site: the contenders beside each other, or before and after the decision of the only one."""
    first, split, rows = found[0]
    shown = rows[:MOST_ROWS]
    names = [site.name for site in shown]
    nothing = np.full(len(names), math.nan)
    part = f" The {len(shown)} worst of {len(rows)} sites; the map below shows all." if len(shown) < len(rows) else ""
    if len(found) == 1:
        now = np.array([site.value() for site in shown])
        series: list[Series] = [("with decision rule", 1, now, nothing)]
        if _before(rows):
            before = np.array([_value(site.before, METRIC) for site in shown])
            series.insert(0, ("plain argmax", 0, before, nothing))
    else:
        series = []
        for one, _, theirs in found:
            by_name = {site.name: site.value() for site in theirs}
            values = np.array([by_name.get(name, math.nan) for name in names])
            series.append((one.label, colours[one.label], values, nothing))
    return row_chart(
        "Every site, worst first",
        names,
        series,
        x_label=METRICS[METRIC].words,
        heading="site",
        link=True,
        sides=[f"{site.samples:,}" for site in shown],
        side_label="samples",
        mark=float(np.mean([site.value() for site in rows])) if len(found) == 1 else None,
        caption=f"Seed {first.runs[0].seed}, {split}.{' Dashed: mean.' if len(found) == 1 else ''}{part}",
        runs=len(series) != 2 or len(found) > 1,
    )


def _history(comparison: Comparison, colours: dict[str, int]) -> str:
    """The worst site after every round that was validated."""
    known = [one for one in comparison.contenders if one.band("sites.worst")[0].size]
    if not known:
        return ""
    records = [r["sites"] for r in known[0].runs[0].history if r.get("sites")]
    label = METRICS[str(records[-1].get("metric", METRIC))].words
    if len(comparison.contenders) > 1:
        lines = [contender_line(one, "sites.worst", colours[one.label]) for one in known]
        caption = "The worst site of each round, on private validation splits."
    else:
        t, mean, _ = known[0].band("sites.mean")
        spread = known[0].band("sites.spread")[1]
        x, worst, _ = known[0].band("sites.worst")
        lines = [Line("mean of the sites", 0, t + 1, mean, spread), Line("worst site", 2, x + 1, worst)]
        who = [site_name(known[0].runs[0], r.get("client", r.get("site"))) for r in records]
        others = len(set(who)) - 1
        said = (
            f"; {others} other site{'s were' if others > 1 else ' was'} worst in some rounds."
            if others
            else ", as in every round."
        )
        caption = (
            f"Private validation splits; band: the spread over sites. Worst in the last round: {esc(who[-1])}{said}"
        )
    many = len(comparison.contenders) > 1
    return line_chart(
        "The worst site by round", lines, y_label=label, floor=0.0, ceiling=1.0, caption=caption, runs=many
    )


def _map(one: Contender, rows: Sequence[AtSite], colours: dict[str, int], is_open: bool) -> str:
    run = one.runs[0]
    order = class_order(run)
    recall = np.array([_list(site.found, "per_class_accuracy", len(order)) for site in rows])[:, order]
    support = np.array([_list(site.found, "per_class_support", len(order)) for site in rows])[:, order]
    if not np.isfinite(recall).any():
        return ""
    others = [m for m in COLUMNS if any(math.isfinite(site.value(m)) for site in rows)]
    table = heat_table(
        [site.name for site in rows],
        [run.classes[c] for c in order],
        recall,
        np.nan_to_num(support),
        heading="Site",
        first={
            "Samples": [f"{site.samples:,}" for site in rows],
            "Macro F1": [number_of(site.value()) for site in rows],
        },
        last={METRICS[m].title: [number_of(site.value(m)) for site in rows] for m in others},
    )
    content = scroll(table, f"{one.label}: sites by classes")
    if len(colours) == 1:
        return content
    state, mark = " open" if is_open else "", run_mark(colours[one.label])
    return f"<details class='fold'{state}{mark}><summary>{esc(one.label)}</summary>{content}</details>"


def _list(found: dict[str, Any], key: str, n: int) -> list[float]:
    values = found.get(key) or []
    return [math.nan if v is None else float(v) for v in values] if len(values) == n else [math.nan] * n


def _value(found: dict[str, Any], metric: str) -> float:
    value = found.get(metric)
    return float(value) if isinstance(value, int | float) else math.nan
