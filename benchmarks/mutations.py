"""Mutations of central lines (mutations.toml), each of which some test must notice.

python benchmarks/mutations.py               # all of them, one after another
python benchmarks/mutations.py shuffle quorum  # those whose name contains one of these words

Each mutation changes one line in a temporary copy of ``src`` and runs the tests named for it. Prints ``caught``,
``NOT CAUGHT`` or ``text is gone`` for each; exits with 1 unless all are caught.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PROCESSES = int(os.environ.get("MUTATIONS_PROCESSES", "1"))


class Mutation(NamedTuple):
    name: str
    file: str
    """Below ``src/fedtail`` or the experiments; where the text has left it, the one file that has it is taken."""
    old: str
    new: str
    tests: str
    """Arguments of pytest."""


MUTATIONS = [
    Mutation(name, *fields)
    for name, fields in tomllib.loads((ROOT / "benchmarks" / "mutations.toml").read_text()).items()
]


def locate(mutation: Mutation) -> Path | None:
    """The file with the text, by name or else by search; None if none or several have it."""
    packages = [ROOT / "src" / "fedtail", ROOT / "experiments" / "fedtail_experiments"]
    for named in [package / mutation.file for package in packages]:
        if named.exists() and mutation.old in named.read_text():
            return named
    found = [p for package in packages for p in package.rglob("*.py") if mutation.old in p.read_text()]
    return found[0] if len(found) == 1 else None


def attempt(mutation: Mutation) -> tuple[str, float]:
    """What the tests make of a mutation, and the seconds they took."""
    began, path = time.monotonic(), locate(mutation)
    if path is None or path.read_text().count(mutation.old) != 1:
        return "text is gone" if path is None else "text is not unique", 0.0
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder, name) for name in ("src", "experiments")]
        for copy in copies:
            shutil.copytree(ROOT / copy.name, copy, ignore=shutil.ignore_patterns("__pycache__"))
        mutated = Path(folder, path.relative_to(ROOT))
        mutated.write_text(mutated.read_text().replace(mutation.old, mutation.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutation.tests.split()]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, copies)),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    said = {0: "NOT CAUGHT", 1: "caught"}.get(done.returncode, f"pytest ended with {done.returncode}")
    reason = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    return f"{said:12}{reason.partition(' - ')[0][:110]}", time.monotonic() - began


def main() -> int:
    words = sys.argv[1:]
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    caught = 0
    with ThreadPoolExecutor(PROCESSES) as pool:
        for mutation, (said, seconds) in zip(chosen, pool.map(attempt, chosen), strict=True):
            caught += said.startswith("caught")
            print(f"{mutation.name:58}{seconds:4.0f} s  {said}", flush=True)
    print(f"{caught} of {len(chosen)} caught")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
