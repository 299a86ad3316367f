"""``fedtail bench``: a fixed suite, a leaderboard, and submissions that can be verified."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedtail.cli.cells import run_with_progress
from fedtail.cli.options import Device, Json, Workers
from fedtail.cli.progress import terminal
from fedtail.cli.tables import bare_table
from fedtail.errors import FedtailError
from fedtail.study.cells import Cell, Outcome
from fedtail.study.compare import chosen_methods
from fedtail_experiments.bench.leaderboard import Board, board_json, mean_spread, means, rank_submissions, write_board
from fedtail_experiments.bench.running import FILE, Run, Submission, bench_method, gather, read_submission
from fedtail_experiments.bench.running import verify as verify_submission
from fedtail_experiments.bench.suite import load_suite

app = typer.Typer(invoke_without_command=True)
Out = Annotated[Path, typer.Option(help="Folder for runs, submissions and the leaderboard.")]


@app.callback()
def bench(
    context: typer.Context,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="A method name, `all`, or your own file.py:Name; repeatable.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Data sets of the suite, by name or kind (table, image); repeatable.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds per data set; defaults to the suite's number.")
    ] = None,
    out: Out = Path("bench"),
    workers: Workers = None,
    device: Device = None,
    list_sets: Annotated[bool, typer.Option("--list", help="List the suite's data sets.")] = False,
    as_json: Json = False,
) -> None:
    """Run methods on a fixed suite of long-tailed federations, all tuned the same way, and rank every submission.

    Start with `fedtail bench --method fedcgnm --only adult --seeds 3`; `fedtail bench --method my.py:Mine` enters your
    own method. Finished runs are kept, so you can stop and continue at any time. Without --method, it ranks the
    existing submissions, with --only on those data sets alone."""
    if context.invoked_subcommand is not None:
        return
    suite = load_suite()
    if list_sets:
        table = bare_table("set")
        for column in ("kind", "what"):
            table.add_column(column)
        for one in suite.sets:
            table.add_row(one.name, one.kind, one.title)
        terminal().print(table)
        return
    began, sets = time.perf_counter(), suite.only(only or [])
    names = [m for given in method or [] for m in chosen_methods(given)]
    for name in names:
        done = bench_method(suite, name, sets, seeds or suite.seeds, out, runner(out, workers), device)
        if not as_json:
            typer.echo(f"{done.title}: {len(done.rows)} runs on {len(done.chosen)} data sets")
    part = bool(only) and not names  # a look at some of the sets, which is not the suite's ranking
    asked = {one.name for one in sets}
    there = [s for s in submissions(out) if s.sets & asked or not (names or only)]
    board = rank_submissions(there, asked if part else ())
    answer = board_json(board) if part else write_board(out, board, suite)
    if as_json:
        typer.echo(json.dumps({**answer, "folder": str(out), "seconds": round(time.perf_counter() - began, 1)}))
        return
    print_board(board)
    if part:
        typer.echo(f"ranked on {', '.join(board.sets)} alone; leaderboard.md is of all data sets and was not changed")
        return
    typer.echo(f"leaderboard.md and figures are in {out}; submissions are in {out / 'submissions'}")


@app.command("gather")
def gather_submissions(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `fedtail bench --out` wrote, on other machines.")],
    out: Out = Path("bench"),
    as_json: Json = False,
) -> None:
    """Join submissions that were run elsewhere, set by set, with those in --out, and rank all of them."""
    gather(folders, out)
    board = rank_submissions(submissions(out))
    answer = write_board(out, board, load_suite())
    if as_json:
        typer.echo(json.dumps({**answer, "folder": str(out)}))
    else:
        print_board(board)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="A submission: a folder with submission.json.")],
    sample: Annotated[
        int | None, typer.Option(min=1, help="Check only this many seeds per data set; default: all.")
    ] = None,
    workers: Workers = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Recompute a submission's numbers from its settings and its method's file, in a temporary folder."""
    with tempfile.TemporaryDirectory() as fresh:
        found = verify_submission(load_suite(), folder, runner(Path(fresh), workers), sample, device)
    rows = [
        {
            "set": c.row.set,
            "seed": c.row.seed,
            "said": c.row.values["macro_f1"],
            "found": c.again.values["macro_f1"],
            "verdict": c.verdict,
        }
        for c in found
    ]
    wrong = [r for r in rows if r["verdict"] == "differs"]
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "rows": rows, "verified": not wrong}))
    else:
        for r in rows:
            said = f"macro F1 {r['said']:.4f} submitted, {r['found']:.4f} recomputed"
            typer.echo(f"{r['verdict']:<9}  {r['set']} seed {r['seed']}: {said}")
    if wrong:
        raise FedtailError(f"{folder}: {len(wrong)} of {len(rows)} numbers could not be reproduced from its settings")


def runner(out: Path, workers: int | None) -> Run:
    """Cells of the suite in ``out/runs``, with progress."""

    def run(title: str, cells: Sequence[Cell]) -> list[Outcome]:
        return run_with_progress(title, cells, out / "runs", workers=workers, strict=False)

    return run


def submissions(out: Path) -> list[Submission]:
    """All submissions under ``out``, by name."""
    return [read_submission(path.parent) for path in sorted((out / "submissions").glob(f"*/{FILE}"))]


def print_board(board: Board) -> None:
    """The ranking in the terminal, with every set where all fit beside each other."""
    console = terminal()
    table = board_table(board, board.sets)
    fits = console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width
    console.print(table if fits else board_table(board, ()))
    where = "macro F1 per data set" if fits else "see leaderboard.md for macro F1 per data set"
    for s in board.beside:
        shown = [f"{one} {means(s, 'macro_f1', [one])[one]:.3f}" for one in board.sets if one in s.chosen]
        typer.echo(f"beside the ranking: {s.title}, {', '.join(shown)}")
    typer.echo(f"mean rank with 95 % interval; {where}")


def board_table(board: Board, sets: Sequence[str]) -> Table:
    table = bare_table()
    for title in ("method", "mean rank", *sets):
        table.add_column(title, justify="left" if title == "method" else "right", no_wrap=True)
    for p in board.places:
        means = mean_spread(p.submission, "macro_f1", sets)
        shown = [f"{means[one][0]:.3f}" if one in means else "–" for one in sets]
        table.add_row(p.title, f"{p.rank:.2f} ({p.interval('–', 1)})", *shown)
    return table
