"""``fedtail reproduce``: the paper's tables and figures, with our numbers beside the paper's."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tomli_w
import typer
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fedtail.cli.cells import run_with_progress
from fedtail.cli.options import DataDir, Device, Workers, split_arguments
from fedtail.cli.progress import terminal
from fedtail.errors import FedtailError, one_of, writing
from fedtail.methods import METHODS
from fedtail.models.device import check_device
from fedtail.runs.config import changed, parse_overrides
from fedtail.study.cells import Cell, Outcome, finished
from fedtail.study.launchers import launcher_named
from fedtail.study.paper.convergence import run_convergence
from fedtail.study.paper.convergence_page import HEADER, convergence_markdown, convergence_rows, draw_convergence
from fedtail.study.paper.declared import grid_names, load_grid
from fedtail.study.paper.figures import draw
from fedtail.study.paper.grid import SCALES, Place, slug, with_overrides
from fedtail.study.paper.recipes import load_recipes
from fedtail.study.paper.search import search
from fedtail.study.paper.tables import GridResult, collect, to_csv, to_markdown

COMPARED = ("fedavg", "fedprox", "weighted_ce", "ratio_loss", "climb", "fedgrab", "fedcgn", "fedcgnm")


def reproduce(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME] [SECTION.KEY=VALUE]...",
            help="What to reproduce, or a grid of your own (grid.toml), then settings to change in all its cells "
            "that have them; without a name, a list.",
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke: seconds, no data needed; cpu: what a CPU can do; full: all.")
    ] = "cpu",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per cell.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="Keep cells whose name contains this; repeatable.")] = None,
    tuned: Annotated[bool, typer.Option("--tuned", help="Use the settings a recorded search found best.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for runs, tables and figures.")] = Path("results"),
    workers: Workers = None,
    device: Device = None,
    data_dir: DataDir = None,
    launcher: Annotated[str, typer.Option(help="Where cells run: processes, or ray (a cluster).")] = "processes",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the cells.")] = False,
) -> None:
    """Run a table or figure of the paper. Finished cells are never run again, so it can be stopped and continued."""
    name, overrides = split_arguments(arguments)
    if name is None and overrides:
        raise FedtailError(
            f"{overrides[0]!r} changes a setting, but of what? give a name first; `fedtail reproduce` lists them"
        )
    values = parse_overrides(overrides)
    if name is None:
        for entry in grid_names():
            typer.echo(f"{entry:<22}{load_grid(entry).title}")
        typer.echo(f"{'search':<22}Hyper-parameters on validation, as the paper searched them; see --tuned")
        typer.echo(f"{'convergence':<22}Gradient norm against T where rates settle, drift or oscillate")
        return
    if scale not in SCALES:
        raise one_of("--scale", scale, SCALES)
    if name in ("convergence", "search"):
        ignored = {"--tuned": tuned, "--dry-run": dry_run, f"--launcher {launcher}": launcher != "processes"}
        given = [*overrides, *(flag for flag, set_ in ignored.items() if set_)]
        if given:
            raise FedtailError(f"{name!r} takes no settings, got {' '.join(given)}; tables and figures do")
    if name == "convergence":
        convergence(scale, seeds, out / name / scale)
        return
    if name == "search":
        search_settings(scale, seeds, tuple(only or ()), out, workers or os.cpu_count() or 1, device, data_dir)
        return
    grid = load_grid(name)

    def chosen(words: Sequence[str]) -> list[tuple[Place, Cell]]:
        cells = with_overrides(grid.cells(scale, range(seeds), words, tuned), values)
        return [(place, _placed(cell, device, data_dir)) for place, cell in cells]

    found = chosen(only or ())
    if dry_run:
        for _, cell in found:
            typer.echo(cell.folder(out / "cells"))
        return
    began = time.perf_counter()
    cells = [cell for _, cell in found]
    if launcher == "processes":
        for each in dict.fromkeys(c.config.engine.device for c in cells):
            check_device("engine.device", each)
    where = launcher_named(launcher, gpu=any(c.config.engine.device != "cpu" for c in cells))
    outcomes = run_with_progress(
        name, cells, out / "cells", workers=workers or os.cpu_count() or 1, strict=False, launcher=where
    )
    if values:  # the declared table keeps its title and its folder
        grid = replace(grid, title=f"{grid.title}, with {' '.join(overrides)}")
    places = [place for place, _ in found]
    result = collect(grid, places, outcomes, with_paper=scale != "smoke")
    if not result.runs:
        raise FedtailError(f"every run of {name!r} failed; the first: {next(o.error for o in outcomes if o.error)}")
    whole = result
    if only and not values:  # what earlier calls finished stays in the declared table
        earlier = [(p, c) for p, c in chosen(()) if p not in places and finished(c.folder(out / "cells"))]
        kept = [Outcome(cell, cell.folder(out / "cells"), cached=True) for _, cell in earlier]
        whole = collect(grid, [*places, *(p for p, _ in earlier)], [*outcomes, *kept], with_paper=scale != "smoke")
    folder = out / grid.name / "-".join([scale, *map(slug, overrides)])
    written = write_result(whole, folder)
    show(result)
    failed = [o for o in outcomes if o.error]
    for outcome in failed[:3]:
        typer.echo(f"failed: {outcome.cell.label}: {outcome.error}", err=True)
    typer.echo(f"\n{len(cells)} runs in {time.perf_counter() - began:.0f} s; wrote {', '.join(map(str, written))}")
    if failed:
        raise typer.Exit(1)


def convergence(scale: str, seeds: int, folder: Path) -> None:
    """The theorem on a problem where smoothness and noise are known; needs no data."""
    horizons = (16, 64, 256) if scale == "smoke" else (16, 64, 256, 1024, 4096)
    points = run_convergence(horizons, seeds)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / "table.md"
        table.write_text(convergence_markdown(points), encoding="utf-8")
        figures = [draw_convergence(points, folder / f"figure.{suffix}") for suffix in ("svg", "png")]
    shown = RichTable(*HEADER, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in convergence_rows(points):
        shown.add_row(*row)
    terminal().print(shown)
    typer.echo(f"wrote {table}, {', '.join(map(str, figures))}")


def search_settings(
    scale: str, seeds: int, only: tuple[str, ...], out: Path, workers: int, device: str | None, data_dir: str | None
) -> None:
    """Search every recipe and method that ``only`` names (all at cpu scale: adult); write ``search/tuned.toml``."""
    recipes = ["smoke"] if scale == "smoke" else [r for r in load_recipes() if r != "smoke" and r in only] or ["adult"]
    for word in only:
        if word not in METHODS and word not in load_recipes():
            raise one_of("--only", word, [*METHODS, *(r for r in load_recipes() if r != "smoke")])
    named = [m for m in only if m in METHODS]
    extra = {"data.partition": "iid", **({"engine.device": device} if device else {})}
    extra |= {"data.dir": data_dir} if data_dir else {}
    found: dict[str, dict[str, dict[str, object]]] = {}
    shown = RichTable("recipe", "method", "best", "validation", box=box.SIMPLE_HEAD, pad_edge=False)
    for recipe in recipes:

        def runner(cells: Sequence[Cell], recipe: str = recipe) -> list[Outcome]:
            return run_with_progress(f"search {recipe}", cells, out / "cells", workers=workers, strict=False)

        best, trials = search(recipe, named or COMPARED, range(seeds), runner, extra)
        found[recipe] = best
        for method, settings in best.items():
            last = [t.score for t in trials if t.method == method and settings.get(t.key) == t.value][-1]
            shown.add_row(recipe, method, ", ".join(f"{k} {v:g}" for k, v in settings.items()), f"{last:.4f}")
    folder = out / "search"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tuned.toml").write_text(tomli_w.dumps(found), encoding="utf-8")
    terminal().print(shown)
    typer.echo(f"wrote {folder / 'tuned.toml'}")


def write_result(result: GridResult, folder: Path) -> list[Path]:
    """The table as Markdown and CSV, and the figure if the grid is one."""
    folder.mkdir(parents=True, exist_ok=True)
    table, data = folder / "table.md", folder / "table.csv"
    table.write_text(to_markdown(result), encoding="utf-8")
    data.write_text(to_csv(result), encoding="utf-8")
    written = [table, data]
    for suffix in ("svg", "png"):
        figure = draw(result, folder / f"figure.{suffix}")
        if figure is not None:
            written.append(figure)
    return written


def show(result: GridResult, console: Console | None = None) -> None:
    """A table per block in the terminal, the paper's numbers dimmed."""
    out = console or terminal()
    for block in result.used("block"):
        title = result.grid.title if block == "all" else f"{result.grid.title}: {block}"
        out.print(Text.assemble("\n", (title, "bold"), f" ({result.grid.metric.replace('_', ' ')})"), soft_wrap=True)
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        shown.add_column("", no_wrap=True)
        for column in result.used("column"):
            shown.add_column(column, justify="right")
        for row in result.used("row"):
            entries = [result.entry(block, row, c) for c in result.used("column")]
            if any(entries):
                shown.add_row(row, *(_cell(e.text(), e.paper) if e else "" for e in entries))
        out.print(shown)
    if any(e.paper is not None for e in result.entries):
        out.print("in brackets: the paper", style="dim")
    if result.grid.notes:
        out.print(" ".join(result.grid.notes.split()), style="dim")


def _cell(text: str, paper: float | None) -> Text:
    return Text(text) if paper is None else Text.assemble(text, (f" ({paper:.4g})", "dim"))


def _placed(cell: Cell, device: str | None, data_dir: str | None) -> Cell:
    """The same cell on another device or with another data folder; neither is part of its identity's result."""
    values = {"engine.device": device, "data.dir": data_dir}
    return Cell(cell.label, changed(cell.config, {key: value for key, value in values.items() if value is not None}))
