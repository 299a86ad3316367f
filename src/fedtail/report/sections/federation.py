"""The parts of the page about the clients: who holds what, who took part, what went wrong, who moves the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from fedtail.report.blocks import Block, Cell, Charts, Items, Table, Text, folded, map_of, say
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.pictures import curve, label_map, site_name, some_of
from fedtail.rounds.history import influence_of
from fedtail.runs.record import RunRecord
from fedtail.words import number, times

MOST_ROWS = 50


def federation(comparison: Comparison, metric: str) -> list[Block]:
    """Who holds what, and what its privacy was given."""
    run = comparison.runs[0]
    chart = label_map(run)
    spent = Items(list(privacy(comparison)))
    if chart is not None:
        return [
            spent,
            Items([str(note) for note in run.clients.get("notes") or []], "note"),
            Text(f"{chart.title}. {chart.caption}", "note"),
            map_of(chart),
        ]
    text = "In a real federation, label histograms stay at the sites, so there is no client-by-class map."
    return [spent, Text(text), sites_table(run), traffic(run)]


def privacy(comparison: Comparison) -> list[str]:
    """Return what privacy the runs' noise bought, where they had some."""
    return [
        f"{one.label}, seed {comparison.seed(run)}: {spent['mode']} noise {spent['noise']:g}, "
        f"(epsilon, delta) = ({spent['epsilon']:.3g}, {spent['delta']:g}) for "
        f"{'all sums' if spent['mode'] == 'shares' else 'the updates'}."
        for one, run in comparison.each
        if (spent := run.result.get("privacy") or (run.history[-1].get("privacy") if run.history else None))
    ]


def troubles(comparison: Comparison, metric: str) -> list[Block]:
    """Missing and refused replies, and runs cut short; nothing where nothing went wrong."""
    notes = [
        f"{one.label}, seed {comparison.seed(run)}: stopped after {len(run.history)} of {run.rounds} rounds; "
        "the results so far are shown."
        for one, run in comparison.each
        if not run.finished
    ]
    notes = [*comparison.notes, *notes]
    rows = [
        [one.label, seed, str(record["round"] + 1), site_name(run, r.get("client")), str(r.get("reason", ""))]
        for one, run in comparison.each
        for seed in [comparison.seed(run)]
        for record in run.history
        for r in [*record.get("refused", []), *record.get("faults", [])]
    ]
    if not rows:
        return [Items(notes)]
    lead = f"A client's reply was missing or refused {times(len(rows))}; the round continued without it."
    part = f"The first {MOST_ROWS} of {len(rows)}." if len(rows) > MOST_ROWS else ""
    head = ["Method", "Seed", "Round", "Client", "Reason"]
    return [Items(notes), Text(lead), Table(rows[:MOST_ROWS], head, "Missing and refused replies"), Text(part, "note")]


def sites_table(run: RunRecord) -> Table:
    """Each site's samples and the rounds it took part in."""
    sizes, held = run.clients.get("sizes") or [], run.clients.get("validation_sizes") or []
    rows = []
    for k in some_of(len(sizes)) if sizes else ():
        took_part = sum(k in record.get("clients", []) for record in run.history)
        rows.append([site_name(run, k), f"{sizes[k]:,}", f"{held[k]:,}" if k < len(held) else "–", str(took_part)])
    return Table(rows, ["Site", "Training samples", "Validation samples", "Rounds taken part in"], "Sites")


def traffic(run: RunRecord) -> Text:
    """What a round moved, where the run recorded it."""
    moved = pd.DataFrame([r["traffic"] for r in run.history if r.get("traffic")])
    return Text("" if moved.empty else say("traffic", **moved[["down", "up", "exchanges"]].median()))


USUAL = 3.0
"""Distances from the other sites' updates, over their median, that are still usual."""
HEAD = ("Site", "Rounds", "Share of the step", "Weight", "By samples", "Cosine", "Distance", "Flagged", "Refused", "")
Row = Mapping[str, Any]
LISTS = ("norm", "cosine", "weight", "claimed", "share", "distance")


def influence(comparison: Comparison, metric: str) -> list[Block]:
    """Outliers first, in words; then every site's part of the step, its rounds, and the alignment of all."""
    warnings: list[Block] = []
    tables: list[Block] = []
    for one in comparison.contenders:
        rows = influences(one.runs[0])
        if any(math.isfinite(row["share"]) for row in rows):
            outliers, who = _outliers(one, rows, comparison.several), comparison.filtered.get(one.label)
            table = _table(one, rows)
            tables.append(folded(one.label, table, who, is_open=bool(outliers)))
            warnings += outliers
    if tables and not warnings:
        warnings = [Text("No site stands out: none is consistently far from the others, and none is often refused.")]
    about = "Mean cosine between a client's update and the aggregate: 1 if clients agree, 1/√K if they are unrelated."
    title, label = "Alignment of the clients' updates", "mean cosine"
    aligned = curve(comparison, "alignment", title, label, ceiling=1.0, caption=about)
    return [*warnings, *tables, Text(say("influence", usual=USUAL) if tables else "", "note"), Charts([aligned])]


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
