"""The part of the page about what each site does to the model: its weight, where it pulls, whether it stands out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from fedtail.report.blocks import Block, Cell, Charts, Fold, Table, Text
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.pictures import curve, site_name
from fedtail.rounds.history import influence_of
from fedtail.runs.record import RunRecord
from fedtail.words import number, times

USUAL = 3.0
"""Distances from the other sites' updates, over their median, that are still usual."""
HEAD = ("Site", "Rounds", "Share of the step", "Weight", "By samples", "Cosine", "Distance", "Flagged", "Refused", "")
NOTE = (
    "Means over the rounds. Weight: that of a site's update in the new model; by samples: what its size would give. "
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
            outliers, who = _outliers(one, rows, comparison.several), comparison.own_colour(one)
            table = _table(one, rows)
            tables.append(Fold(one.label, [table], is_open=bool(outliers), run=who) if comparison.several else table)
            warnings += outliers
    if tables and not warnings:
        warnings = [Text("No site stands out: none is consistently far from the others, and none is often refused.")]
    about = "Mean cosine between a client's update and the aggregate: 1 if clients agree, 1/√K if they are unrelated."
    title, label = "Alignment of the clients' updates", "mean cosine"
    aligned = curve(comparison, "alignment", title, label, ceiling=1.0, caption=about)
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


def _table(one: Contender, rows: Sequence[Row]) -> Table:
    cells: list[list[str | Cell]] = [
        [
            site_name(one.runs[0], row["clients"]),
            str(row["rounds"]),
            *(number(row[key]) for key in ("share", "weight", "claimed", "cosine", "distance")),
            Cell(str(row["flagged"]), look="worse" if row["flagged"] else ""),
            Cell(str(row["refused"]), look="worse" if row["refused"] else ""),
            Cell("stands out" if row["stands_out"] else "", look="worse"),
        ]
        for row in sorted(rows, key=lambda row: (-row["stands_out"], -np.nan_to_num(row["share"])))
    ]
    return Table(cells, HEAD, f"{one.label}: influence of sites")
