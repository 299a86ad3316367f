"""The part of the page about what each site does to the model: its weight, where it pulls, whether it stands out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedtail.report.bars import Series
from fedtail.report.chart import Cell, charts, esc, html_table, number, run_mark, scroll
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.federation import site_name
from fedtail.report.heatmap import heatmap
from fedtail.report.lines import line_chart
from fedtail.report.rows import row_chart
from fedtail.report.series import contender_line, palette
from fedtail.rounds.history import influence_of
from fedtail.runs.record import RunRecord

MOST_ROWS = 60
MOST_ROUNDS = 60
USUAL = 3.0
"""Distances from the other sites' updates, over their median, that are still usual."""
HEAD = ("Site", "Rounds", "Share of the step", "Weight", "By samples", "Cosine", "Distance", "Flagged", "Refused", "")
NOTE = (
    "<p class='note'>Weight: the weight of a site's update in the new model; by samples: the weight its size "
    "would give. "
    "Cosine: with the sum of the other sites' updates. Distance: from the centre of all updates, where 1 is typical. "
    f"Rounds beyond {USUAL:g}, or with an update opposed to all others (cosine near -1), are flagged.</p>"
)
LISTS = ("norm", "cosine", "weight", "claimed", "share", "distance")


@dataclass(frozen=True)
class Influence:
    """One client over a run's rounds; means over the rounds that it took part in, NaN where not recorded."""

    client: int
    rounds: int
    refused: int
    flagged: int
    norm: float
    cosine: float
    weight: float
    claimed: float
    share: float
    distance: float
    stands_out: bool
    """Whether it is one of the run's outliers; see ``rounds.history.influence_of``."""


def influence(comparison: Comparison) -> str:
    """Outliers first, in words; then every site's part of the step, its rounds, and the alignment of all."""
    colours = palette(comparison)
    said: list[str] = []
    tables = ""
    several = len(comparison.contenders) > 1
    for one in comparison.contenders:
        run = one.runs[0]
        found = influences(run)
        if any(math.isfinite(row.share) for row in found):
            warned = _outliers(one, run, found, several)
            content = _of_run(one, run, found, colours)
            state, mark = " open" if warned else "", run_mark(colours[one.label])
            folded = f"<details class='fold'{state}{mark}><summary>{esc(one.label)}</summary>{content}</details>"
            tables += folded if several else content
            said += warned
    aligned = line_chart(
        "Alignment of the clients' updates",
        [contender_line(one, "alignment", colours[one.label]) for one in comparison.contenders],
        y_label="mean cosine",
        ceiling=1.0,
        caption="Mean cosine between a client's update and the aggregate: 1 if all clients agree, 1/√K if their "
        "updates "
        "are unrelated.",
        runs=True,
    )
    if tables and not said:
        said = ["<p>No site stands out: none is consistently far from the others, and none is often refused.</p>"]
    return "".join(said) + tables + (NOTE if tables else "") + charts([aligned])


def influences(run: RunRecord) -> list[Influence]:
    """Every client that took part or was refused, in order, from the rounds' records."""
    sums: dict[int, dict[str, list[float]]] = {}
    rounds: dict[int, int] = {}
    refused: dict[int, int] = {}
    flagged: dict[int, int] = {}
    for record in run.history:
        found = record.get("influence") or {}
        for row, k in enumerate(record.get("clients", [])):
            rounds[k] = rounds.get(k, 0) + 1
            for key in LISTS:
                values = found.get(key) or []
                if row < len(values) and values[row] is not None:
                    sums.setdefault(k, {}).setdefault(key, []).append(float(values[row]))
        for k in found.get("flagged") or []:
            flagged[k] = flagged.get(k, 0) + 1
        for refusal in record.get("refused", []):
            if isinstance(k := refusal.get("client"), int):
                refused[k] = refused.get(k, 0) + 1
    seen = sorted({*rounds, *refused})
    outliers = influence_of(run.history, max(seen, default=-1) + 1).get("outliers", [])
    return [
        Influence(
            client=k,
            rounds=rounds.get(k, 0),
            refused=refused.get(k, 0),
            flagged=flagged.get(k, 0),
            stands_out=k in outliers,
            **{key: float(np.mean(v)) if (v := sums.get(k, {}).get(key)) else math.nan for key in LISTS},
        )
        for k in seen
    ]


