"""The part of the page about what each site does to the model: its weight, where it pulls, whether it stands out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from fedtail.plots import Heat, Rows, Series
from fedtail.report.blocks import Block, Cell, Charts, Fold, Table, Text
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.pictures import curve, own_colour, site_name
from fedtail.rounds.history import influence_of
from fedtail.runs.record import RunRecord
from fedtail.words import number, times

MOST_ROWS = 60
MOST_ROUNDS = 60
USUAL = 3.0
"""Distances from the other sites' updates, over their median, that are still usual."""
HEAD = ("Site", "Rounds", "Share of the step", "Weight", "By samples", "Cosine", "Distance", "Flagged", "Refused", "")
NOTE = (
    "Weight: the weight of a site's update in the new model; by samples: the weight its size would give. "
    "Cosine: with the sum of the other sites' updates. Distance: from the centre of all updates, where 1 is typical. "
    f"Rounds beyond {USUAL:g}, or with an update opposed to all others (cosine near -1), are flagged."
)
Row = Mapping[str, Any]
LISTS = ("norm", "cosine", "weight", "claimed", "share", "distance")


def influence(comparison: Comparison, metric: str) -> list[Block]:
    """Outliers first, in words; then every site's part of the step, its rounds, and the alignment of all."""
    warnings: list[Block] = []
    tables: list[Block] = []
    for one in comparison.contenders:
        rows = influences(one.runs[0])
        if any(math.isfinite(row["share"]) for row in rows):
            who = own_colour(comparison, one)
            outliers = _outliers(one, rows, who is not None)
            content = _of_run(one, rows, who)
            tables += content if who is None else [Fold(one.label, content, is_open=bool(outliers), run=who)]
            warnings += outliers
    if tables and not warnings:
        warnings = [Text("No site stands out: none is consistently far from the others, and none is often refused.")]
    about = (
        "Mean cosine between a client's update and the aggregate: 1 if all clients agree, 1/√K if their updates are "
    )
    look = {"ceiling": 1.0, "caption": f"{about}unrelated."}
    aligned = curve(comparison, "alignment", "Alignment of the clients' updates", "mean cosine", **look)
    return [*warnings, *tables, Text(NOTE if tables else "", "note"), Charts([aligned])]


def influences(run: RunRecord) -> list[dict[str, Any]]:
    """Return a row per client that took part or was refused: its means over the rounds, NaN where not recorded."""
    sums = influence_of(run.history, run.rate_path().shape[1])
    keys = [key for key in sums if key != "outliers"]
    rows = [dict(zip(keys, values, strict=True)) for values in zip(*(sums[key] for key in keys), strict=True)]
    missing = {key: math.nan for key in LISTS if not any((r.get("influence") or {}).get(key) for r in run.history)}
    return [
        {**row, **missing, "stands_out": row["clients"] in sums["outliers"]}
        for row in rows
        if row["rounds"] or row["refused"]
    ]


def _outliers(one: Contender, rows: Sequence[Row], several: bool) -> list[Text]:
    out = []
    for row in rows:
        if not row["stands_out"]:
            continue
        why = [f"far from the others in {row['flagged']} of {row['rounds']} rounds"] if row["flagged"] else []
        if math.isfinite(row["distance"]) and row["distance"] > USUAL:
            why.append(f"{row['distance']:.1f} times the typical distance on average")
        if math.isfinite(row["cosine"]) and row["cosine"] < 0:
            why.append(f"pulls against the others (cosine {row['cosine']:+.2f})")
        why += [f"refused {times(row['refused'])}"] if row["refused"] else []
        who, name = f"{one.label}: " if several else "", site_name(one.runs[0], row["clients"])
        out.append(Text(Markup("{}<b>{}</b> stands out: {}.").format(who, name, ", ".join(why)), "warning"))
    return out


def _of_run(one: Contender, rows: Sequence[Row], who: int | None) -> list[Block]:
    run = one.runs[0]
    ordered = sorted(rows, key=lambda row: (-row["stands_out"], -np.nan_to_num(row["share"])))
    names = [site_name(run, row["clients"]) for row in ordered]
    shown = ordered[:MOST_ROWS]
    claimed = np.array([row["claimed"] for row in shown])
    if not np.isfinite(claimed).any():
        claimed = run.weights[[row["clients"] for row in shown]]
    series = [
        Series("share of the samples", 0, claimed),
        Series("share of the step", 1, np.array([row["share"] for row in shown])),
    ]
    title, named = "How much each site moves the model", names[: len(shown)]
    chart = Rows(
        title,
        named,
        series,
        "share",
        "site",
        whole=False,
        link=True,
        caption=f"Seed {run.seed}, mean over the rounds. A site that moves the model more than its sample count "
        "explains has large updates, or updates unlike the others'.",
        run=who,
    )
    cells: list[list[str | Cell]] = [
        [
            name,
            str(row["rounds"]),
            *(number(v) for v in (row["share"], row["weight"], row["claimed"], row["cosine"], row["distance"])),
            Cell(str(row["flagged"]), look="worse" if row["flagged"] else ""),
            Cell(str(row["refused"]), look="worse" if row["refused"] else ""),
            Cell("stands out" if row["stands_out"] else "", look="worse"),
        ]
        for name, row in zip(names, ordered, strict=True)
    ]
    table = Table(HEAD, cells, f"{one.label}: influence of sites", runs=[who] * len(cells) if who is not None else ())
    return [Charts([c for c in (chart, _distances(run, ordered, who)) if c], "packed"), table]


def _distances(run: RunRecord, ordered: Sequence[Row], who: int | None) -> Heat | None:
    """Draw the distance to the other sites, round by round: when did a site begin to stand out?"""
    records = [r for r in run.history if (r.get("influence") or {}).get("distance")]
    if len(records) < 2:
        return None
    kept = [records[i] for i in np.unique(np.linspace(0, len(records) - 1, MOST_ROUNDS).round().astype(int))]
    place = {row["clients"]: i for i, row in enumerate(ordered[:MOST_ROWS])}
    values = np.full((len(place), len(kept)), math.nan)
    for column, record in enumerate(kept):
        for k, distance in zip(record["clients"], record["influence"]["distance"], strict=False):
            if k in place and distance is not None:
                values[place[k], column] = distance
    return Heat(
        "Distance from the other sites, round by round",
        values.round(2),
        [site_name(run, row["clients"]) for row in ordered[:MOST_ROWS]],
        [str(r["round"] + 1) for r in kept],
        "site",
        "round",
        shade=np.clip(np.nan_to_num(values) / (2 * USUAL), 0, 1),
        unit="times the typical",
        numbers=False,
        every=math.ceil((len(kept) + 1) / 8),
        caption=f"1 is typical; beyond {USUAL:g} (half intensity) a site is flagged.",
        run=who,
    )
