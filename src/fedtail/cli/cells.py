"""Progress over the cells of a grid, for the commands that run many."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedtail.cli.progress import Stopped, console, eta, progress_bar
from fedtail.cores import usable_cores
from fedtail.errors import FedtailError
from fedtail.study.cells import Cell, Launcher, Outcome, finished, on_gpu, run_cells


def run_with_progress(
    title: str,
    cells: Sequence[Cell],
    out: Path,
    *,
    workers: int | None,
    most: int = 4,
    fresh: bool = False,
    strict: bool = True,
    launcher: Launcher | None = None,
    on_done: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Run cells with a bar (or plain lines) on standard error. With ``strict`` a failed cell is an error at the end.
    ``on_done`` is called for each as it finishes. So many ``workers`` at once; None: one for each core, at most
    ``most``, and one alone on a GPU, which a single run fills."""
    pool = workers or (1 if on_gpu(cells) else min(most, usable_cores()))
    if fresh:
        for cell in cells:
            shutil.rmtree(cell.folder(out), ignore_errors=True)
    began = time.perf_counter()
    bar = progress_bar(disable=not console.is_terminal)
    task = bar.add_task(title, total=len(cells), note="")
    done = kept = 0

    def note(outcome: Outcome) -> None:
        nonlocal done, kept
        if on_done is not None:
            on_done(outcome)
        done, kept = done + 1, kept + outcome.cached
        state = "failed" if outcome.error else "kept" if outcome.cached else "done"
        step = bar.reset if outcome.cached else bar.update  # a kept run took no time: it must not shorten the estimate
        step(task, completed=done, note=f"{outcome.cell.label} {state}")
        if not console.is_terminal:
            left = f"  {eta(began, done - kept, len(cells) - kept)}" if done > kept else ""
            console.print(f"{title}  {done}/{len(cells)}  {outcome.cell.label} {state}{left}", soft_wrap=True)

    try:
        with bar:
            outcomes = run_cells(cells, out, workers=pool, on_done=note, launcher=launcher)
    except KeyboardInterrupt:  # it may have come between a run's end and its line: the folders know
        there = sum(finished(cell.folder(out)) for cell in cells)
        raise Stopped(
            f"{there} of {len(cells)} runs finished; run the same command{' without --fresh' if fresh else ''} "
            "to continue"
        ) from None
    failed = [o for o in outcomes if o.error]
    if failed and strict:
        raise FedtailError(
            f"{len(failed)} of {len(cells)} runs failed; the first was {failed[0].cell.label}: {failed[0].error}"
        )
    return outcomes