def _outliers(one: Contender, run: RunRecord, found: Sequence[Influence], several: bool) -> list[str]:
    out = []
    for row in found:
        if row.stands_out:
            why = []
            if row.flagged:
                why.append(f"far from the others in {row.flagged} of {row.rounds} rounds")
            if math.isfinite(row.distance) and row.distance > USUAL:
                why.append(f"{row.distance:.1f} times the typical distance on average")
            if math.isfinite(row.cosine) and row.cosine < 0:
                why.append(f"pulls against the others (cosine {row.cosine:+.2f})")
            if row.refused:
                why.append(f"refused {row.refused} time{'s' if row.refused > 1 else ''}")
            who = f"{esc(one.label)}: " if several else ""
            out.append(
                f"<p class='warning'>{who}<b>{esc(site_name(run, row.client))}</b> stands out: {', '.join(why)}.</p>"
            )
    return out


def _of_run(one: Contender, run: RunRecord, found: Sequence[Influence], colours: dict[str, int]) -> str:
    many = len(colours) > 1
    ordered = sorted(found, key=lambda row: (-row.stands_out, -np.nan_to_num(row.share)))
    names = [site_name(run, row.client) for row in ordered]
    shown = ordered[:MOST_ROWS]
    nothing = np.full(len(shown), math.nan)
    claimed = np.array([row.claimed for row in shown])
    if not np.isfinite(claimed).any():
        claimed = run.weights[[row.client for row in shown]]
    series: list[Series] = [
        ("share of the samples", 0, claimed, nothing),
        ("share of the step", 1, np.array([row.share for row in shown]), nothing),
    ]
    run_of = colours[one.label] if many else None
    chart = row_chart(
        "How much each site moves the model",
        names[: len(shown)],
        series,
        x_label="share",
        heading="site",
        whole=False,
        link=True,
        caption=f"Seed {run.seed}, mean over the rounds. A site that moves the model more than its sample count "
        "explains has large updates, or updates unlike the others'.",
        run=run_of,
    )
    rows: list[list[str | Cell]] = [
        [
            name,
            str(row.rounds),
            number(row.share),
            number(row.weight),
            number(row.claimed),
            number(row.cosine),
            number(row.distance),
            Cell(str(row.flagged), look="worse" if row.flagged else ""),
            Cell(str(row.refused), look="worse" if row.refused else ""),
            Cell("stands out" if row.stands_out else "", look="worse"),
        ]
        for name, row in zip(names, ordered, strict=True)
    ]
    table = scroll(
        html_table(HEAD, rows, runs=[run_of] * len(rows) if many else ()), f"{one.label}: influence of sites"
    )
    return charts([chart, _distances(run, ordered, run_of)], "packed") + table


def _distances(run: RunRecord, ordered: Sequence[Influence], run_of: int | None) -> str:
    """Distance to the other sites, round by round: when did a site begin to stand out?"""
    records = [r for r in run.history if (r.get("influence") or {}).get("distance")]
    if len(records) < 2:
        return ""
    kept = [records[i] for i in np.unique(np.linspace(0, len(records) - 1, MOST_ROUNDS).round().astype(int))]
    place = {row.client: i for i, row in enumerate(ordered[:MOST_ROWS])}
    values = np.full((len(place), len(kept)), math.nan)
    for column, record in enumerate(kept):
        for k, distance in zip(record["clients"], record["influence"]["distance"], strict=False):
            if k in place and distance is not None:
                values[place[k], column] = distance
    return heatmap(
        "Distance from the other sites, round by round",
        values.round(2),
        [site_name(run, row.client) for row in ordered[:MOST_ROWS]],
        [str(r["round"] + 1) for r in kept],
        row_label="site",
        column_label="round",
        shade=np.clip(np.nan_to_num(values) / (2 * USUAL), 0, 1),
        unit="times the typical",
        caption=f"1 is typical; beyond {USUAL:g} (half intensity) a site is flagged.",
        numbers=False,
        every=math.ceil((len(kept) + 1) / 8),
        run=run_of,
    )
