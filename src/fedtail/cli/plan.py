"""``fedtail plan``: what a federation can be expected to give, before anyone federates."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtail.cli.options import ONE_RUN, Arguments, Json, config_flags, run_config
from fedtail.cli.progress import terminal
from fedtail.errors import writing
from fedtail.runs.build import build_federation
from fedtail.study.plan import plan


@config_flags(*(name for name in ONE_RUN if name not in ("name", "out")))
def plan_command(
    arguments: Arguments = None,
    *,
    flags: dict[str, Any],
    recall: Annotated[float, typer.Option(min=0.01, max=0.999, help="Recall that you would like to promise.")] = 0.95,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="How sure the promise should be.")] = 0.9,
    trials: Annotated[
        bool, typer.Option("--trials/--counts", help="Train in the simulator too, or use the class counts alone.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Write the page here as Markdown.")] = None,
    as_json: Json = False,
) -> None:
    """Plan a federation: what can be promised of each class, which differences would show, what each site would gain.

    Example: `fedtail plan --table crashes.csv --label severity --site state`. With `--counts` nothing is trained.
    """
    config = run_config(arguments, flags, resume=False)
    planned = plan(build_federation(config), config, recall, confidence, trials=trials)
    if out is not None:
        with writing(out):
            out.write_text(planned.markdown(), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(asdict(planned)))
    else:
        terminal().print(planned.markdown(), soft_wrap=True, markup=False, highlight=False)
