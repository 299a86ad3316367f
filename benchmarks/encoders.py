"""A frozen pretrained encoder against a ResNet from scratch: macro F1, seconds, bytes a round.

python benchmarks/encoders.py photos OUT            1,260 photos of ELPV, six sites, classes 900 to 30
python benchmarks/encoders.py defaults              `fedtail run --images` on them, with and without the encoder
python benchmarks/encoders.py heads --seeds 0,1,2,3   heads at the usual learning rate, and raced, on four image sets
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
from collections.abc import Callable, Sequence
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


def sorted_folder(x: np.ndarray, y: np.ndarray, counts: dict[int, int], out: Path, sites: int = SITES) -> None:
    """``out/<site>/<class>/*.png`` of arrays of pixels, so many of each class."""
    rng = np.random.default_rng(0)
    for label, n in counts.items():
        chosen, shares = rng.permutation(np.flatnonzero(y == label))[:n], rng.dirichlet(np.full(sites, 3.0))
        for i in chosen:
            folder = out / f"site{rng.choice(sites, p=shares)}" / f"c{label}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x[i]).save(folder / f"{i}.png")


CHOOSE = ("cifar", "digits", "objects")
"""Image sets that defaults are chosen on, by their test splits ..."""
JUDGE = ("elpv", "photos", "chips", "things")
"""... and those that judge them, of which nothing is chosen on."""


def image_sets(out: Path, names: Sequence[str] = (*CHOOSE, *JUDGE)) -> dict[str, list[str]]:
    """Image sets as overrides of a run; folders are written below ``out``. CIFAR images have 32 pixels."""
    from sklearn.datasets import load_digits

    def cifar(files: str, head: int) -> tuple[np.ndarray, np.ndarray]:
        rows = np.concatenate([np.fromfile(f, dtype=np.uint8) for f in sorted(root.glob(files))])
        rows = rows.reshape(-1, 3072 + head)
        return rows[:, head:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, head - 1]

    root, digits = Path(os.environ["FEDTAIL_DATA"]), load_digits()
    grey = (digits.images * 255 / 16).astype(np.uint8).repeat(4, 1).repeat(4, 2)
    ten, hundred = "cifar-10-batches-bin/data_batch*.bin", "cifar-100-binary/train.bin"
    sets: dict[str, Callable[[Path], object]] = {
        "cifar": lambda to: sorted_folder(*cifar(ten, 1), {0: 900, 1: 350, 2: 150, 3: 30}, to),
        "digits": lambda to: sorted_folder(grey, digits.target, tail(range(10), 170, 6), to),
        "objects": lambda to: sorted_folder(*cifar(hundred, 2), tail(range(6), 400, 40), to),
        "photos": lambda to: photo_folder(root / "elpv", to),
        "things": lambda to: sorted_folder(*cifar(hundred, 2), tail(range(20, 27), 270, 25), to, sites=4),
    }
    for name in sets.keys() & set(names):
        sets[name](out / name)
    folders = {name: ["data.name=images", f"data.path={out / name}"] for name in sets}
    return {name: folders.get(name, [f"data.name={name}", *(CHIPS if name == "chips" else [])]) for name in names}


def tail(labels: Sequence[int], most: int, least: int) -> dict[int, int]:
    """Images of each class, from ``most`` down to ``least`` by a constant factor."""
    return {c: int(most * (least / most) ** (i / (len(labels) - 1))) for i, c in enumerate(labels)}


def heads(seeds: list[int]) -> None:
    """Macro F1 and tail recall of a head on the frozen encoder, mean over seeds."""
    from fedtail.runs.config import load_config
    from fedtail.runs.execution import run

    raced = ["local.lr=auto", "run.metric=macro_f1", "run.select=best", "run.patience=15"]
    ways = {"usual": [], "raced": raced, "mlp": ["model.name=mlp"], "rate-1": ["rates.rate=1"]}
    with tempfile.TemporaryDirectory() as folder:
        for name, data in image_sets(Path(folder) / "data").items():
            for way, more in ways.items():
                each = [
                    (f"run.seed={seed}", f"run.folder={folder}/runs", f"run.name={name}{way}{seed}") for seed in seeds
                ]
                tests = [run(load_config(None, [*data, *more, *own])).test for own in each]
                shown = {key: [round(t[key], 3) for t in tests] for key in ("macro_f1", "tail")}
                print(
                    f"{name:7} {way:7}",
                    {key: round(float(np.mean(v)), 3) for key, v in shown.items()},
                    shown,
                    flush=True,
                )


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
    parser.add_argument("what", choices=["photos", "defaults", "heads", "elpv", "chips"])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--scratch", type=int, default=1)
    parser.add_argument("--scratch-model", default="", help="overrides of the run from scratch, with commas")
    parser.add_argument("--data", default="", help="overrides of both runs, with commas")
    parser.add_argument("--seeds", default="0,1,2,3")
    args = parser.parse_args()
    if args.what == "heads":
        heads([int(seed) for seed in args.seeds.split(",")])
        return
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
