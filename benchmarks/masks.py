"""What masks cost: the share of a round's CPU time that goes into them, its exchanges and its bytes.

    python benchmarks/masks.py                     5 and 20 sites in this process, FedCGNM + FedHOO over clusters
    python benchmarks/masks.py --vectors           masks alone: seconds for vectors of a model's size

Time in masks is measured inside the run that has them, at sites and server together, and set against all other
CPU time of that run: the machine's load falls on both alike. What the first round has more, in which every site checks
the keys of all others, is in a column of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.core.masks import add_pair_masks, pair_seeds, stream, with_checks
from fedtail.federate import engine, sums
from fedtail.federate.operate.create import create_deployment
from fedtail.federate.protocol.transport import InProcess
from fedtail.federate.server import federate
from fedtail.federate.site import site
from fedtail.federate.site.config import load_site
from fedtail.federate.site.sums import SiteSums
from fedtail.runs.config import check_config
from fedtail.settings import Settings

VARIANTS = {
    "class counts of every site": {"reveal": "classes"},
    "sums of class counts (default)": {"reveal": "sums"},
    "sums of counts and of updates": {"reveal": "sums", "updates": "masked"},
}
HIDDEN = [256, 128]


class Clock:
    """CPU seconds spent in some functions; one that is called by another counts once."""

    def __init__(self) -> None:
        self.seconds, self.inside = 0.0, False

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            if self.inside:
                return function(*args, **keywords)
            self.inside, began = True, time.process_time()
            try:
                return function(*args, **keywords)
            finally:
                self.inside, self.seconds = False, self.seconds + time.process_time() - began

        return call

    def watch(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self.timed(getattr(owner, name)))


def settings(folder: Path, clients: int, rounds: int, samples: int, deploy: dict[str, str]) -> Settings:
    return check_config(
        {
            "data": {"name": "blobs", "clients": clients, "n_max": samples, "n_features": 40, "alpha": 1.0},
            "model": {"name": "mlp", "hidden": HIDDEN},
            "rates": {"name": "fedhoo_clusters", "by": "size", "clusters": 3, "least": 3},
            "local": {"batch_size": 64, "lr": 0.05},
            "run": {"rounds": rounds, "folder": str(folder / "runs"), "metric": "macro_f1", "checkpoint_every": rounds},
            "deploy": deploy,
        }
    )


def measure(clients: int, rounds: int, samples: int, deploy: dict[str, str], clock: Clock) -> dict[str, float]:
    """CPU seconds of a round, and in masks; exchanges and megabytes up of a round."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        config = settings(folder, clients, rounds, samples, deploy)
        names = tuple(f"site{k:02d}" for k in range(clients))
        deployment = create_deployment(folder / "fed", names, config)
        for name in names:
            file = deployment.site(name) / "site.toml"
            file.write_text(file.read_text().replace('reveal = "sums"', 'reveal = "classes"'))
        sites = [load_site(deployment.site(name) / "site.toml").open_site() for name in names]
        marks: list[tuple[float, float]] = []
        clock.seconds = 0.0

        def mark(*_: Any) -> None:
            marks.append((time.process_time(), clock.seconds))

        result = federate(config, InProcess(dict(enumerate(s.handle for s in sites))), names, on_round=mark)
        (began, before), (ended, after) = marks[0], marks[-1]
        traffic = [record["traffic"] for record in result.history]
        return {
            "seconds": (ended - began) / (rounds - 1),
            "masks": (after - before) / (rounds - 1),
            "once": before,
            "exchanges": statistics.median(t["exchanges"] for t in traffic),
            "up": statistics.median(t["up"] for t in traffic) / 1e6,
        }


def vectors() -> None:
    """CPU seconds that a site spends on the masks of one message."""
    print("| values | sites | CPU seconds |\n|---|---|---|")
    for size in (100_000, 1_000_000, 11_000_000):
        for n in (5, 20):
            names = [f"s{i:02d}" for i in range(n)]
            secrets = {pair: os.urandom(32) for pair in combinations(names, 2)}
            mine = {peer: secrets[names[0], peer] for peer in names[1:]}
            values = np.zeros(size, dtype=np.uint32)
            began = time.process_time()
            masked = add_pair_masks(with_checks(values), names[0], pair_seeds(names[0], mine, names, b"sum"))
            masked += stream(os.urandom(32), len(masked), masked.dtype)
            print(f"| {size:,} | {n} | {time.process_time() - began:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4000, help="of the largest class, over five sites")
    parser.add_argument("--sites", default="5,20", help="numbers of sites, with commas")
    given = parser.parse_args()
    if given.vectors:
        vectors()
        return
    clock = Clock()
    clock.watch(SiteSums, "mask_counts", "mask_update", "release", "advert")
    clock.watch(site, "content", "question", "flat_counts", "flat_update")
    clock.watch(engine, "sum_of_counts", "as_masked", "pools")
    clock.watch(sums.Pool, "add", "update", "read_release")
    head = "| sites | variant | CPU s/round | of it in masks | once, CPU s | exchanges | MB up |"
    print(f"{head}\n{'|---' * 7}|", flush=True)
    for clients in map(int, given.sites.split(",")):
        for name, deploy in VARIANTS.items():
            row = measure(clients, given.rounds, given.samples * clients // 5, deploy, clock)
            print(
                f"| {clients} | {name} | {row['seconds']:.2f} | {100 * row['masks'] / row['seconds']:.1f} % | "
                f"{row['once'] - row['masks']:.2f} | "
                f"{row['exchanges']:g} | {row['up']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
