"""One self-contained HTML page: no network, no fonts, no chart library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from fedtail.errors import writing
from fedtail.report import classes, decisions, federation, influence, rates, sections, sites, yardsticks
from fedtail.report.chart import colour, esc, run_mark
from fedtail.report.comparison import Comparison, comparisons, require_runs
from fedtail.report.series import palette
from fedtail.runs.record import RunRecord

PARTS: tuple[tuple[str, str, Callable[..., str]], ...] = (
    ("yardsticks", "Alone or together", yardsticks.yardsticks),
    ("results", "Results", sections.results),
    ("sites", "Sites", sites.sites),
    ("classes", "Classes", classes.classes),
    ("decisions", "Decisions", decisions.decisions),
    ("confusion", "Confusion", classes.confusion),
    ("curves", "Learning curves", sections.curves),
    ("race", "Learning rate and batches", sections.races),
    ("rates", "Resampling rates", rates.rates),
    ("influence", "Influence", influence.influence),
    ("federation", "Federation", federation.federation),
    ("trouble", "What went wrong", federation.troubles),
    ("timings", "Timings", sections.timings),
    ("settings", "Settings", sections.configuration),
)
"""What a reader asks first comes first; how it came about is below."""
TESTED = ("yardsticks", "results")
"""The parts that speak of the metric that is tested."""

MANY = 5
"""Methods beyond which they can be filtered by name."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
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
    require_runs(runs)
    return write_text(Path(path), render(comparisons(runs, baseline), title, metric))


def write_text(path: Path, text: str) -> Path:
    """Write a file that the user named, with its folder."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def render(found: Sequence[Comparison], title: str, metric: str = "macro_f1") -> str:
    """The page as text."""
    body, links = [], []
    for i, comparison in enumerate(found):
        prefix = f"p{i}-" if len(found) > 1 else ""
        body.append("<div class='comparison'>")
        if prefix:
            body.append(f'<h1 class="problem" id="{prefix}top">{esc(comparison.title)}</h1>')
            links.append(f'<a href="#{prefix}top">{esc(comparison.title)}</a>')
        body.append(_filter(comparison))
        for key, name, section in PARTS:
            content = section(comparison, metric) if key in TESTED else section(comparison)
            if not content:
                continue
            body.append(f'<section id="{prefix}{key}"><h2>{name}</h2>{content}</section>')
            if not prefix:
                links.append(f'<a href="#{key}">{name}</a>')
        body.append("</div>")
    style, script = _asset("page.css"), _asset("page.js")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="generator" content="fedtail">'
        f'<link rel="icon" href="data:,"><title>{esc(title)}</title><style>{style}</style></head>\n<body>'
        '<a class="skip" href="#main">Skip to the results</a>'
        f'<header><div class="bar"><nav aria-label="Sections" tabindex="-1">{"".join(links)}</nav>'
        '<button id="theme" type="button" aria-label="Switch between light and dark">'
        '<svg viewBox="0 0 20 20" aria-hidden="true"><circle cx="10" cy="10" r="7"/>'
        '<path d="M10 3a7 7 0 0 1 0 14z"/></svg>'
        f"</button></div></header>\n<main id='main'><h1>{esc(title)}</h1>{_facts(found)}{''.join(body)}</main>"
        '<footer>Made by fedtail from run folders. Everything on this page is inside this one file.</footer>'
        '<div id="tip" role="status" aria-live="polite" hidden></div>'
        f"<script>{script}</script></body></html>\n"
    )  # fmt: skip


def _filter(comparison: Comparison) -> str:
    """Which methods the page shows: a button each and, where there are many, a field to type part of a name in."""
    colours = palette(comparison)
    if len(colours) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" aria-pressed="true"{run_mark(c)}><span class="swatch c{colour(c)}"></span>'
        f"{esc(label)}</button>"
        for label, c in colours.items()
    )
    field = "<input type='search' placeholder='Filter' aria-label='Show methods whose name has' size='10'>"
    every = "<button type='button' class='every'>All</button>"
    return (
        "<div class='filter' role='group' aria-label='Methods shown on the page'><span>Show</span>"
        f"{field if len(colours) > MANY else ''}{buttons}{every}<span class='count' role='status'></span></div>"
    )


def _facts(found: Sequence[Comparison]) -> str:
    runs = [r for c in found for r in c.runs]
    rounds = sorted({r.rounds for r in runs})
    seeds = len({r.seed for r in runs})
    facts = [found[0].title] if len(found) == 1 else [f"{len(found)} problems"]
    models = sorted({str(m) for r in runs if (m := r.setting("model", "name")) not in (None, "auto")})
    facts += [", ".join(models)] if models else []
    facts += [", ".join(encoders)] if (encoders := sorted({r.encoder for r in runs if r.encoder})) else []
    one = f"{rounds[0]} round{'s' if rounds[0] != 1 else ''}"
    facts.append(one if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds")
    facts.append(f"{len(runs)} run{'s' if len(runs) != 1 else ''}, {seeds} seed{'s' if seeds != 1 else ''}")
    return "<p class='facts'>" + "".join(f"<span>{esc(f)}</span>" for f in facts) + "</p>"


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
