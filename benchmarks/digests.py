"""Twelve small runs, and a digest of the model and of the history of each: what a refactoring must not change.

python benchmarks/digests.py                        # prints the digests (under a minute)
python benchmarks/digests.py --write before.json    # also writes them
python benchmarks/digests.py --against before.json  # compares; exits with 1 if one differs

Digests are of bits, and those depend on the CPU model and the version of torch: compare on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import fedtail as ft

RECORDED = ("lr", "clients", "train_loss", "rates", "reward", "searching")
MEASURED = ("accuracy", "macro_f1", "per_class_accuracy", "per_class_f1")
"""What is taken of a round's record; everything else may get another name."""

STOPPING = """
from fedtail.methods import METHODS
from pathlib import Path


class Stopping(type(METHODS.build("fedcgnm"))):
    def after_round(self, server, updates, choice, state):
        if server.round == 3 and Path("stop").exists():
            raise KeyboardInterrupt
        return super().after_round(server, updates, choice, state)
"""


def digits(clients: int = 4, **more: Any) -> ft.Federation:
    pool = ft.datasets.load("digits", imbalance=20)
    return ft.partition(pool, **{"partition": "dirichlet", "clients": clients, "alpha": 0.5, **more})


def table() -> pd.DataFrame:
    """900 rows of numbers, a category and gaps at three sites; one row in fifteen is of the rare class."""
    rng = np.random.default_rng(0)
    y = rng.random(900) < 1 / 15
    frame = pd.DataFrame(rng.normal(size=(900, 5)) + y[:, None] * [1.5, 0, 1, 0, 0.5], columns=list("abcde"))
    frame.loc[rng.random(900) < 0.05, "b"] = np.nan
    frame["kind"] = rng.choice(["x", "y", "z"], 900)
    frame["site"] = rng.choice(["north", "east", "south"], 900, p=[0.5, 0.3, 0.2])
    frame["label"] = np.where(y, "rare", "usual")
    return frame


def fitted(federation: ft.Federation, model: Any, method: Any, rates: Any, **settings: Any) -> tuple[str, str]:
    usual = {"rounds": 6, "lr": 0.2, "batch_size": 32, "metric": "macro_f1"}
    result = ft.fit(federation, model, method, rates, **{**usual, **settings})
    return of_model(result.x), of_history(result.history)


def small_cnn() -> tuple[str, str]:
    return fitted(digits(3), "small_cnn", "fedgrab", 0.5, rounds=2, batch_size=16)


def own_tables() -> tuple[str, str]:
    federation = ft.Federation.from_tables(table(), "label", "site")
    decision = {"goal": "recall", "find": "rare", "recall": 0.9, "calibrate": "temperature"}
    return fitted(federation, "mlp", "fedcgnm", 0.6, decision=decision, select="best", server={"optimizer": "none"})


def own_module() -> tuple[str, str]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 12), torch.nn.Tanh(), torch.nn.Linear(12, 10))
    pool = ft.datasets.load("digits", imbalance=20)
    return fitted(ft.partition(pool, partition="iid", clients=3), module, "climb", 0.6, optimizer="adam", lr=0.01)


def resumed() -> tuple[str, str]:
    """A run on disk, stopped after three rounds and resumed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stopping.py").write_text(STOPPING)
        Path(folder, "stop").touch()
        words = "run --method stopping.py:Stopping --rates fedhoo --name x --clients 3 --rounds 8 --lr 0.2 -q"
        command = [sys.executable, "-m", "fedtail", *words.split(), "local.optimizer=momentum", "local.batch_size=64"]
        stopped = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        Path(folder, "stop").unlink()
        done = subprocess.run([*command, "--resume"], cwd=folder, capture_output=True, text=True)
        if done.returncode or not stopped.returncode:
            raise SystemExit(f"the resumed run failed:\n{stopped.stderr}{done.stderr}")
        run = Path(folder, "runs", "x")
        model = ft.load_model(run).module
        history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
        return of_model(torch.cat([p.flatten() for p in model.parameters()])), of_history(history)


RUNS: dict[str, Callable[[], tuple[str, str]]] = {
    "FedAvg, four clients": lambda: fitted(digits(), "mlp", "fedavg", 0.4),
    "FedCGNM, FedHOO, weight decay": lambda: fitted(
        digits(), "mlp", ft.methods.FedCGNM(beta=0.7, weight_decay=1e-3), "fedhoo", rounds=10
    ),
    "FedCGNM, lr = auto": lambda: fitted(digits(), "mlp", "fedcgnm", 0.6, lr="auto", batch_size="auto"),
    "SCAFFOLD, half of the clients": lambda: fitted(digits(6), "mlp", "scaffold", 0.5, participation=0.5),
    "FedProx, Adam at the server, warm-up": lambda: fitted(
        digits(), "mlp", "fedprox", "random_settle", server={"optimizer": "adam"}, warmup=2, epochs=2
    ),
    "FedETF, locally optimal rates": lambda: fitted(digits(), "mlp", "fedetf", "locally_optimal"),
    "FedCGN, Gaussian noise": lambda: fitted(
        digits(5, partition="iid"), "mlp", "fedcgn", 0.5, privacy={"mode": "local", "noise": 0.5}
    ),
    "Ratio Loss, krum": lambda: fitted(
        digits(5, auxiliary=10), "mlp", "ratio_loss", "hoo", server={"aggregate": "krum"}
    ),
    "small CNN, Fed-GraB": small_cnn,
    "own tables, a recall promised": own_tables,
    "own module, CLIMB, Adam for local steps": own_module,
    "FedCGNM, FedHOO, stopped and resumed": resumed,
}


def of_model(x: torch.Tensor) -> str:
    return hashlib.sha256(x.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def of_history(history: list[dict[str, Any]]) -> str:
    """Digest of what clients tried and got, and of the metrics, round by round."""
    kept = [
        {
            **{key: record.get(key) for key in RECORDED},
            **{part: {m: record.get(part, {}).get(m) for m in MEASURED} for part in ("test", "validation")},
        }
        for record in history
    ]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", type=Path)
    parser.add_argument("--against", metavar="FILE", type=Path)
    parser.add_argument("--only", metavar="TEXT", default="", help="runs whose name contains this")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(ft.__file__).parents[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    before = json.loads(options.against.read_text()) if options.against else {}
    found, differing, began = dict[str, list[str]](), 0, time.process_time()
    for name in (n for n in RUNS if options.only.lower() in n.lower()):
        try:
            found[name] = list(RUNS[name]())
        except Exception as error:  # one that fails must not hide what the others say
            found[name] = [type(error).__name__, " ".join(str(error).split())[:200]]
        said = ""
        if before:
            parts = [p for p, a, b in zip(("model", "history"), found[name], before[name], strict=True) if a != b]
            differing += bool(parts)
            said = f"DIFFERS: {' and '.join(parts)}" if parts else "the same"
        print(f"{name:42}{' '.join(found[name]):36}{said}", flush=True)
    if options.write:
        options.write.write_text(json.dumps(found, indent=1) + "\n")
    print(f"fedtail {ft.__version__}, torch {torch.__version__}, {time.process_time() - began:.0f} s of CPU here")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
