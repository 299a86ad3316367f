"""docs/deploy.md followed line by line, from a built wheel, in a fresh environment and a fresh folder.

    python benchmarks/guide.py                       Flower: rehearsal, sites with data of their own, go real
    python benchmarks/guide.py --engine nvflare      NVFlare: rehearsal, and the job for a system one has
    python benchmarks/guide.py --venv DIR            an environment from before, into which the wheel is installed anew

Commands are taken from the page as they stand, but for ports that are free here, two rounds instead of five or ten, and
the paths of `/opt/fedtail`. Printed are the seconds of each; for NVFlare also the size of the job. Exit code 1 at the
first that fails, with what it said.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
LIMIT = 600.0
"""Seconds for one command."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}")[1].split("\n## ")[0]


def commands(title: str) -> list[str]:
    """The lines behind ``$`` of a section, without their comments."""
    lines = re.findall(r"^\$ (.*)$", section(title), re.M)
    return [re.sub(r"\s+#.*$", "", line).replace("run.rounds=10", "run.rounds=2") for line in lines]


def build(scratch: Path) -> Path:
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", scratch, ROOT], check=True)
    (wheel,) = scratch.glob("fedtail-*.whl")
    return wheel


def install(venv: Path, wheel: Path, engine: str) -> None:
    if not (venv / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [venv / "bin" / "pip", "install", "-q", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, f"{wheel}[{engine}]"], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", wheel], check=True)


class Shell:
    """Runs commands in a folder with the environment's programs first, and not this repository's."""

    def __init__(self, folder: Path, venv: Path) -> None:
        self.folder = folder
        path = f"{venv / 'bin'}:{os.environ['PATH']}"
        self.environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PATH": path}

    def __call__(self, command: str) -> str:
        began = time.perf_counter()
        done = subprocess.run(
            ["bash", "-ec", command], cwd=self.folder, env=self.environment, text=True, timeout=LIMIT,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        print(f"{time.perf_counter() - began:7.1f} s  {command}", flush=True)
        if done.returncode or "Traceback" in done.stdout:
            print(done.stdout)
            raise SystemExit(f"failed: {command}")
        return done.stdout

    def start(self, command: str) -> subprocess.Popen[bytes]:
        print(f"    start  {command}", flush=True)
        log = (self.folder / "background.log").open("ab")
        return subprocess.Popen(shlex.split(command), cwd=self.folder, env=self.environment, stdout=log, stderr=log)


def on_flower(shell: Shell) -> None:
    port, other = free_port(), free_port()
    for line in commands("Rehearse"):
        shell(line.replace("run.rounds=5", "run.rounds=2").replace("up --local 3", f"up --port {port} --local 3"))
        if line.startswith("fedtail deploy down"):
            break  # what follows is a longer run of the same
    (python,) = re.findall(r"^```python\n(.*?)^```", section("Sites with data of their own"), re.S | re.M)
    (shell.folder / "make_files.py").write_text(python)
    shell("python make_files.py")
    for line in commands("Sites with data of their own"):
        shell(line.replace("--own-data", f"--own-data --port {other}"))
    go_real(shell)


def go_real(shell: Shell) -> None:
    """The unit's and the instructions' own lines start server and sites; no proxy, which needs a public address."""
    port, folder = free_port(), shell.folder / "real"
    first, *rest = (line.replace(" fed", " real", 1) for line in commands("Go real"))
    where = f"--public 127.0.0.1:{port} --port {port} run.rounds=2"
    shell(re.sub(r"--public \S+", where, first).replace("north,east,south", "NY,TX,CA"))
    shell("for s in NY TX CA; do cp $s.csv real/sites/$s/data.csv; cp schema.toml real/sites/$s/; done")
    unit = (folder / "server" / "fedtail-superlink.service").read_text()
    running = [shell.start(re.findall(r"^ExecStart=(.*)$", unit, re.M)[0])]
    try:
        time.sleep(15)
        shell(rest[0])  # register
        for name in ("NY", "TX", "CA"):
            (line,) = re.findall(r"By hand: `(.*)`", (folder / "sites" / name / "README.md").read_text())
            line = line.replace("/opt/fedtail/venv/bin/", "").replace("/opt/fedtail", str(folder / "sites"))
            running.append(shell.start(line))
        until_status(shell, lambda now: list(now["sites"].values()) == ["online"] * 3)
        for line in rest[1:]:
            shell(line)
        until_status(shell, lambda now: now["run"].get("state") == "finished")
        shell(f"fedtail site health {folder / 'sites' / 'NY'}")
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(60)


def until_status(shell: Shell, is_so: object, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        now = json.loads(shell("fedtail deploy status real --json").splitlines()[-1])
        if is_so(now):  # type: ignore[operator]
            return
        if time.monotonic() > deadline or now["run"].get("state") == "failed":
            raise SystemExit(f"not reached: {now}")
        time.sleep(3)


def on_nvflare(shell: Shell) -> None:
    for line in commands("NVFlare"):
        if line.startswith("fedtail"):
            shell(line)
    files = [f for f in (shell.folder / "jobs").rglob("*") if f.is_file()]
    (run,) = (shell.folder / "nv" / "runs").iterdir()
    seconds = [float(line.split(",")[1]) for line in (run / "timings.csv").read_text().splitlines()[1:]]
    print(f"job: {len(files)} files, {sum(f.stat().st_size for f in files)} bytes; s/round: {seconds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("flower", "nvflare"), default="flower")
    parser.add_argument("--venv", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build(Path(scratch))
        venv = (options.venv or Path(scratch) / "venv").resolve()
        install(venv, wheel, options.engine)
        print(f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB; load {os.getloadavg()[0]:.1f}", flush=True)
        folder = Path(scratch) / "work"
        folder.mkdir()
        {"flower": on_flower, "nvflare": on_nvflare}[options.engine](Shell(folder, venv))
    print("all as written")


if __name__ == "__main__":
    main()
