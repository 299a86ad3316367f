"""How a round grows with clients K, model size d, groups H, classes C and probes P; a table, a CSV and a plot.

    python benchmarks/growth.py [--repeats 6] [--folder results/growth]

One quantity grows at a time from the base case: K = 20 clients with 1,600 rows each, 104 features, MLP (32, 16, 8),
H = 2 groups, C = 10 classes, one probe, batch 64, FedCGNM. Least wall-clock time of several rounds, one thread.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch

from fedtail.core.records import Task
from fedtail.data.federation import Federation, Samples
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.settings import Settings
from fedtail.simulate import simulator
from workload import fastest

mpl.use("Agg")
from matplotlib import pyplot as plt

BASE: dict[str, Any] = {"K": 20, "width": 1, "H": 2, "C": 10, "P": 1}
GROW: dict[str, Sequence[int]] = {
    "K": (5, 10, 20, 50, 100, 200),
    "width": (1, 2, 4, 8, 16),
    "H": (1, 2, 3, 5, 10),
    "C": (2, 10, 30, 100),
    "P": (1, 2, 4),
}
NAMES = {"K": "clients K", "width": "parameters d", "H": "groups H", "C": "classes C", "P": "probes P"}
ROWS, FEATURES = 1600, 104


def measure(case: dict[str, Any], path: str, repeats: int) -> dict[str, Any]:
    """Seconds of a round's training in one case."""
    k, classes = case["K"], case["C"]
    rng = np.random.default_rng(0)
    n = k * ROWS
    y = rng.choice(classes, size=n, p=(w := 0.8 ** np.arange(classes)) / w.sum())
    x = rng.standard_normal((n, FEATURES)).astype(np.float32)
    pool = Samples(torch.from_numpy(x), torch.from_numpy(y))
    parts = tuple(np.array_split(np.arange(n), k))
    none = tuple(np.empty(0, dtype=np.int64) for _ in range(k))
    names = tuple(map(str, range(classes)))
    federation = Federation(pool, parts, none, pool, names, tuple(map(str, range(k))))
    hidden = tuple(h * case["width"] for h in (32, 16, 8))
    module = build_model("mlp", (FEATURES,), classes, hidden=hidden)
    method = METHODS.build("fedcgnm", n_groups=case["H"])
    engine = simulator(federation, module, method, Settings.of(batch_size=64, path=path))
    if path == "batched":
        engine.programs.capture_after = 0.0
    task = Task(0, engine.model.vector.clone(), tuple(range(k)), {"rate": np.zeros((k, case["P"]))}, 0.1)
    seconds = fastest(lambda: engine.train(task), repeats)
    return {
        **case,
        "d": engine.model.n_params,
        "path": path,
        "seconds": seconds,
        "rows_per_second": case["P"] * n / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("results/growth"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, values in GROW.items():
        for value in values:
            for path in ("batched", "reference"):
                row = measure({**BASE, name: value}, path, args.repeats if path == "batched" else 2)
                rows.append({"grows": name, **row})
            fast, plain = rows[-2]["seconds"], rows[-1]["seconds"]
            shown = rows[-1]["d"] if name == "width" else value
            times = f"batched {fast * 1e3:8.1f} ms  reference {plain * 1e3:8.1f} ms  {fast / plain:.3f}"
            print(f"{NAMES[name]:13s} {shown:7d}  {times}")
    with (args.folder / "growth.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    plot(rows, args.folder / "growth.svg")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, len(GROW), figsize=(15, 3), sharey=True)
    for axis, name in zip(axes, GROW, strict=True):
        for kind, style in (("batched", "o-"), ("reference", "s--")):
            mine = [r for r in rows if r["grows"] == name and r["path"] == kind]
            axis.plot(
                [r["d" if name == "width" else name] for r in mine],
                [r["seconds"] * 1e3 for r in mine],
                style,
                label=kind,
            )
        axis.set(xscale="log", yscale="log", xlabel=NAMES[name])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms per round")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
