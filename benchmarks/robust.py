"""What a hostile site does to a model under each rule of aggregation, and what the rule costs rare classes.

    FEDTAIL_DATA=... python benchmarks/robust.py                  the table in docs/threat-model.md
    python benchmarks/robust.py --data digits --rounds 10          another data set

Ten Dirichlet sites train FedCGNM. One of them, which claims ``--weight`` of all samples, sends what an attack makes of
its update, always within the method's norm bound, so that nothing refuses it:

    reverse   the opposite of what all others want, as long as the bound allows
    target    the way to a model of random weights, as long as the bound allows
    quiet     the opposite of what all others want, exactly as long as the median of their updates
    relabel   trains honestly on its own data, of which the rare half of the classes is called the most frequent one

``default`` is what a real federation does without a setting: ``bounded`` and a cap of the weight. Every row is the same
federation, seed by seed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from fedtail.core.records import Refusal, Task, Update
from fedtail.data.registry import Pooled
from fedtail.methods import METHODS
from fedtail.methods.base import run_bound
from fedtail.rates import RATES
from fedtail.rounds.aggregation import combine
from fedtail.rounds.loop import train_rounds
from fedtail.runs.build import build, build_federation, load_pooled
from fedtail.runs.config import check_config
from fedtail.settings import Settings

ATTACKS = ("none", "reverse", "target", "quiet", "relabel")
RULES: dict[str, dict[str, Any]] = {
    "mean": {"aggregate": "mean"},
    "default": {},
    "krum": {"aggregate": "krum"},
}
SHOWN = ("accuracy", "macro_f1", "tail")


class Hostile:
    """An engine one of whose clients is an attacker, who knows all updates of the round."""

    def __init__(self, engine: Any, problem: Any, client: int, attack: str, weight: float) -> None:
        self.inner, self.problem, self.client, self.attack = engine, problem, client, attack
        others = np.delete(engine.sizes, client).sum()
        self.sizes = np.array(engine.sizes, dtype=np.int64)
        self.sizes[client] = round(weight / (1 - weight) * others)
        self.target = torch.randn(engine.model.size, generator=torch.Generator().manual_seed(7))

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        updates, refusals = self.inner.train(task)
        return [self.poison(u, updates, task) if u.client == self.client else u for u in updates], refusals

    def poison(self, own: Update, updates: Sequence[Update], task: Task) -> Update:
        if self.attack in ("none", "relabel"):
            return own
        others = [u for u in updates if u is not own]
        p = np.array([self.sizes[u.client] for u in others], dtype=np.float64)
        zero, first = torch.zeros_like(task.x), np.zeros(len(others), dtype=np.int64)
        wanted = combine(zero, p / p.sum(), others, first)
        away = self.target - task.x if self.attack == "target" else -wanted
        n_classes = self.problem.n_classes
        most = run_bound(self.problem.method, task, own.client, 0, own.steps[0], n_classes)
        if self.attack == "quiet" or most is None:
            most = float(np.median([float(torch.linalg.vector_norm(d[0])) for d in (u.delta for u in others)]))
        return replace(own, delta=(away * (most / float(torch.linalg.vector_norm(away))))[None])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def settings(args: argparse.Namespace, rule: str, seed: int) -> Settings:
    return check_config(
        {
            "data": {"name": args.data, "clients": args.clients, "partition": "dirichlet", "alpha": args.alpha},
            "model": {"name": "mlp", "hidden": [32]},
            "method": {"name": args.method},
            "local": {"lr": args.lr, "batch_size": args.batch},
            "run": {"rounds": args.rounds, "seed": seed, "evaluate_every": args.rounds, "validate_every": 0,
                    "diagnostics": ["influence"]},
            "engine": {"compile": "off"},
            "server": RULES.get(rule, {}) if "=" not in rule else dict(kv.split("=") for kv in rule.split(",")),
        }
    )  # fmt: skip


def outcome(args: argparse.Namespace, rule: str, attack: str, seed: int) -> dict[str, Any]:
    """Test metrics of one run, and in what share of the rounds the attacker, and an honest site, was flagged."""
    config = settings(args, rule, seed)
    pooled = fewer(args.data, args.samples)
    federation = build_federation(config, pooled)
    client = int(np.argmin(np.abs(federation.sizes - np.median(federation.sizes))))  # a site of usual size
    if attack == "relabel":
        federation = relabelled(federation, client)
    rates = RATES.build("uniform", federation.n_clients, rate=args.rate)
    problem = build(config, federation, method=METHODS.build(args.method), rates=rates).problem
    problem.real = True
    problem.engine = Hostile(problem.engine, problem, client, attack, args.weight)  # type: ignore[assignment]
    state = train_rounds(problem, config, problem.begin())
    flags = np.zeros(federation.n_clients)
    for record in state.history:
        flags[record["influence"]["flagged"]] += 1 / len(state.history)
    test = state.history[-1]["test"]
    return {
        **{name: float(test[name]) for name in SHOWN},
        "flagged": flags[client],
        "flagged_others": float(np.delete(flags, client).mean()),
    }


@cache
def fewer(data: str, samples: int) -> Pooled:
    """The data set with about so many training samples: the larger the class, the more of it is left out."""
    pooled = load_pooled(check_config({"data": {"name": data}}))
    y, rng = np.asarray(pooled.train.y), np.random.default_rng(0)
    counts = np.bincount(y)
    power = next(p for p in np.arange(1.0, 0.0, -0.01) if (counts[counts > 0] ** p).sum() <= samples)
    kept = [rng.permutation(np.flatnonzero(y == c))[: int(np.ceil(n**power))] for c, n in enumerate(counts)]
    return replace(pooled, train=pooled.train.take(np.sort(np.concatenate(kept))))


def relabelled(federation: Any, client: int) -> Any:
    """The federation where one client calls its samples of the rarer half of the classes the most frequent one."""
    counts = federation.label_map().sum(0)
    rare = np.argsort(counts)[: len(counts) // 2]
    labels, mine = federation.pool.y.clone(), torch.as_tensor(federation.train[client])
    labels[mine[torch.isin(labels[mine], torch.as_tensor(rare.copy()))]] = int(np.argmax(counts))
    return replace(federation, pool=replace(federation.pool, y=labels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="unsw")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--method", default="fedcgnm")
    parser.add_argument("--rate", type=float, default=0.4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--weight", type=float, default=0.48)
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.data}, {args.clients} sites, {args.rounds} rounds, {args.seeds} seeds; one claims {args.weight:.0%}")
    print("| rule | attack | accuracy | macro F1 | recall of tail classes | attacker flagged | others flagged |")
    print("|---|---|---|---|---|---|---|")
    for attack in args.attacks:
        for rule in args.rules:
            began = time.perf_counter()
            rows = [outcome(args, rule, attack, seed) for seed in range(args.seeds)]
            mean = {name: np.mean([row[name] for row in rows]) for name in rows[0]}
            cells = [f"{mean[name]:.3f}" for name in SHOWN] + [
                f"{mean[name]:.0%}" for name in ("flagged", "flagged_others")
            ]
            print(f"| {rule} | {attack} | {' | '.join(cells)} |", flush=True)
            print(f"  {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
