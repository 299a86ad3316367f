"""How much there is to read: lines, modules that a run crosses before its first round, members, settings.

python benchmarks/house.py                     # this checkout
python benchmarks/house.py --beside ../v02     # and another one, in a column of its own

A run crosses a module if a function of it is called between the command and the first round; a switch is a call of one
module's function from another module's. Imports are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COUNT = """
import contextlib, io, json, pathlib, pkgutil, sys
import fedtail
from fedtail import cli
from fedtail.methods import Method
from fedtail.rates import RateStrategy
from fedtail.settings import Settings

root = str(pathlib.Path(fedtail.__file__).parent)
source = sorted(pathlib.Path(root).rglob("*.py"))
lines = {str(p.relative_to(root)): len(p.read_text(encoding="utf-8").splitlines()) for p in source}
sys.argv = ["fedtail", "run", "--rounds", "1", "--quiet", "--name", "warm"]  # imports happen here
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    cli.main()

crossed, switches, over = set(), 0, False

def watch(frame, event, _):
    global switches, over
    if over or event != "call" or not frame.f_code.co_filename.startswith(root):
        return
    here, caller = frame.f_code.co_filename, frame.f_back.f_code.co_filename
    if frame.f_code.co_name == "train" and "task" in frame.f_code.co_varnames:
        over = True
        return
    crossed.add(here)
    switches += here != caller and caller.startswith(root)

sys.argv[-1] = "counted"
sys.setprofile(watch)
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    cli.main()
sys.setprofile(None)
assert over, "no round was reached"

def public(kind):
    named = set(dir(kind)) | set(getattr(kind, "__annotations__", {}))
    return len([name for name in named if not name.startswith("_")])

print(json.dumps({
    "lines of src/fedtail": sum(lines.values()),
    "modules of src/fedtail": len(lines),
    "lines of rounds/loop.py": lines["rounds/loop.py"],
    "modules crossed before the first round": len(crossed),
    "module switches before the first round": switches,
    "public members of RateStrategy": public(RateStrategy),
    "public members of Method": public(Method),
    "settings": sum(len(f.annotation.model_fields) for f in Settings.model_fields.values()),
}))
"""


def counted(checkout: Path) -> dict[str, int]:
    """The figures of one checkout."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", COUNT]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", metavar="CHECKOUT", type=Path, help="another checkout to count")
    beside = parser.parse_args().beside
    columns = [counted(path) for path in (*([beside] if beside else []), Path(__file__).parents[1])]
    for name in columns[-1]:
        print(f"{name:45}" + "".join(f"{column[name]:>10,}" for column in columns))


if __name__ == "__main__":
    main()
