"""How many training rows a hostile server reads out of one site's update, where sites trust it, and where not.

    python benchmarks/reconstruction.py                     on synthetic rows
    python benchmarks/reconstruction.py --dataset adult     on rows of Adult (FEDTAIL_DATA)

One message of 0.19 MB, method FedCGNM, a batch of 64, 650 training rows. The server chooses a wide network and its
weights. ``bins``: all hidden units look along one direction and switch on at one threshold after another, so that the
difference of two neighbours is what lies between them (Fowl et al., ICLR 2022). ``traps``: every unit looks along a
direction of its own, from so far out that few rows switch it on (Boenisch et al., EuroS&P 2023). A row counts as
recovered if one estimate has all of its values to within a hundredth.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.records import Task
from fedtail.data import DATASETS, Federation, Samples, partition
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import Phase
from fedtail.federate.protocol.wire import Parcel, pack, pack_task, unpack, unpack_update
from fedtail.federate.site.prepared import FederationSlice
from fedtail.federate.site.site import Site
from fedtail.models.flat import FlatModel
from fedtail.settings import LocalSettings

ROWS, FEATURES, UNITS = 650, 24, 1800
EXACT = 0.01


class Own(FederationSlice):
    """A slice of a data set that a site takes for its own."""

    def schema(self) -> dict[str, Any]:
        return {**super().schema(), "kind": "own"}


def rows(n: int, seed: int = 0, features: int = FEATURES) -> Samples:
    """Synthetic rows: standardized numbers, one class in five rare."""
    rng = np.random.default_rng(seed)
    y = (rng.random(n) < 0.2).astype(np.int64)
    x = rng.normal(0, 1, (n, features)) + 0.5 * y[:, None]
    return Samples(torch.tensor(x, dtype=torch.float32), torch.tensor(y))


def adult_rows(n: int) -> Samples:
    """The first rows of Adult as a model sees them, without columns that are constant among them."""
    train = DATASETS.build("adult").train
    x = train.x[: 4 * n].float()
    x = x[:, x.std(0) > 0]
    x = (x - x.mean(0)) / x.std(0)
    first = np.unique(x.numpy(), axis=0, return_index=True)[1]  # of equal rows one: who has one has both
    index = torch.as_tensor(np.sort(first)[:n])
    return Samples(x[index], train.y[: 4 * n][index])


def site_of(samples: Samples, policy: Policy, folder: Path, n_classes: int = 2) -> tuple[Site, Federation]:
    """A site whose training rows are (nearly) all of the samples."""
    names = tuple(f"class {c}" for c in range(n_classes))
    federation = partition(samples, samples, clients=1, classes=names, partition="iid", validation=0.0)
    return Site("victim", Own(federation, 0), policy, folder), federation


def job_for(federation: Federation, *, batch: int = 64, units: int = UNITS) -> Job:
    return Job(
        run="attack",
        model="mlp",
        input_shape=federation.input_shape,
        classes=federation.classes,
        method="fedcgnm",
        rounds=100,
        model_options={"hidden": [units], "norm_groups": 0},
        local=LocalSettings(batch_size=batch),
    )


def bins(job: Job, seed: int = 0, scale: float = 1e-5) -> Tensor:
    """(n,) the crafted model: thresholds at the quantiles of a normal distribution along one direction."""
    model = FlatModel(job.build_model())
    units, features = model.params[0].shape
    rng = np.random.default_rng(seed)
    direction = rng.normal(0, 1, features)
    level = 1.2 * float(np.linalg.norm(direction)) * torch.special.ndtri((torch.arange(units) + 0.5) / units)
    with torch.no_grad():
        model.params[0].copy_(scale * torch.tensor(direction, dtype=torch.float32).expand(units, -1))
        model.params[1].copy_(-scale * level)
        model.params[2].copy_(torch.tensor([[0.5], [-0.5]]).expand(-1, units))
        model.params[3].zero_()
    return model.vector.clone()


def traps(job: Job, seed: int = 0, scale: float = 1e-5) -> Tensor:
    """(n,) the crafted model: every unit looks its own way, from where one row in 650 is expected to be seen."""
    x, model = bins(job, seed, scale), FlatModel(job.build_model())
    units, features = model.params[0].shape
    rng = np.random.default_rng(seed)
    ways = rng.normal(0, 1, (units, features))
    model.load(x)
    with torch.no_grad():
        model.params[0].copy_(torch.tensor(scale * ways, dtype=torch.float32))
        model.params[1].copy_(torch.tensor(-scale * 3.1 * np.linalg.norm(ways, axis=1), dtype=torch.float32))
    return model.vector.clone()


def train_message(job: Job, x: Tensor, round: int = 0, lr: float = 1e-5, client: int = 0) -> dict[str, bytes]:
    task = Task(round, x, (client,), {"rate": np.full((1, 1), 0.5)}, lr)
    return pack(pack_task(task, 0, {"job": job.to_json(), "client": client}))


def ask(site: Site, message: dict[str, bytes]) -> Parcel:
    return unpack(site.handle(Phase.TRAIN, message))


def estimates(job: Job, delta: Tensor) -> Tensor:
    """(m, d) rows that an update tells: of each unit, and of each difference of neighbours."""
    model = FlatModel(job.build_model())
    units, features = model.params[0].shape
    weight = delta[: units * features].view(units, features).double()
    bias = delta[units * features : units * features + units].double()
    weight, bias = torch.cat([weight, weight[:-1] - weight[1:]]), torch.cat([bias, bias[:-1] - bias[1:]])
    told = bias.abs() > 1e-12
    return (weight[told] / bias[told].unsqueeze(1)).float()


def recovered(truth: Tensor, guesses: Tensor) -> float:
    """The share of rows that some guess has exactly."""
    guesses = guesses[guesses.isfinite().all(1)]
    if not len(guesses):
        return 0.0
    return float((torch.cdist(truth, guesses, p=torch.inf).amin(1) < EXACT).float().mean())


@dataclass(frozen=True)
class Outcome:
    """What came of one attack."""

    share: float
    answer: str = "answered"


def attack(samples: Samples, trust: str, craft: Any = bins, *, batch: int = 64, round: int = 0) -> Outcome:
    """One message to one site, whose policy has this ``trust``."""
    with tempfile.TemporaryDirectory() as folder:
        site, federation = site_of(samples, Policy(trust=trust), Path(folder))
        job = job_for(federation, batch=batch)
        reply = ask(site, train_message(job, craft(job), round))
    if "error" in reply.meta:
        return Outcome(0.0, f"refused: {reply.meta['error']}")
    return Outcome(recovered(federation.pool.x, estimates(job, unpack_update(reply).delta[0])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=("synthetic", "adult"), default="synthetic")
    args = parser.parse_args()
    torch.set_num_threads(1)
    victim = rows(ROWS) if args.dataset == "synthetic" else adult_rows(ROWS)
    for trust in ("server", "blind"):
        for craft in (bins, traps):
            found = attack(victim, trust, craft)
            print(f"policy.trust = {trust!r}, {craft.__name__:5}: {found.share:6.1%} of {ROWS} rows ({found.answer})")


if __name__ == "__main__":
    main()
