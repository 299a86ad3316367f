"""The parts of the page about the clients: who holds what, who took part, what went wrong."""

from __future__ import annotations

import numpy as np

from fedtail.report.chart import esc, html_table, scroll
from fedtail.report.comparison import Comparison
from fedtail.report.heatmap import heatmap
from fedtail.runs.record import RunRecord

MOST_ROWS = 50
MOST_CLIENTS = 200
"""Most clients drawn; of more, this many at even distances."""


def federation(comparison: Comparison) -> str:
    """Who holds what, and what its privacy was given."""
    return privacy(comparison) + _holdings(comparison.runs[0])


def _holdings(run: RunRecord) -> str:
    """The client-by-class label map; of a real federation what its sites told."""
    table = run.label_map
    if table is None:
        return (
            "<p>In a real federation, label histograms stay at the sites, so there is no client-by-class map.</p>"
            + scroll(sites_table(run), "Sites")
            + traffic(run)
        )
    counts = run.train_counts if run.train_counts is not None else table.sum(0)
    order = np.argsort(-counts, kind="stable")
    some = _some(len(table))
    shown = table[some][:, order]
    part = f"; {len(some)} of {len(table):,} clients" if len(some) < len(table) else ""
    notes = "".join(f"<li>{esc(n)}</li>" for n in run.clients.get("notes") or [])
    about = f"<ul class='note'>{notes}</ul>" if notes else ""
    return about + heatmap(
        "Training samples by client and class",
        shown,
        [site_name(run, k) for k in some],
        [run.classes[c] for c in order],
        row_label="client",
        column_label="class, most training samples first",
        shade=np.sqrt(shown / max(shown.max(), 1)),
        unit="samples",
        caption=f"Seed {run.seed}, before resampling; stronger colour means more samples, on a square-root "
        f"scale{part}.",
        wide=True,
    )


def privacy(comparison: Comparison) -> str:
    """What privacy the runs' noise bought, where they had some."""
    notes = []
    for contender in comparison.contenders:
        for run in contender.runs:
            if spent := run.history[-1].get("privacy") if run.history else None:
                notes.append(
                    f"<li>{esc(contender.label)}, seed {run.seed}: {esc(spent['mode'])} noise {spent['noise']:g}, "
                    f"(epsilon, delta) = ({spent['epsilon']:.3g}, {spent['delta']:g}) for the updates.</li>"
                )
    return f"<ul>{''.join(notes)}</ul>" if notes else ""


def troubles(comparison: Comparison) -> str:
    """Missing and refused replies, and runs cut short; nothing where nothing went wrong."""
    notes = [f"<li>{esc(n)}</li>" for n in comparison.notes]
    rows = []
    for contender in comparison.contenders:
        for run in contender.runs:
            if not run.finished:
                done = f"{len(run.history)} of {run.rounds} rounds"
                notes.append(
                    f"<li>{esc(contender.label)}, seed {run.seed}: stopped after {done}; the results so far are "
                    "shown.</li>"
                )
            for record in run.history:
                for r in [*record.get("refused", []), *record.get("faults", [])]:
                    who, reason = site_name(run, r.get("client")), str(r.get("reason", ""))
                    rows.append([contender.label, str(run.seed), str(record["round"] + 1), who, reason])
    text = f"<ul>{''.join(notes)}</ul>" if notes else ""
    if not rows:
        return text
    more = f"<p class='note'>The first {MOST_ROWS} of {len(rows)}.</p>" if len(rows) > MOST_ROWS else ""
    table = html_table(["Method", "Seed", "Round", "Client", "Reason"], rows[:MOST_ROWS])
    times = "once" if len(rows) == 1 else f"{len(rows)} times"
    lead = f"<p>A client's reply was missing or refused {times}; the round continued without it.</p>"
    return text + lead + scroll(table, "Missing and refused replies") + more


def sites_table(run: RunRecord) -> str:
    """Each site's samples, the rounds it took part in and those it missed or was refused in."""
    sizes, held = run.clients.get("sizes") or [], run.clients.get("validation_sizes") or []
    rows = []
    for k in _some(len(sizes)):
        took_part = sum(k in record.get("clients", []) for record in run.history)
        missed = sum(any(r.get("client") == k for r in record.get("refused", [])) for record in run.history)
        rows.append(
            [site_name(run, k), f"{sizes[k]:,}", f"{held[k]:,}" if k < len(held) else "–", str(took_part), str(missed)]
        )
    return html_table(["Site", "Training samples", "Validation samples", "Rounds taken part in", "Missed"], rows)


def traffic(run: RunRecord) -> str:
    """What a round moved, where the run recorded it."""
    found = [r["traffic"] for r in run.history if r.get("traffic")]
    if not found:
        return ""
    down, up, exchanges = (float(np.median([t[key] for t in found])) for key in ("down", "up", "exchanges"))
    return (
        f"<p>Each round sent {_bytes(down)} to the sites and {_bytes(up)} back, over all sites, in {exchanges:g} "
        f"exchange{'s' if exchanges != 1 else ''} (medians).</p>"
    )


def revealed(comparison: Comparison) -> str:
    """Why numbers per class are missing, where sites kept them."""
    if not any(run.is_real and run.result and not run.per_class().size for run in comparison.runs):
        return ""
    return (
        "<p class='note'>The sites revealed only totals, so there is accuracy but nothing per class. For more, set "
        "deploy.reveal = 'sums' here and reveal = 'sums' in every site's policy (three sites or more).</p>"
    )


def site_name(run: RunRecord, client: object) -> str:
    """The name of the site behind a client's number, where it has one."""
    sites = run.clients.get("sites") or []
    return str(sites[client]) if isinstance(client, int) and 0 <= client < len(sites) else str(client)


def _some(n_clients: int) -> list[int]:
    """All clients, or ``MOST_CLIENTS`` of them at even distances."""
    return [int(k) for k in np.unique(np.linspace(0, n_clients - 1, min(n_clients, MOST_CLIENTS)).round())]


def _bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"
