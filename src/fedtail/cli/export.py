"""``fedtail export``: a trained model as ONNX or a torch.export program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedtail.cli.options import AllowCode, RunFolder
from fedtail.errors import FedtailError
from fedtail.runs.export import export_onnx, export_torch
from fedtail.runs.saved import load_model


def export(
    run: RunFolder,
    onnx: Annotated[Path | None, typer.Option(help="Write ONNX here (.onnx); needs fedtail[onnx].")] = None,
    torch: Annotated[Path | None, typer.Option(help="Write a torch.export program here (.pt2).")] = None,
    site: Annotated[str | None, typer.Option(help="Include this site's decision rule (decision.scope = site).")] = None,
    allow_code: AllowCode = False,
) -> None:
    """Export a trained model for use elsewhere.

    The graph takes samples as stored for training (encoded rows; pixels 0 to 255) and returns class probabilities,
    for any batch size; ONNX also returns the decided class. Example: `fedtail export --run runs/x --onnx model.onnx`.
    """
    if onnx is None and torch is None:
        raise FedtailError("nothing to write; give --onnx FILE.onnx, --torch FILE.pt2 or both")
    model = load_model(run, allow_code=allow_code)
    model = model if site is None else model.at(site)
    if onnx is not None:
        typer.echo(f"wrote {export_onnx(model, onnx)}")
    if torch is not None:
        typer.echo(f"wrote {export_torch(model, torch)}")
