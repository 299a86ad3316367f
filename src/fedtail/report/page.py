"""One self-contained HTML page: no network, no fonts, no chart library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from fedtail.errors import writing
from fedtail.report import federation, rates, sections, yardsticks
from fedtail.report.chart import esc
from fedtail.report.comparison import Comparison, comparisons, require_runs
from fedtail.runs.record import RunRecord

PARTS: tuple[tuple[str, str, Callable[[Comparison], str]], ...] = (
    ("results", "Results", sections.results),
    ("yardsticks", "Alone or together", yardsticks.yardsticks),
    ("curves", "Learning curves", sections.curves),
    ("classes", "Classes", sections.classes),
    ("confusion", "Confusion", sections.confusion),
    ("race", "Learning rate", sections.races),
    ("rates", "Resampling rates", rates.rates),
    ("alignment", "Alignment", sections.alignment),
    ("federation", "Federation", federation.federation),
    ("trouble", "What went wrong", federation.troubles),
    ("timings", "Timings", sections.timings),
    ("settings", "Settings", sections.configuration),
)

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
        if prefix:
            body.append(f'<h1 class="problem" id="{prefix}top">{esc(comparison.title)}</h1>')
            links.append(f'<a href="#{prefix}top">{esc(comparison.title)}</a>')
        for key, name, section in PARTS:
            content = sections.results(comparison, metric) if key == "results" else section(comparison)
            if not content:
                continue
            body.append(f'<section id="{prefix}{key}"><h2>{name}</h2>{content}</section>')
            if not prefix:
                links.append(f'<a href="#{key}">{name}</a>')
    style, script = _asset("page.css"), _asset("page.js")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="generator" content="fedtail">'
        f'<link rel="icon" href="data:,"><title>{esc(title)}</title><style>{style}</style></head>\n<body>'
        '<a class="skip" href="#main">Skip to the results</a>'
        f'<header><div class="bar"><nav aria-label="Sections">{"".join(links)}</nav>'
        '<button id="theme" type="button" aria-label="Switch between light and dark">'
        '<svg viewBox="0 0 20 20" aria-hidden="true"><circle cx="10" cy="10" r="7"/>'
        '<path d="M10 3a7 7 0 0 1 0 14z"/></svg>'
        f"</button></div></header>\n<main id='main'><h1>{esc(title)}</h1>{_facts(found)}{''.join(body)}</main>"
        '<footer>Made by fedtail from run folders. Everything on this page is inside this one file.</footer>'
        '<div id="tip" role="status" aria-live="polite" hidden></div>'
        f"<script>{script}</script></body></html>\n"
    )  # fmt: skip


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
