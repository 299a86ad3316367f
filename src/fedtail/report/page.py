"""The files of a report: one self-contained HTML page, without network, fonts or a chart library, and a model card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedtail.errors import writing
from fedtail.files import write_atomically
from fedtail.report.blocks import Block, Section, source, template
from fedtail.report.comparison import Comparison, comparisons
from fedtail.report.facts import in_short, provenance
from fedtail.report.pictures import class_order
from fedtail.report.sections import classes, decisions, federation, rates, results, sites, yardsticks
from fedtail.report.sections.classes import class_table
from fedtail.report.sections.federation import privacy
from fedtail.report.sections.sites import site_table
from fedtail.report.sections.yardsticks import verdict_of_federating
from fedtail.report.tables import headline
from fedtail.runs.record import RunRecord
from fedtail.version import VERSION
from fedtail.words import plural

PARTS: tuple[tuple[str, str, Callable[[Comparison, str], list[Block]]], ...] = (
    ("yardsticks", "Alone vs. federated", yardsticks.yardsticks),
    ("results", "Results", results.results),
    ("sites", "Sites", sites.sites),
    ("classes", "Classes", classes.classes),
    ("decisions", "Decisions", decisions.decisions),
    ("confusion", "Confusion", classes.confusion),
    ("columns", "Columns", classes.columns),
    ("curves", "Learning curves", results.curves),
    ("race", "Learning rate and batches", results.races),
    ("rates", "Resampling rates", rates.rates),
    ("influence", "Influence", federation.influence),
    ("federation", "Federation", federation.federation),
    ("trouble", "What went wrong", federation.troubles),
    ("timings", "Timings", results.timings),
    ("settings", "How to get the same", results.configuration),
)
"""What a reader asks first comes first; how it came about is below."""
MANY = 5
"""Methods beyond which they can be filtered by name."""
POLICY = Markup("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:")
"""The page itself forbids any request: what it shows is all inside."""


def write_report(
    runs: Sequence[RunRecord], path: Path, title: str, *, baseline: str | None = None, metric: str = "macro_f1"
) -> Path:
    """Write the report of some runs and return its path.

    Args:
        runs: as ``load_run`` reads them; runs on different data are compared separately.
        path: the HTML file; its folder is made if needed.
        title: heading of the page.
        baseline: label of the contender to compare with; by default FedAvg, else the first.
        metric: the one that is tested against the baseline.
    """
    return write_text(Path(path), render(comparisons(runs, baseline), title, metric))


def write_text(path: Path, text: str) -> Path:
    """Write a file that the user named, with its folder."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def render(compared: Sequence[Comparison], title: str, metric: str = "macro_f1", *, live: str | None = None) -> str:
    """Return the page of comparisons as text; ``live``: see ``page``."""
    parts, links = [], []
    for i, comparison in enumerate(compared):
        prefix = f"p{i}-" if len(compared) > 1 else ""
        sections = [Section(key, name, blocks) for key, name, draw in PARTS if any(blocks := draw(comparison, metric))]
        links += [(f"{prefix}top", comparison.title)] if prefix else [(s.key, s.title) for s in sections]
        parts.append({"prefix": prefix, "comparison": comparison, "sections": sections})
    dates = sorted(value for c in compared for r in c.runs for key, value in provenance(r) if key == "date")
    when = f", {dates[-1]}" if dates else ""
    return page(title, parts, links, _facts(compared), f"from run folders{when}", live)


def page(
    title: str,
    parts: Sequence[Mapping[str, Any]],
    links: Sequence[tuple[str, str]],
    facts: Sequence[str],
    origin: str,
    live: str | None = None,
) -> str:
    """Return a page of parts with sections as text; ``links`` are (place, name), ``origin`` what it was made from;
    ``live``: what a page that is served while its run goes on knows its state by."""
    return template(
        "page.html",
        title=title,
        policy=POLICY if live is None else POLICY + Markup("; connect-src 'self'"),
        version=VERSION,
        style=source("page.css"),
        script=source("page.js"),
        links=links,
        facts=facts,
        parts=parts,
        many=MANY,
        live=live,
        made=f"Made by fedtail {VERSION} {origin}. This page is self-contained.",
    )


def _facts(compared: Sequence[Comparison]) -> list[str]:
    runs = [r for c in compared for r in c.runs]
    rounds = sorted({r.rounds for r in runs})
    facts = [compared[0].title] if len(compared) == 1 else [plural(len(compared), "problem")]
    models = sorted({r.model for r in runs if r.model not in ("auto", "trees") and not r.encoder})
    facts += [", ".join(models)] if models else []
    facts += [", ".join(encoders)] if (encoders := sorted({r.encoder for r in runs if r.encoder})) else []
    facts.append(plural(rounds[0], "round") if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds")
    facts.append(f"{plural(len(runs), 'run')}, {plural(len({r.seed for r in runs}), 'seed')}")
    dates = sorted(value[:10] for r in runs for key, value in provenance(r) if key == "date")
    return facts + ([dates[-1]] if dates else [])


CARD = "model-card.md"
SMALL = 30
"""Test samples of a class below which its numbers are called uncertain."""


def model_card(run: RunRecord) -> str:
    """Return the card as Markdown."""
    (comparison,) = comparisons([run])
    support = run.per_class("support")
    tested = [(run.classes[c], support[c]) for c in class_order(run) if support.size]
    return template(
        "model-card.md",
        run=run,
        title=comparison.title,
        short=in_short(comparison),
        gain=verdict_of_federating(comparison, pooled=False),
        origin=provenance(run),
        n_sites=len(run.clients.get("sites") or []),
        sizes=[int(n) for n in run.clients.get("sizes") or []],
        classes=class_table(comparison, run) if support.size else "",
        metrics=headline(comparison).block(test=False),
        sites=site_table(run),
        thin=[name for name, n in tested if 0 < n < SMALL],
        untested=[name for name, n in tested if not n],
        decision=decisions.decided(run),
        privacy=privacy(comparison),
        verdict=(run.result.get("verdict") or {}).get("said", ""),
        notes=[str(note) for note in run.clients.get("notes") or []],
    )


def write_card(run: RunRecord) -> Path:
    """Write the card into the run's folder and return its path."""
    path = run.folder / CARD
    write_atomically(path, model_card(run))
    return path
