"""``fedtail reproduce``: the paper's tables and figures, with our results alongside."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tomli_w
import typer

from fedtail.cli.cells import run_with_progress
from fedtail.cli.options import DataDir, Device, Workers, split_arguments
from fedtail.cli.progress import terminal
from fedtail.cli.tables import bare_table
from fedtail.cores import usable_cores
from fedtail.errors import FedtailError, one_of
from fedtail.study.cells import Cell, Outcome
from fedtail_experiments.cli.grids import print_grid
from fedtail_experiments.launchers import launcher_for
from fedtail_experiments.paper.convergence import HEADER, reproduce_convergence
from fedtail_experiments.paper.declared import grid_names, load_grid
from fedtail_experiments.paper.grid import SCALES
from fedtail_experiments.paper.page import write_page
from fedtail_experiments.paper.records import FOLDER
from fedtail_experiments.paper.reproduce import Reproduction
from fedtail_experiments.paper.search import TRIALS, reproduce_search, write_trials
from fedtail_experiments.paper.studies import FILE, STUDIES, run_studies

BESIDE_GRIDS = {
    "search": "Hyperparameter search on validation data, with the same number of trials per method; see --tuned",
    "convergence": "Gradient norm against T when rates settle, drift or oscillate",
    "studies": "What reviewers asked for: candidates trained instead of summed, FedHOO's controls, its cost by clients",
    "page": "The tables of RESULTS.md, regenerated from the records of all finished cells",
}


def reproduce(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME] [SECTION.KEY=VALUE]...",
            help="What to reproduce, or your own grid (grid.toml), then settings to change in every cell that has "
            "them; without a name, prints a list.",
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke: seconds, no data needed; cpu: feasible on a CPU; full: everything.")
    ] = "cpu",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per cell.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="The first seed, to add seeds to an existing table.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Run only cells whose name contains this; repeatable.")] = None,
    tuned: Annotated[bool, typer.Option("--tuned", help="Use the best settings found by a recorded search.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for runs, tables and figures.")] = Path("results"),
    workers: Workers = None,
    device: Device = None,
    data_dir: DataDir = None,
    launcher: Annotated[str, typer.Option(help="Where to run cells: processes, or ray (a cluster).")] = "processes",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells without running them.")] = False,
) -> None:
    """Reproduce a table or figure of the paper. Finished cells are kept, so you can stop and continue at any time."""
    name, overrides = split_arguments(arguments)
    words = only or []
    if name is None:
        print_names(overrides)
        return
    if scale not in SCALES:
        raise one_of("--scale", scale, SCALES)
    if name in BESIDE_GRIDS:
        ignored = {
            "--tuned": tuned,
            "--first-seed": first_seed > 0,
            "--dry-run": dry_run,
            f"--launcher {launcher}": launcher != "processes",
        }
        if given := [*overrides, *(flag for flag, is_set in ignored.items() if is_set)]:
            raise FedtailError(f"{name!r} takes no settings, got {' '.join(given)}; tables and figures do")
        if name == "convergence":
            convergence(scale, seeds, out / name / scale)
        elif name == "studies":
            studies(scale, range(seeds), words, out)
        elif name == "page":
            page = Path("RESULTS.md")
            made = write_page(page, out / FOLDER)
            typer.echo(f"wrote {made.tables} tables into {page} from {made.records} records in {out / FOLDER}")
            for line in made.below:
                typer.echo(f"worse than always predicting the majority class: {line}", err=True)
        else:
            search(scale, seeds, words, out, workers, device, data_dir)
        return
    asked = Reproduction(
        grid=load_grid(name),
        scale=scale,
        seeds=seeds,
        first_seed=first_seed,
        tuned=tuned,
        overrides=overrides,
        device=device,
        data_dir=data_dir,
    )
    places = asked.cells(words)
    cells, base = list(places.values()), out / "cells"
    if dry_run:
        for cell in cells:
            typer.echo(cell.folder(base))
        return
    began = time.perf_counter()
    where = launcher_for(launcher, cells)
    note = asked.recorder(places, out)
    found = run_with_progress(
        name, cells, base, workers=workers, most=usable_cores(), strict=False, launcher=where, on_done=note
    )
    failed = [outcome for outcome in found if outcome.error]
    if len(failed) == len(found):
        raise FedtailError(f"every run of {name!r} failed; the first: {failed[0].error}")
    outcomes = dict(zip(places, found, strict=True))
    written = asked.write(outcomes, out)
    print_grid(asked.collect(outcomes))
    for outcome in failed[:3]:
        typer.echo(f"failed: {outcome.cell.label}: {outcome.error}", err=True)
    typer.echo(f"\n{len(cells)} runs in {time.perf_counter() - began:.0f} s; wrote {', '.join(map(str, written))}")
    if failed:
        raise typer.Exit(1)


def print_names(overrides: Sequence[str]) -> None:
    """List what can be reproduced."""
    if overrides:
        raise FedtailError(
            f"{overrides[0]!r} is a setting; give the name of a table or figure first (`fedtail reproduce` lists them)"
        )
    for name, title in ({name: load_grid(name).title for name in grid_names()} | BESIDE_GRIDS).items():
        typer.echo(f"{name:<22}{title}")


def convergence(scale: str, seeds: int, folder: Path) -> None:
    """Run and print the theorem's experiment, which needs no data."""
    rows, written = reproduce_convergence(scale, seeds, folder)
    shown = bare_table(*HEADER)
    for row in rows:
        shown.add_row(*row)
    terminal().print(shown)
    typer.echo(f"wrote {', '.join(map(str, written))}")


def studies(scale: str, seeds: Sequence[int], only: Sequence[str], out: Path) -> None:
    """Measure what is not on file yet; ``only`` names studies, and what they are measured on."""
    names, places = [w for w in only if w in STUDIES], [w for w in only if w not in STUDIES]
    known = [place for _, each in STUDIES.values() for place in each]
    if strange := [place for place in places if place not in known]:
        raise one_of("--only", strange[0], [*STUDIES, *known])
    for s in run_studies(names, places, seeds, out / (f"{scale}-{FILE}" if scale == "smoke" else FILE), scale):
        typer.echo(f"{s.study}, {s.place}, seed {s.seed}: {', '.join(f'{k} {v:.4g}' for k, v in s.values.items())}")


def search(
    scale: str,
    seeds: int,
    only: Sequence[str],
    out: Path,
    workers: int | None,
    device: str | None,
    data_dir: str | None,
) -> None:
    """Run the search for hyper-parameters, print what it found and write ``search/tuned.toml``."""

    def run(recipe: str, cells: Sequence[Cell]) -> list[Outcome]:
        return run_with_progress(
            f"search {recipe}", cells, out / "cells", workers=workers, most=usable_cores(), strict=False
        )

    where = {"engine.device": device, "data.dir": data_dir}
    settings: dict[str, dict[str, object]] = {}
    shown = bare_table("recipe", "method", "trials", "best", "validation")
    races = reproduce_search(scale, seeds, only, run, **{key: value for key, value in where.items() if value})
    for found in races:
        settings.setdefault(found.key, {})[found.method] = found.settings
        best = ", ".join(f"{key} {value}" for key, value in found.settings.items())
        shown.add_row(found.key, found.method, str(found.tried), best, f"{found.score:.4f}")
    if scale != "smoke":
        write_trials(out / TRIALS, races)
    file = out / "search" / "tuned.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(tomli_w.dumps(settings), encoding="utf-8")
    terminal().print(shown)
    typer.echo(f"wrote {file}")
