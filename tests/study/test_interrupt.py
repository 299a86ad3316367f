"""Ctrl-C in the middle of a grid, for real: it ends at once, leaves nothing behind, and the same command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedtail.report import load_run
from tests.waiting import HANGS, until

GRID = ["reproduce", "table-iid", "--scale", "smoke", "--only", "K=5", "--seeds", "1"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")]


def start(out: Path, workers: int) -> subprocess.Popen[str]:
    """The grid in a session of its own, so that whatever it leaves behind can be found.

    It hears Ctrl-C even where the tests do not, being started in the background of a script.
    """
    command = [sys.executable, "-m", "fedtail", *GRID, "--workers", str(workers), "--out", str(out)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=out.parent,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def complete(out: Path, workers: int) -> tuple[list[str], str]:
    """Lines of progress and the table of a grid that is left to end."""
    process = start(out, workers)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    return err.splitlines(), (out / "table-iid" / "smoke" / "table.md").read_text()


def alive(session: int) -> list[str]:
    """Processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(sid) == session and state != "Z":
            found.append(path.parent.name)
    return found


def ends_alone(process: subprocess.Popen[str]) -> None:
    """Wait until nothing of its session runs any more: multiprocessing's resource tracker ends once its parent has."""
    until(lambda: alive(process.pid) == [], "what a grid left behind to end")


def until_first_cell(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "1/" in line and "done" in line, line + process.stderr.read()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of one process, which starts three times as fast as a pool of two."""
    return complete(tmp_path_factory.mktemp("whole") / "results", 1)[1]


@pytest.mark.parametrize(
    ("workers", "whom", "goes_on"), [(1, "process", True), (2, "process", False), (2, "terminal", True)]
)
def test_a_stopped_grid_says_how_to_go_on_and_ends_with_the_same_table(
    workers: int, whom: str, goes_on: bool, table: str, tmp_path: Path
) -> None:
    """Both ways to stop a pool leave the same on disk, so one of them is continued."""
    out = tmp_path / "results"
    process = start(out, workers)
    until_first_cell(process)
    until(lambda: len(list(out.glob("cells/*/config.toml"))) > 1, "the next cell to begin")
    (os.kill if whom == "process" else os.killpg)(process.pid, signal.SIGINT)  # Ctrl-C goes to all of a terminal
    shown, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130 and shown == "" and "Traceback" not in err
    ends_alone(process)
    told = sum("done" in line for line in err.splitlines()) + 1
    finished = sorted(path.parent for path in out.glob("cells/*/result.json"))
    assert told <= len(finished) < 10
    last = [line for line in err.splitlines() if line.strip()][-1]
    assert last == f"stopped: {len(finished)} of 10 runs finished; run the same command to continue"
    for folder in finished:
        assert load_run(folder).finished and (folder / "model.safetensors").is_file()
    if not goes_on:
        return
    before = {folder: (folder / "result.json").stat().st_mtime_ns for folder in finished}

    lines, again = complete(out, workers)
    assert sum("kept" in line for line in lines) == len(finished)
    assert {folder: (folder / "result.json").stat().st_mtime_ns for folder in finished} == before
    assert again == table


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    process = start(tmp_path / "results", 2)
    until_first_cell(process)
    process.kill()
    process.communicate(timeout=HANGS)
    ends_alone(process)
