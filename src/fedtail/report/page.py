"""The files of a report: one self-contained HTML page, without network, fonts or a chart library, and a model card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtail.errors import writing
from fedtail.files import write_atomically
from fedtail.report.blocks import Block, Section, template
from fedtail.report.comparison import Comparison, comparisons
from fedtail.report.facts import SMALL, in_short, provenance
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
    parts = []
    for i, comparison in enumerate(compared):
        sections = [Section(key, name, blocks) for key, name, draw in PARTS if any(blocks := draw(comparison, metric))]
        prefix = f"p{i}-" if len(compared) > 1 else ""
        parts.append({"prefix": prefix, "comparison": comparison, "sections": sections})
    dates = _dates([run for one in compared for run in one.runs])
    return page(title, parts, _facts(compared), f"from run folders{f', {dates[-1]}' if dates else ''}", live)


def page(
    title: str, parts: Sequence[Mapping[str, Any]], facts: Sequence[str], origin: str, live: str | None = None
) -> str:
    """Return a page of parts with sections as text; ``origin``: what it was made from; ``live``: what a page that is
    served while its run goes on knows its state by."""
    values = {"title": title, "parts": parts, "facts": facts, "origin": origin, "live": live}
    return template("page.html", **values, version=VERSION, many=MANY)


def _facts(compared: Sequence[Comparison]) -> list[str]:
    runs = [r for c in compared for r in c.runs]
    rounds = sorted({r.rounds for r in runs})
    facts = [compared[0].title] if len(compared) == 1 else [plural(len(compared), "problem")]
    models = sorted({r.model for r in runs if r.model not in ("auto", "trees") and not r.encoder})
    facts += [", ".join(models)] if models else []
    facts += [", ".join(encoders)] if (encoders := sorted({r.encoder for r in runs if r.encoder})) else []
    facts.append(plural(rounds[0], "round") if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds")
    facts.append(f"{plural(len(runs), 'run')}, {plural(len({r.seed for r in runs}), 'seed')}")
    return facts + [date[:10] for date in _dates(runs)[-1:]]


def _dates(runs: Sequence[RunRecord]) -> list[str]:
    return sorted(value for run in runs for key, value in provenance(run) if key == "date")


CARD = "model-card.md"


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
        classes=class_table(comparison, run) if support.size else "",
        metrics=headline(comparison).block(test=False),
        sites=site_table(run),
        thin=[name for name, n in tested if 0 < n < SMALL],
        untested=[name for name, n in tested if not n],
        decision=decisions.decided(run),
        privacy=privacy(comparison),
    )


def write_card(run: RunRecord) -> Path:
    """Write the card into the run's folder and return its path."""
    path = run.folder / CARD
    write_atomically(path, model_card(run))
    return path
