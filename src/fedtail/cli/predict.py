"""``fedtail predict``: classes and probabilities for new rows or images."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from fedtail.cli.options import AllowCode, RunFolder
from fedtail.cli.progress import console, print_notes
from fedtail.core.metrics import METRICS, summarize
from fedtail.data.tables.columns import names_option
from fedtail.errors import FedtailError, one_of, writing
from fedtail.runs.explain import reasons, sentence
from fedtail.runs.judged import judge
from fedtail.runs.saved import SavedModel, load_model, read_decision
from fedtail.words import listing, percent


def predict(
    data: Annotated[
        Path, typer.Argument(help="A table (CSV, TSV, Parquet), an image, a folder of images or a .npy file.")
    ],
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="CSV file to write; default: standard output.")] = None,
    keep: Annotated[str, typer.Option(help="Columns of the table to copy to the output, comma-separated.")] = "",
    site: Annotated[str | None, typer.Option(help="Use this site's decision rule (decision.scope = site).")] = None,
    decision: Annotated[
        Path | None, typer.Option(help="Use the decision rule in this file: a decision.json kept by a site.")
    ] = None,
    threshold: Annotated[
        list[str] | None,
        typer.Option(help="CLASS=PROBABILITY: predict CLASS if it is at least this likely; repeatable."),
    ] = None,
    sets: Annotated[bool, typer.Option("--sets", help="Add the classes that together hold the truth.")] = False,
    coverage: Annotated[
        float | None, typer.Option(help="With --sets: how often, in every class; default: 0.95.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Add the three strongest reasons of each answer.")] = False,
    device: Annotated[str, typer.Option(help="Device, e.g. cpu or cuda.")] = "cpu",
    allow_code: AllowCode = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the predictions.")] = False,
) -> None:
    """Predict with a trained model: one row per sample, with the class and all class probabilities.

    Example: `fedtail predict --run runs/x new.csv --out predicted.csv --keep id`. If the table has the label column,
    the predictions are also scored.
    """
    if coverage is not None and not sets:
        raise FedtailError(f"--coverage {coverage} has no effect without --sets; add --sets")
    coverage = 0.95 if coverage is None else coverage
    model = load_model(run, device=device, allow_code=allow_code)
    model = decided(model if site is None else model.at(site), decision, threshold or [])
    rows = judge(model, data, keep=names_option("keep", keep))
    probabilities = rows.p
    guess = model.decision.answers(probabilities)
    table = pd.DataFrame(rows.identity)
    table["prediction"] = np.array(model.classes, dtype=object)[guess]
    if sets:
        table["set"] = [" | ".join(names) for names in model.sets(probabilities, coverage)]
    if explain:
        assert rows.x is not None
        names, moved = reasons(model, rows.x, guess)
        table["reasons"] = [sentence(names, row) for row in moved]
    for c, name in enumerate(model.classes):
        table[f"p({name})"] = probabilities[:, c].round(6)
    with writing(out or "standard output"):
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(sys.stdout if out is None else out, index=False, lineterminator="\n")
    if quiet:
        return
    print_notes(rows.notes)
    if sets and (always := model.in_every_set(coverage)):
        print_notes([f"too few validation rows of {listing(always)} for sets of {percent(coverage)}: in every set"])
    counts = np.bincount(guess, minlength=len(model.classes))
    share = ", ".join(f"{name} {n}" for name, n in zip(model.classes, counts, strict=True) if n)
    console.print(f"{len(guess)} predictions: {share}" + (f" -> {out}" if out else ""), soft_wrap=True)
    if rows.y is not None and (rows.y >= 0).any():
        known = rows.labelled
        metrics = summarize(known.scores.confusion)
        shown = ", ".join(f"{METRICS[k].words} {metrics[k]:.4f}" for k in ("accuracy", "balanced_accuracy", "macro_f1"))
        console.print(f"{len(known.raw):,} rows have labels: {shown} (more: fedtail evaluate)", soft_wrap=True)


def decided(model: SavedModel, file: Path | None, thresholds: Sequence[str]) -> SavedModel:
    """The model with another decision: that of a file, and thresholds as ``CLASS=PROBABILITY``."""
    rule = model.decision if file is None else read_decision(file, len(model.classes))
    for text in thresholds:
        name, equals, value = text.rpartition("=")
        if not equals:
            raise FedtailError(f"--threshold {text!r} is not of the form CLASS=PROBABILITY; use e.g. {text}=0.2")
        if name not in model.classes:
            raise one_of("class", name, model.classes, lead="there is no")
        if sum(other.rpartition("=")[0] == name for other in thresholds) > 1:
            raise FedtailError(f"--threshold {text!r}: {name!r} has another already; give one per class")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not 0 < number <= 1:
            raise FedtailError(f"--threshold {text!r}: {value!r} is not a probability in (0, 1]; use e.g. {name}=0.2")
        rule = rule.with_threshold(model.classes.index(name), number, len(model.classes))
    return replace(model, decision=rule)
