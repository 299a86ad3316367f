"""A frozen pretrained encoder against a ResNet from scratch: macro F1, seconds, bytes a round.

python benchmarks/encoders.py photos OUT            1,260 photos of ELPV, six sites, classes 900 to 30
python benchmarks/encoders.py defaults              `fedtail run --images` on them, with and without the encoder
python benchmarks/encoders.py heads --sets elpv,chips,things --seeds 0,1,2 --before ../old   heads, now and before
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
    """Image sets as overrides of a run; folders are written below ``out``. ELPV's two sites are kinds of cells."""
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
        "chips": chip_folder,
        "things": lambda to: sorted_folder(*cifar(hundred, 2), tail(range(20, 27), 270, 25), to, sites=4),
    }
    for name in sets.keys() & set(names):
        sets[name](out / name)
    folders = {name: out / name for name in sets} | {"elpv": root / "elpv"}
    return {name: ["data.name=images", f"data.path={folders[name]}"] for name in names}


def chip_folder(out: Path) -> None:
    """``out/<fab>/<class>/*.png``: 3,600 sound chips and 400 with defects of seven kinds."""
    from fedtail.runs.build import load_pooled
    from fedtail.runs.config import load_config

    chips = load_pooled(load_config(None, ["data.name=chips", "data.n=4000", "data.defect_rate=0.1"]))
    assert chips.sites is not None and chips.test_sites is not None
    for samples, sites in ((chips.train, chips.sites), (chips.test, chips.test_sites)):
        for i, (x, y, site) in enumerate(zip(samples.x.numpy(), samples.y.tolist(), sites, strict=True)):
            folder = out / str(site) / chips.classes[y]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x.transpose(1, 2, 0)).save(folder / f"{len(sites)}-{i}.png")


def tail(labels: Sequence[int], most: int, least: int) -> dict[int, int]:
    """Images of each class, from ``most`` down to ``least`` by a constant factor."""
    return {c: int(most * (least / most) ** (i / (len(labels) - 1))) for i, c in enumerate(labels)}


def heads(names: Sequence[str], seeds: Sequence[int], before: Path | None) -> None:
    """What heads on frozen features are worth, means over seeds: as ``fedtail run --images`` trains them now and as an
    earlier checkout does, FedCGNM, a larger encoder, and logistic regression of the pooled features."""
    from fedtail.models.encoders import efficientnet_lite

    ways: dict[str, list[str]] = {"default": [], "fedcgnm": ["method.name=fedcgnm"]}
    if efficientnet_lite.installed("lite2"):
        ways["lite2"] = ["model.encoder=efficientnet_lite2"]
    with tempfile.TemporaryDirectory() as folder:
        for name, data in image_sets(Path(folder) / "data", names).items():
            found: dict[str, list[dict[str, float]]] = {}
            for seed in seeds:
                own = [*data, f"run.seed={seed}", f"run.folder={folder}/runs"]
                for way, more in ways.items():
                    found.setdefault(way, []).append(trained([*own, *more], f"{name}{seed}{way}"))
                found.setdefault("pooled", []).append(pooled_head(own))
                if before is not None:
                    found.setdefault("before", []).append(trained_by(before, own))
            for way, tests in found.items():
                means = {key: round(float(np.mean([t[key] for t in tests])), 3) for key in SHOWN}
                print(f"{name:8} {way:8}", means, [round(t["macro_f1"], 3) for t in tests], flush=True)


SHOWN = ("macro_f1", "tail", "worst_site", "seconds")


def trained(overrides: list[str], name: str) -> dict[str, float]:
    """The test figures of a run in this process, and its processor seconds, once features are there."""
    from fedtail.runs.config import load_config
    from fedtail.runs.execution import run

    config = load_config(None, [*overrides, f"run.name={name}"], suggest=True)
    run(config.model_copy(update={"run": config.run.model_copy(update={"rounds": 1, "name": f"{name}-first"})}))
    began = time.process_time()
    return {**run(config).test, "seconds": time.process_time() - began}


def trained_by(root: Path, overrides: list[str]) -> dict[str, float]:
    """The same by the command line of another checkout."""
    paths = os.pathsep.join([str(root / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedtail", "run", *overrides, f"run.folder={folder}", "--json", "-q"]
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = json.loads(done.stdout.splitlines()[-1])
    return {**{key: found[key] for key in SHOWN if key != "seconds"}, "seconds": seconds}


def pooled_head(overrides: list[str]) -> dict[str, float]:
    """scikit-learn's logistic regression of the features of all sites, balanced, C by the log loss on validation."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import confusion_matrix, log_loss

    from fedtail.core.metrics import summarize
    from fedtail.runs.build import build_federation, prepare
    from fedtail.runs.config import load_config

    config = load_config(None, overrides, suggest=True)
    federation = prepare(build_federation(config), config).federation
    x, y = federation.pool.x.numpy(), federation.pool.y.numpy()
    train, held = np.concatenate(federation.train), np.concatenate(federation.validation)
    classes = range(federation.n_classes)
    mean, std = x[train].mean(0), x[train].std(0) + 1e-6
    began, best = time.process_time(), (np.inf, None)
    for c in 10.0 ** np.arange(-4, 1.5, 0.5):
        model = LogisticRegression(C=c, class_weight="balanced", max_iter=2000).fit((x[train] - mean) / std, y[train])
        loss = log_loss(y[held], model.predict_proba((x[held] - mean) / std), labels=list(classes))
        best = min(best, (loss, model), key=lambda pair: pair[0])
    seconds = time.process_time() - began
    answers, labels = best[1].predict((federation.test.x.numpy() - mean) / std), federation.test.y.numpy()
    owner = federation.test_clients

    def confusion(rows: np.ndarray) -> np.ndarray:
        return confusion_matrix(labels[rows], answers[rows], labels=list(classes))

    each = [summarize(confusion(owner == k))["macro_f1"] for k in range(federation.n_clients) if (owner == k).any()]
    found = summarize(confusion(owner >= -1), federation.label_map().sum(0), sites=each)
    return {**found, "seconds": seconds}


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
    parser.add_argument("--sets", default=",".join(JUDGE), help=f"of {', '.join((*CHOOSE, *JUDGE))}, with commas")
    parser.add_argument("--before", type=Path, help="an earlier checkout, measured too")
    args = parser.parse_args()
    if args.what == "heads":
        heads(args.sets.split(","), [int(seed) for seed in args.seeds.split(",")], args.before)
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
