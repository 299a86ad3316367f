"""``fedtail evaluate``: a trained model on labelled rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedtail.cli.flags import Json
from fedtail.cli.options import AllowCode
from fedtail.cli.progress import print_notes, terminal
from fedtail.cli.tables import print_block
from fedtail.core.metrics import METRICS
from fedtail.errors import FedtailError
from fedtail.report.blocks import Cell, Table
from fedtail.runs.evaluate import evaluate as evaluation_of
from fedtail.runs.explain import importance
from fedtail.runs.judged import judge
from fedtail.runs.saved import load_model
from fedtail.words import fixed

Data = Annotated[Path, typer.Argument(help="A table, or a folder of images by site and class.")]
Model = Annotated[
    str,
    typer.Option(
        "--run", "--model", help="Run folder, exported .onnx file, or file.py:name of a fitted scikit-learn classifier."
    ),
]
Label = Annotated[str | None, typer.Option(help="Column that holds the class; default: as trained.")]
Site = Annotated[str | None, typer.Option(help="Column that names the site; default: as trained.")]


def evaluate(
    data: Data,
    model: Model,
    label: Label = None,
    site: Site = None,
    why: Annotated[
        bool, typer.Option("--importance", help="Show which columns tell each class; needs a run folder.")
    ] = False,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Evaluate a trained model on labelled rows: every metric with a 95 % interval, per class and per site.

    Example: `fedtail evaluate new.csv --run runs/x`.
    """
    if why and not Path(model).is_dir():
        raise FedtailError(f"--importance needs a run folder, and {model!r} is none")
    judged = judge(model, data, label=label, site=site, allow_code=allow_code)
    shuffled = importance(load_model(model, allow_code=allow_code), judged) if why else None
    evaluation = evaluation_of(judged)
    print_notes(judged.notes)
    print_evaluation(evaluation)
    if shuffled is not None:
        names, lost = shuffled
        rows = (dict(zip(judged.classes, row, strict=True)) for row in lost.tolist())
        evaluation["importance"] = dict(zip(names, rows, strict=True))
        print_importance(names, lost, judged.classes, [row["class"] for row in evaluation["classes"]])
    if as_json:
        typer.echo(json.dumps(evaluation))


def print_evaluation(evaluation: dict[str, Any]) -> None:
    """Print the headline metrics, then classes from the rarest on, then sites from the worst on."""
    terminal().print(f"{evaluation['rows']:,} labelled rows")
    metrics = [
        [
            METRICS[name].title,
            fixed(entry["value"]),
            _interval(entry.get("interval")),
            fixed(evaluation["floor"].get(name)),
        ]
        for name, entry in evaluation["metrics"].items()
        if METRICS[name].headline and entry["value"] is not None
    ]
    print_block(Table(metrics, ["Metric", "Value", "95 % interval", "Majority only"]))
    classes = [
        [
            row["class"],
            *(f"{row[name]:,}" for name in ("cases", "found", "missed", "false_alarms")),
            *(Cell(fixed(row[k]["value"]), _interval(row[k].get("interval"), 2)) for k in ("recall", "precision")),
            fixed(row["pr_auc"]),
        ]
        for row in evaluation["classes"]
    ]
    head = ["Class, rarest first", "Cases", "Found", "Missed", "False alarms", "Recall", "Precision", "PR-AUC"]
    print_block(Table(classes, head), of="classes")
    if len(evaluation["sites"]) > 1:
        ranked = sorted(
            evaluation["sites"].items(), key=lambda item: (item[1]["macro_f1"] is None, item[1]["macro_f1"])
        )
        shares, rare = ("accuracy", "macro_f1", "pr_auc"), next(r["class"] for r in evaluation["classes"] if r["cases"])
        rows = [
            [name, f"{row['rows']:,}", f"{row['classes'][rare]['cases']:,}", *(fixed(row[key]) for key in shares)]
            for name, row in ranked
        ]
        head = ["Site, worst first", "Rows", f"of {rare}", *(METRICS[key].title for key in shares)]
        print_block(Table(rows, head), of="sites")


def print_importance(names: list[str], lost: np.ndarray, classes: Sequence[str], order: Sequence[str]) -> None:
    """Print the columns that matter most, and for the rarest classes the recall that shuffling each of them costs."""
    shown = [classes.index(name) for name in order[:4]]
    columns = np.argsort(-np.nanmax(lost, axis=1), kind="stable")
    rows = [[names[i], *(fixed(float(lost[i, c])) for c in shown)] for i in columns]
    head = ["Column, shuffled: recall lost of", *(classes[c] for c in shown)]
    print_block(Table(rows, head), of="columns")


def _interval(ends: Sequence[float] | None, digits: int = 3) -> str:
    return " to ".join(fixed(v, digits) for v in ends) if ends else ""
