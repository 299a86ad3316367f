"""A frozen pretrained encoder against a ResNet from scratch: macro F1, seconds, bytes a round.

python benchmarks/encoders.py photos OUT            1,260 photos of ELPV, six sites, classes 900 to 30
python benchmarks/encoders.py defaults              `fedtail run --images` on them, with and without the encoder
python benchmarks/encoders.py elpv --rounds 50      `fedtail run --dataset elpv`, encoded and from scratch
python benchmarks/encoders.py chips --rounds 50     the same on 8,000 synthetic chips, 5 % defects

ELPV is looked for where FEDTAIL_DATA says. Features are kept in a folder of their own for the run, so that encoding is
part of the seconds. From scratch a CPU takes minutes a round: --scratch says how many of them to train (0: none).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = {"poly_good": ("poly/level0", 900), "mono_good": ("mono/level0", 240)}
CLASSES |= {"poly_defect": ("poly/level3", 90), "mono_defect": ("mono/level3", 30)}
SITES = 6
CHIPS = ["data.n=8000", "data.defect_rate=0.05"]


def photo_folder(elpv: Path, out: Path, side: int = 96, seed: int = 0) -> dict[str, int]:
    """``out/<site>/<class>/*.png`` from ``elpv/<mono,poly>/<level0..3>``; sites differ in size and class mix."""
    rng = np.random.default_rng(seed)
    counts = {}
    for name, (source, n) in CLASSES.items():
        files = sorted((elpv / source).glob("*.png"))
        chosen = rng.permutation(len(files))[:n]
        shares = rng.dirichlet(np.full(SITES, 3.0))
        for i in chosen:
            folder = out / f"site{rng.choice(SITES, p=shares)}" / name
            folder.mkdir(parents=True, exist_ok=True)
            with Image.open(files[i]) as image:
                image.convert("L").resize((side, side)).save(folder / files[i].name)
        counts[name] = len(chosen)
    return counts


def measure(data: list[str], rounds: int, *more: str) -> dict[str, float]:
    """One ``fedtail run``: macro F1, its floor and the tail's recall, seconds in all (and of processors, which other
    work on the machine leaves alone) and of a round, bytes a client sends in a round."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedtail", "run", *data, "--rounds", str(rounds), *more]
        command += ["--out", folder, "--name", "run", "--json", "-q"]
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "FEDTAIL_CACHE": f"{folder}/cache", "OMP_NUM_THREADS": "1"}
        said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        seconds, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        found = json.loads(said.splitlines()[-1])
        from safetensors.torch import load_file

        sent = 4 * sum(v.numel() for v in load_file(Path(folder) / "run" / "model.safetensors").values())
        timings = (Path(folder) / "run" / "timings.csv").read_text().splitlines()[1:]
    each = [float(line.split(",")[1]) for line in timings]
    return {
        "macro F1": found["macro_f1"],
        "floor": found["floor"]["macro_f1"],
        "tail": found["tail"],
        "seconds": seconds,
        "processor seconds": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        "seconds a round": sum(each) / len(each),
        "bytes a round": sent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["photos", "defaults", "elpv", "chips"])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--scratch", type=int, default=1)
    parser.add_argument("--scratch-model", default="", help="overrides of the run from scratch, with commas")
    parser.add_argument("--data", default="", help="overrides of both runs, with commas")
    args = parser.parse_args()
    if args.what == "photos":
        if args.out is None:
            parser.error("photos needs a folder to write to")
        print(photo_folder(Path(os.environ["FEDTAIL_DATA"]) / "elpv", args.out))
        return
    if args.what == "defaults":
        with tempfile.TemporaryDirectory() as folder:
            photo_folder(Path(os.environ["FEDTAIL_DATA"]) / "elpv", Path(folder))
            for name, more in (("encoder", []), ("scratch", ["--encoder", "none"])):
                found = measure(["--images", folder, *filter(None, args.data.split(","))], args.rounds, *more)
                print(name, {key: round(value, 4) for key, value in found.items()}, flush=True)
        return
    data = ["--dataset", args.what, *(CHIPS if args.what == "chips" else []), *filter(None, args.data.split(","))]
    rows = {"encoder": measure(data, args.rounds)}
    if args.scratch:
        own = filter(None, args.scratch_model.split(","))
        rows["scratch"] = measure([*data, *own], args.scratch, "--encoder", "none")
    for name, row in rows.items():
        print(name, {key: round(value, 4) for key, value in row.items()})


if __name__ == "__main__":
    main()
