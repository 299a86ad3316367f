"""``fedtail report``: a page, tables and figures from run folders."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from fedtail.cli.tables import print_table
from fedtail.core.metrics import METRICS, lacking
from fedtail.errors import FedtailError, one_of, writing
from fedtail.report.comparison import Comparison, comparisons
from fedtail.report.figures import write_figures
from fedtail.report.page import render, write_text
from fedtail.report.tables import headline, tested, to_csv, to_latex, to_markdown
from fedtail.runs.record import load_runs

SUFFIXES = {".html": "html", ".htm": "html", ".md": "md", ".tex": "latex", ".csv": "csv"}
FORMATS = ("html", "md", "latex", "csv", "pdf", "svg")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that contain them.")],
    out: Annotated[Path | None, typer.Option(help="File to write; for pdf and svg, a folder for the figures.")] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help=f"{', '.join(FORMATS)}; defaults to the extension of --out."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    baseline: Annotated[str | None, typer.Option(help="Method to compare with, as named in the table.")] = None,
    metric: Annotated[
        str, typer.Option(help=f"Metric to test against the baseline: {', '.join(tested())}.")
    ] = "macro_f1",
) -> None:
    """Compare runs: a self-contained page, tables for papers, vector figures.

    `fedtail report runs/*` writes report.html; `--format latex` prints a table; `--format pdf --out figures` draws
    figures. Runs are grouped by data, then by method, rates and whatever else differs; seeds give mean and spread.
    """
    form = _format(form, out)
    if metric not in tested():
        raise one_of("metric", metric, tested())
    compared = comparisons(load_runs(runs), baseline)
    if METRICS[metric].needs and not all(math.isfinite(one.mean(metric)) for c in compared for one in c.contenders):
        raise lacking(METRICS[metric], f"--metric {metric}")
    if form in ("md", "latex", "csv"):
        tables = [headline(p, metric) for p in compared]
        text = to_csv(compared) if form == "csv" else to_latex(tables) if form == "latex" else to_markdown(tables)
        if out is None:
            typer.echo(text, nl=False)
        else:
            write_text(out, text)
    elif form == "html":
        target = out or Path("report.html")
        write_text(target, render(compared, title or _title(compared), metric))
        for comparison in compared:
            print_table(headline(comparison, metric))
        typer.echo(f"report  {target}")
    else:
        folder = out or Path("figures")
        with writing(folder):
            written = write_figures(compared, folder, form)
        for path in written:
            typer.echo(path)


def _format(form: str | None, out: Path | None) -> str:
    if form is None:
        ending = out.suffix.lower() if out is not None else ".html"
        if ending not in SUFFIXES:
            raise FedtailError(f"--out {str(out)!r} does not determine the format; add --format ({', '.join(FORMATS)})")
        return SUFFIXES[ending]
    if form not in FORMATS:
        raise one_of("format", form, FORMATS)
    return form


def _title(compared: list[Comparison]) -> str:
    first = compared[0]
    return "Comparison of methods" if len(first.contenders) > 1 else f"{first.reference.label} on {first.title}"
