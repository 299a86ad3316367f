"""``fedtail predict``: classes and probabilities for new rows or images."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from torch import Tensor

from fedtail.cli.options import AllowCode, RunFolder
from fedtail.cli.progress import console
from fedtail.core.evidence import confusion_matrix
from fedtail.core.metrics import summarize
from fedtail.data.inputs import image_files, read_for
from fedtail.data.tables.labels import class_places, name_codes, need_column
from fedtail.data.tables.pooled import is_table, names_option
from fedtail.errors import FedtailError, one_of, writing
from fedtail.runs.saved import SavedModel, load_model, read_decision
from fedtail.words import listing


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
    device: Annotated[str, typer.Option(help="Device, e.g. cpu or cuda.")] = "cpu",
    allow_code: AllowCode = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the predictions.")] = False,
) -> None:
    """Predict with a trained model: one row per sample, with the class and all class probabilities.

    Example: `fedtail predict --run runs/x new.csv --out predicted.csv --keep id`. If the table has the label column,
    the predictions are also scored.
    """
    model = load_model(run, device=device, allow_code=allow_code)
    model = decided(model if site is None else model.at(site), decision, threshold or [])
    notes: list[str] = []
    kept, x, frame = _read(model, data, names_option("keep", keep), notes)
    probabilities = model.probabilities(x)
    guess = model.decision.answers(probabilities)
    table = pd.DataFrame(kept)
    table["prediction"] = np.array(model.classes, dtype=object)[guess]
    for c, name in enumerate(model.classes):
        table[f"p({name})"] = probabilities[:, c].round(6)
    with writing(out or "standard output"):
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(sys.stdout if out is None else out, index=False, lineterminator="\n")
    if quiet:
        return
    for note in notes:
        console.print(f"note: {note}", style="dim", soft_wrap=True)
    counts = np.bincount(guess, minlength=len(model.classes))
    share = ", ".join(f"{name} {n}" for name, n in zip(model.classes, counts, strict=True) if n)
    console.print(f"{len(guess)} predictions: {share}" + (f" -> {out}" if out else ""), soft_wrap=True)
    _score(model, frame, guess)


def decided(model: SavedModel, file: Path | None, thresholds: Sequence[str]) -> SavedModel:
    """The model with another decision: that of a file, and thresholds as ``CLASS=PROBABILITY``."""
    rule = model.decision if file is None else read_decision(file, len(model.classes))
    for text in thresholds:
        name, equals, value = text.rpartition("=")
        if not equals or name not in model.classes:
            raise one_of("class of --threshold", name or text, model.classes)
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not 0 < number <= 1:
            raise FedtailError(f"--threshold {text!r}: {value!r} is not a probability in (0, 1]; use e.g. {name}=0.2")
        rule = rule.with_threshold(model.classes.index(name), number, len(model.classes))
    return replace(model, decision=rule)


def _read(
    model: SavedModel, path: Path, keep: tuple[str, ...], notes: list[str]
) -> tuple[dict[str, Any], Tensor, pd.DataFrame | None]:
    """What identifies each row, the model's input, and the table it came from."""
    if path.is_file() and is_table(path):
        table = read_for(path, model.preprocessing)
        for name in keep:
            need_column("kept", name, list(table.frame.columns), f"table {table.name!r}")
        x = model.inputs(table, notes)
        first: dict[str, Any] = {name: table.frame[name].to_numpy() for name in keep}
        return first or {"row": np.arange(1, len(x) + 1)}, x, table.frame
    if keep:
        raise one_of("kept column", keep[0], ["file"])
    if path.is_dir():
        return {"file": [str(p) for p in image_files(path)]}, model.inputs(path, notes), None
    x = model.inputs(path, notes)
    return {"row": np.arange(1, len(x) + 1)} if len(x) > 1 else {"file": [str(path)]}, x, None


def _score(model: SavedModel, frame: pd.DataFrame | None, guess: np.ndarray) -> None:
    """If the table has labels, say how good the predictions are."""
    label = model.preprocessing.get("label")
    if frame is None or label is None or label not in frame.columns or frame[label].isna().all():
        return
    codes, names = name_codes(frame[label])
    places = class_places(names, model.classes)
    y = np.array([*places, -1])[codes]
    known = y >= 0
    strange = [name for name, c in zip(names, places, strict=True) if c < 0]
    if strange:
        rows = int((codes >= 0).sum() - known.sum())
        console.print(
            f"note: {rows} rows have a class unknown to the model ({listing(map(repr, strange), 5)}) and were not "
            "scored",
            style="dim",
            soft_wrap=True,
        )
    if not known.any():
        return
    metrics = summarize(confusion_matrix(y[known], guess[known], len(model.classes)))
    shown = ", ".join(f"{k.replace('_', ' ')} {metrics[k]:.4f}" for k in ("accuracy", "balanced_accuracy", "macro_f1"))
    console.print(f"scored against {label!r} ({int(known.sum()):,} rows): {shown}", soft_wrap=True)
