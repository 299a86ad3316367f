"""How many training rows a hostile server reads out of one site's update, and what each defence does about it.

    python benchmarks/reconstruction.py                     the attacks, on synthetic rows
    python benchmarks/reconstruction.py --dataset adult     on rows of Adult (FEDTAIL_DATA)
    python benchmarks/reconstruction.py --accuracy adult    what the defences cost honest runs: accuracy and seconds
    python benchmarks/reconstruction.py --cost adult        and CPU time of a training message

The attack is the one of an audit: one message of 0.19 MB, method FedCGNM, a batch of 64, 650 training rows. The server
chooses a wide network (that is its right) and its weights. ``bins``: all hidden units look along one direction and
switch on at one threshold after another, so that the difference of two neighbours is what lies between them (Fowl et
al., ICLR 2022). ``traps``: every unit looks along a direction of its own, from so far out that few rows switch it on
(Boenisch et al., EuroS&P 2023). A row counts as recovered if one estimate has all of its values to within a hundredth.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.records import Task
from fedtail.data import DATASETS, Federation, Samples, partition
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import InProcess, Phase
from fedtail.federate.protocol.wire import Parcel, pack, pack_task, unpack, unpack_update
from fedtail.federate.server import federate
from fedtail.federate.site.data import FederationSlice
from fedtail.federate.site.site import Site
from fedtail.models.flat import FlatModel
from fedtail.runs.build import build_federation, load_pooled
from fedtail.runs.config import changed, check_config
from fedtail.settings import Local, Settings

ROWS, FEATURES, UNITS = 650, 24, 1800
OPEN = {"max_move": 0.0, "min_row_samples": 1}
"""A policy without defences against crafted models."""
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


def site_of(samples: Samples, policy: Policy, n_classes: int = 2) -> tuple[Site, Federation]:
    """A site whose training rows are (nearly) all of the samples."""
    names = tuple(f"class {c}" for c in range(n_classes))
    federation = partition(samples, samples, clients=1, classes=names, partition="iid", validation=0.0)
    return Site("victim", Own(federation, 0), policy), federation


def job_for(federation: Federation, *, noise: float = 0.0, batch: int = 64, units: int = UNITS) -> Job:
    return Job(
        run="attack",
        model="mlp",
        input_shape=federation.input_shape,
        classes=federation.classes,
        method="fedcgnm",
        rounds=100,
        model_options={"hidden": [units], "norm_groups": 0},
        local=Local(batch_size=batch),
        noise=noise,
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
    """Of one attack."""

    share: float
    said: str = "answered"


def attack(
    samples: Samples, policy: dict[str, Any], craft: Any = bins, *, noise: float = 0.0, batch: int = 64, round: int = 0
) -> Outcome:
    """One message to one site."""
    site, federation = site_of(samples, Policy(**policy))
    job = job_for(federation, noise=noise, batch=batch)
    reply = ask(site, train_message(job, craft(job), round))
    if "error" in reply.meta:
        return Outcome(0.0, f"refused: {reply.meta['error']}")
    return Outcome(recovered(federation.pool.x, estimates(job, unpack_update(reply).delta[0])))


def attack_sum(pieces: list[Samples], policy: dict[str, Any], noise: float = 0.0, round: int = 0) -> Outcome:
    """The same message to several sites, of whose updates the server sees the weighted sum alone."""
    total, truth, said = None, [], "answered"
    for samples in pieces:
        site, federation = site_of(samples, Policy(**policy))
        job = job_for(federation, noise=noise)
        reply = ask(site, train_message(job, bins(job), round))
        if "error" in reply.meta:
            said = f"refused: {reply.meta['error']}"
            continue
        delta = unpack_update(reply).delta[0] / len(pieces)
        total = delta if total is None else total + delta
        truth.append(federation.pool.x)
    return Outcome(0.0, said) if total is None else Outcome(recovered(torch.cat(truth), estimates(job, total)), said)


def walk(samples: Samples, policy: dict[str, Any], rounds: int = 60) -> tuple[int, Outcome]:
    """Begin honestly and lead the model towards the crafted one, as far as the site goes along each time."""
    site, federation = site_of(samples, Policy(**policy))
    job = job_for(federation)
    x, goal, lr = FlatModel(job.build_model(job.seed)).vector.clone(), bins(job), 0.1
    last, step = x, 1.0
    for t in range(rounds):
        there = bool(torch.equal(x, goal))
        reply = ask(site, train_message(job, x, t, 1e-5 if there else lr))
        if "error" in reply.meta:  # too far: half as much
            step /= 2
        elif there:
            return t + 1, Outcome(recovered(federation.pool.x, estimates(job, unpack_update(reply).delta[0])))
        else:
            last = x
        x = goal if step == 1.0 else last + step * (goal - last)
        step = min(2 * step, 1.0) if "error" not in reply.meta else step
    return rounds, Outcome(0.0, "not led there")


def attacks(name: str) -> None:
    pieces = [rows(ROWS, seed) for seed in range(3)] if name == "synthetic" else list(thirds(adult_rows(3 * ROWS)))
    victim = pieces[0]
    late = {"round": 5}
    lines: list[tuple[str, Outcome]] = [
        ("no defence", attack(victim, OPEN)),
        ("no defence, traps", attack(victim, OPEN, traps)),
        ("no defence, all rows in one batch (one step)", attack(victim, OPEN, batch=ROWS)),
        ("min_batch = 64, batch 32 asked for", attack(victim, {**OPEN, "min_batch": 64}, batch=32)),
        ("min_steps = 5, one step asked for", attack(victim, {**OPEN, "min_steps": 5}, batch=ROWS)),
        ("max_move alone", attack(victim, {**OPEN, "max_move": 10.0})),
        ("max_move alone, calls itself round 5", attack(victim, {**OPEN, "max_move": 10.0}, **late)),
        ("min_row_samples = 2 alone", attack(victim, {**OPEN, "min_row_samples": 2})),
        ("min_row_samples = 2 alone, traps", attack(victim, {**OPEN, "min_row_samples": 2}, traps)),
        ("min_row_samples = 3 alone", attack(victim, {**OPEN, "min_row_samples": 3})),
        ("min_row_samples = 3 alone, traps", attack(victim, {**OPEN, "min_row_samples": 3}, traps)),
        ("defaults", attack(victim, {})),
        ("defaults, calls itself round 5", attack(victim, {}, **late)),
        ("defaults, traps, calls itself round 5", attack(victim, {}, traps, **late)),
        *((f"local noise {z:g} alone", attack(victim, OPEN, noise=z)) for z in (0.001, 0.01, 0.1)),
        ("sum of three sites, no other defence", attack_sum(pieces, OPEN)),
        ("sum of three sites, defaults, round 5", attack_sum(pieces, {}, round=5)),
        ("sum of three sites, local noise 0.01 alone", attack_sum(pieces, OPEN, noise=0.01)),
    ]
    print(f"rows of {name}: {ROWS} at a site, {victim.x.shape[1]} columns, {UNITS} hidden units")
    for title, found in lines:
        print(f"{title:50} {found.share:7.1%}  {found.said}")
    for title, policy in (("min_row_samples off", {"min_row_samples": 1}), ("defaults", {})):
        took, found = walk(victim, policy)
        print(f"{f'led there round by round, {title}':50} {found.share:7.1%}  after {took} messages")


def thirds(samples: Samples) -> list[Samples]:
    return [Samples(samples.x[i::3], samples.y[i::3]) for i in range(3)]


def accuracy(name: str, clients: int, rounds: int, seeds: int) -> None:
    """Honest runs over own sites in this process, with the defences and without."""
    policies = {"without": {**OPEN, "min_cell": 0}, "defaults": {}, "min_row_samples = 5": {"min_row_samples": 5}}
    found: dict[str, list[tuple[float, float]]] = {title: [] for title in policies}
    for seed in range(seeds):
        for title, policy in policies.items():
            began = time.perf_counter()
            score = honest(settings(name, clients, rounds, seed), Policy(reveal="classes", **policy))
            found[title].append((score, (time.perf_counter() - began) / rounds))
    for title, scores in found.items():
        values, seconds = zip(*scores, strict=True)
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        middle = statistics.median(seconds)
        print(f"{title:22} accuracy {statistics.mean(values):.4f} ± {spread:.4f}, {middle:.3f} s a round")


def cost(name: str, rounds: int = 15) -> None:
    """CPU seconds of a training message at one site of an honest run, with the defences and without, in turn."""
    config = settings(name, 10, rounds, 0)
    pooled = load_pooled(config)
    federation = build_federation(config, pooled)
    job = replace(job_for(federation), model=pooled.model, model_options=pooled.model_options)
    sites = [Site("one", Own(federation, 0), Policy(**policy)) for policy in ({**OPEN, "min_cell": 0}, {})]
    x = FlatModel(job.build_model(job.seed)).vector.clone()
    took: list[list[float]] = [[], []]
    for t in range(rounds):
        for site, seconds in zip(sites, took, strict=True):
            began = time.process_time()
            reply = ask(site, train_message(job, x, t, 0.1))
            seconds.append(time.process_time() - began)
        x = x + unpack_update(reply).delta[0]
    before, after = (statistics.median(seconds[1:]) for seconds in took)
    rows = len(federation.client(0).train)
    print(
        f"{name}, {rows} rows: {1e3 * before:.1f} ms of CPU a message without, {1e3 * after:.1f} ms with the defaults"
    )


def settings(name: str, clients: int, rounds: int, seed: int) -> Settings:
    return check_config(
        {
            "data": {"name": name, "clients": clients},
            "run": {"rounds": rounds, "seed": seed, "validate_every": 0, "evaluate_every": rounds},
            "deploy": {"reveal": "classes"},
        }
    )


def honest(config: Settings, policy: Policy) -> float:
    """Accuracy after an honest run over sites that take the data for their own."""
    pooled = load_pooled(config)
    federation = build_federation(config, pooled)
    slices = [Rehearsed(federation, k, pooled.model, pooled.model_options) for k in range(federation.n_clients)]
    sites = {k: Site(f"site {k}", data, policy) for k, data in enumerate(slices)}
    for site in sites.values():
        site.guard.own = True
    names = [site.name for site in sites.values()]
    with tempfile.TemporaryDirectory() as folder:
        written = changed(config, {"run.folder": folder})
        result = federate(written, InProcess({k: site.handle for k, site in sites.items()}), names)
    return float(result.test["accuracy"])


class Rehearsed(FederationSlice):
    """A slice, as such in the handshake: the server has the test set."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=["synthetic", "adult"], default="synthetic")
    parser.add_argument("--accuracy", metavar="DATASET", help="train honestly on this data set instead")
    parser.add_argument("--cost", metavar="DATASET", help="CPU time of a training message instead")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cost:
        cost(options.cost)
    elif options.accuracy:
        accuracy(options.accuracy, options.clients, options.rounds, options.seeds)
    else:
        attacks(options.dataset)
