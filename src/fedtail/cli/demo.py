"""``fedtail demo``: the first thing to run."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from fedtail.cli.cells import run_with_progress
from fedtail.cli.options import Fresh
from fedtail.cli.progress import console, terminal
from fedtail.cli.tables import bare_table
from fedtail.errors import writing
from fedtail.report import load_run, write_report, write_run_report
from fedtail.report.facts import at_sites
from fedtail.runs.record import TITLES, RunRecord
from fedtail.study.cells import Outcome
from fedtail.study.compare import comparison_cells, method_configs
from fedtail.study.yardsticks import measure_yardsticks

SETTINGS = ("data.label=digit", "data.site=form", "data.test_fraction=0.4")
BEGIN = r"0?123456789"
"""How every form begins; one lacks its first digit."""


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the table, the run and report.html.")] = Path("runs/demo"),
    fresh: Fresh = False,
) -> None:
    """Find the eights in handwriting on 14 forms: each form alone, all together, and with all rows in one place.

    The digits are real (scikit-learn's), and each form that somebody has filled in is a site; one digit in ten is an
    eight.
    """
    began = time.perf_counter()
    table = handwriting()
    file = out / "digits.csv"
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        table.to_csv(file, index=False)
    typer.echo(f"{len(table):,} handwritten digits on {table['form'].nunique()} forms; each form is a site: {file}")
    named = {"data.name": "table", "data.path": str(file)}
    cells = comparison_cells(method_configs(("trees",), None, SETTINGS, named), 1)
    (done,) = run_with_progress("demo", cells, out, workers=1, fresh=fresh)
    run = load_run(done.folder)
    alone, pooled = (measure(done, run, out, kind) for kind in ("alone", "boosting"))
    together, total = found_at(run), np.array(run.confusion, dtype=int)
    shown = bare_table("eights in held-out rows", "there", "alone", "together", "all rows in one place")
    for form, rows in alone.items():
        shown.add_row(form, *map(str, (rows[0].sum(), rows[0, 0], together[form], pooled[form][0, 0])))
    every = [np.sum([*alone.values()], axis=0), total, np.sum([*pooled.values()], axis=0)]
    shown.add_section()
    shown.add_row("all forms", *map(str, (total[0].sum(), *(m[0, 0] for m in every))), style="bold")
    shown.add_row("taken for an eight in vain", "", *(str(m[1, 0]) for m in every))
    for column in shown.columns[1:]:
        column.justify = "right"
    terminal().print(shown)
    typer.echo(
        f"Alone the forms find {every[0][0, 0]} of {total[0].sum()} eights, together {total[0, 0]}: by trees grown "
        "from sums over all forms; no row has left its form.\nThe last column is scikit-learn's gradient boosting."
    )
    write_run_report(run.folder)  # which also writes the model card
    page = write_report([run], out / "report.html", "fedtail demo: eights in the handwriting on 14 forms")
    seconds = time.perf_counter() - began
    typer.echo(f"{seconds:.0f} s; open {page} in a browser; the model card is {run.folder / 'model-card.md'}")


def measure(done: Outcome, run: RunRecord, out: Path, kind: str) -> dict[str, np.ndarray]:
    """Site -> (2, 2) counts on its own test rows by a yardstick; row = true class, the eights first."""
    with console.status(TITLES[kind]):
        (found,) = measure_yardsticks(done.cell.config, run, out, (kind,))
    return {site: np.array(rows) for site, rows in found.confusions.items()}


def found_at(run: RunRecord) -> dict[str, int]:
    """How many of each site's own eights the federated model finds: its recall, in cases."""
    return {site.name: round(site.support[0] * site.values["per_class_accuracy"][0]) for site in at_sites(run)[1]}


def handwriting() -> pd.DataFrame:
    """scikit-learn's digits as a table: 64 pixels from 0 to 1, the form, and whether the digit is an eight.

    Every form asks for the same digits in the same order and the forms follow each other, so the order of the labels
    shows where one begins.
    """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    starts = np.array([m.start() for m in re.finditer(BEGIN, "".join(map(str, y)))])
    starts = starts[np.diff(starts, prepend=-100) >= 100]  # the digits stand in order twice on a form
    form = np.searchsorted(starts, np.arange(len(y)), side="right")
    table = pd.DataFrame(x / 16, columns=[f"pixel {i // 8}.{i % 8}" for i in range(64)])
    return table.assign(form=[f"form {k:02d}" for k in form], digit=np.where(y == 8, "eight", "other"))
