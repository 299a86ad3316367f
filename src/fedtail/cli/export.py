"""``fedtail export``: a trained model as ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedtail.cli.options import AllowCode
from fedtail.runs.export import export_onnx
from fedtail.runs.saved import load_model


def export(
    run: Annotated[Path, typer.Argument(help="Run folder of the trained model.")],
    onnx: Annotated[Path, typer.Option(help="Write ONNX here (.onnx); needs fedtail[onnx].")],
    site: Annotated[str | None, typer.Option(help="Include this site's decision rule (decision.scope = site).")] = None,
    allow_code: AllowCode = False,
) -> None:
    """Export a trained model for use elsewhere.

    The graph takes samples as stored for training (encoded rows; pixels 0 to 255) and returns class probabilities
    and the decided class, for any batch size. Example: `fedtail export runs/x --onnx model.onnx`.
    """
    model = load_model(run, allow_code=allow_code)
    typer.echo(f"wrote {export_onnx(model if site is None else model.at(site), onnx)}")
