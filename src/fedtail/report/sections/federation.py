"""The parts of the page about the clients: who holds what, who took part, what went wrong."""

from __future__ import annotations

import numpy as np

from fedtail.report.blocks import Block, Charts, Items, Table, Text
from fedtail.report.comparison import Comparison
from fedtail.report.pictures import label_map, site_name, some_of
from fedtail.runs.record import RunRecord
from fedtail.words import plural, size, times

MOST_ROWS = 50


def federation(comparison: Comparison, metric: str) -> list[Block]:
    """Who holds what, and what its privacy was given."""
    run = comparison.runs[0]
    chart = label_map(run)
    spent = Items(list(privacy(comparison)))
    if chart is not None:
        return [spent, Items([str(note) for note in run.clients.get("notes") or []], "note"), Charts([chart])]
    text = "In a real federation, label histograms stay at the sites, so there is no client-by-class map."
    return [spent, Text(text), sites_table(run), traffic(run)]


def privacy(comparison: Comparison) -> list[str]:
    """Return what privacy the runs' noise bought, where they had some."""
    notes = []
    for contender in comparison.contenders:
        for run in contender.runs:
            if spent := run.history[-1].get("privacy") if run.history else None:
                notes.append(
                    f"{contender.label}, seed {run.seed}: {spent['mode']} noise {spent['noise']:g}, (epsilon, delta) = "
                    f"({spent['epsilon']:.3g}, {spent['delta']:g}) for the updates."
                )
    return notes


def troubles(comparison: Comparison, metric: str) -> list[Block]:
    """Missing and refused replies, and runs cut short; nothing where nothing went wrong."""
    notes, rows = [str(note) for note in comparison.notes], []
    for contender in comparison.contenders:
        for run in contender.runs:
            if not run.finished:
                done = f"{len(run.history)} of {run.rounds} rounds"
                notes.append(f"{contender.label}, seed {run.seed}: stopped after {done}; the results so far are shown.")
            for record in run.history:
                for r in [*record.get("refused", []), *record.get("faults", [])]:
                    who, reason = site_name(run, r.get("client")), str(r.get("reason", ""))
                    rows.append([contender.label, str(run.seed), str(record["round"] + 1), who, reason])
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
    moved = [r["traffic"] for r in run.history if r.get("traffic")]
    if not moved:
        return Text("")
    down, up, exchanges = (float(np.median([t[key] for t in moved])) for key in ("down", "up", "exchanges"))
    return Text(
        f"Each round sent {size(down)} to the sites and {size(up)} back, over all sites, in "
        f"{plural(exchanges, 'exchange')} (medians)."
    )
