"""Benchmarks of rate search: what it finds, how steadily, at what cost in time and memory.

python benchmarks/rates.py             # all sections
python benchmarks/rates.py cost        # golden | search | clusters | cost | memory
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from fedtail.core.candidates import binary_candidates, binary_patterns
from fedtail.core.movement import path_variation
from fedtail.data import DATASETS, partition
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.rates import ClusteredFedHOO, FedHOO, RateStrategy, Setting, Uniform
from fedtail.rounds.loop import train_rounds
from fedtail.runs.build import assemble
from fedtail.settings import Settings
from fedtail_experiments.rates.fast import FAST
from fedtail_experiments.rates.grid import Grid
from fedtail_experiments.rates.hoo import HOO
from fedtail_experiments.rates.locally_optimal import LocallyOptimal
from fedtail_experiments.rates.random_settle import RandomSettle

K, ROUNDS, SEEDS = 5, 60, 20
NOISE = 0.01
"""Standard deviation of a candidate's validation accuracy: about that of 1,000 validation samples at 90 %."""


def reward(rates: np.ndarray, best: np.ndarray, t: int) -> np.ndarray:
    """Accuracy after round t: it rises with training and falls with the distance to the best rates. rates: (..., K)."""
    return 0.9 - 0.5 * np.exp(-t / 15) - ((rates - best) ** 2).sum(axis=-1)


def play(
    strategy: RateStrategy, best: np.ndarray, rng: np.random.Generator, rounds: int = ROUNDS, seed: int = 0
) -> np.ndarray:
    """(rounds, K) rates in force of a strategy on the synthetic federation.

    Local strategies get their best case: a client's own optimum is the joint one.
    """
    k = len(best)
    strategy.begin(Setting(rounds, 1.0, np.full(k, 100), seed=seed))
    path = []
    for t in range(rounds):
        probes = strategy.ask()
        wanted = strategy.patterns()
        rewards = None
        if wanted is not None:
            rates = probes.T
            if wanted == "binary":
                bits = binary_patterns(strategy.n_axes)[:, strategy.axes]
                rates = np.where(bits == 1, probes[:, 1], probes[:, 0])
            rewards = reward(rates, best, t) + NOISE * rng.standard_normal(len(rates))
        local = 0.5 - (probes - best[:, None]) ** 2 + NOISE * rng.standard_normal(probes.shape)
        strategy.tell(rewards, reports=dict.fromkeys(strategy.reports, local))
        path.append(strategy.rates)
    return np.array(path)


STRATEGIES: dict[str, Callable[[int], RateStrategy]] = {
    "FedHOO": lambda s: FedHOO(K),
    "FedHOO, main effects": lambda s: FedHOO(K, select="main_effect"),
    "FedHOO, drift": lambda s: FedHOO(K, reward="drift"),
    "FedHOO, equation": lambda s: FedHOO(K, score="equation"),
    "noise control": lambda s: RandomSettle(K),
    "HOO": lambda s: HOO(K),
    "FAST": lambda s: FAST(K, seed=s),
    "locally optimal": lambda s: LocallyOptimal(K),
    "grid (one rate)": lambda s: Grid(K),
    "uniform 0.6": lambda s: Uniform(K, 0.6),
}


def compare(names: list[str] | None = None, seeds: int = SEEDS) -> dict[str, dict[str, np.ndarray]]:
    """Per strategy: (seeds,) final error, path variation and rounds until the search was done."""
    out = {}
    for name in names or list(STRATEGIES):
        error, variation, done, arms = [], [], [], []
        for seed in range(seeds):
            best = np.random.default_rng((1, seed)).uniform(0.42, 0.78, K)
            strategy = STRATEGIES[name](seed)
            path = play(strategy, best, np.random.default_rng((2, seed)), seed=seed)
            error.append(np.abs(path[-1] - best).mean())
            if isinstance(strategy, FAST):
                arms.append(np.abs(np.array(strategy.stats()["best_arm"]) - best).mean())
            variation.append(path_variation(path, np.full(K, 1 / K))[-1])
            moves = np.flatnonzero(np.abs(np.diff(path, axis=0)).sum(axis=1))
            done.append(moves[-1] + 2 if len(moves) else 0)
        out[name] = {"error": np.array(error), "variation": np.array(variation), "settled": np.array(done)}
        if arms:
            out[f"{name}, best arm"] = {**out[name], "error": np.array(arms)}
    return out


def golden() -> None:
    best = np.array([0.47, 0.63, 0.55, 0.71, 0.5])
    strategy, winner, t = FedHOO(K), 0, 0
    print("round  phase  depth  nodes  s*  rates")
    while not strategy.done:
        stats, probes = strategy.stats(), strategy.ask()
        rates = np.where(binary_patterns(K) == 1, probes[:, 1], probes[:, 0])
        winner = strategy.tell(1 - ((rates - best) ** 2).sum(axis=1))
        shown = " ".join(f"{r:.6f}" for r in strategy.rates)
        print(
            f"{t:5d}  {stats['phase']:6s} {stats['node_depth']:5d}  "
            f"{strategy.stats()['nodes']:5d}  {winner:2d}  {shown}"
        )
        t += 1
    print(f"best                              {' '.join(f'{r:.6f}' for r in best)}")


def search() -> None:
    print(f"{K} clients, {ROUNDS} rounds, {SEEDS} seeds, noise {NOISE:g}: mean (standard deviation)")
    print(f"{'strategy':22s} {'final error':>17s} {'V_T':>17s} {'V_T/sqrt(T)':>12s} {'last change':>12s}")
    for name, r in compare().items():
        e, v = r["error"], r["variation"]
        print(
            f"{name:22s} {e.mean():8.4f} ({e.std():.4f}) {v.mean():8.3f} ({v.std():.3f}) "
            f"{v.mean() / np.sqrt(ROUNDS):12.3f} {r['settled'].mean():12.1f}"
        )


def clusters() -> None:
    """20 clients of three kinds under partial participation; rates are searched per cluster."""
    print("20 clients of 3 kinds, clusters from updates, 60 rounds, 20 seeds: mean final error, clients placed right")
    kinds = np.arange(20) % 3
    for share in (1.0, 0.5, 0.25):
        errors, right = [], []
        for seed in range(SEEDS):
            rng = np.random.default_rng((3, seed))
            best, ways = rng.uniform(0.42, 0.78, 3)[kinds], rng.standard_normal((3, 2000))
            strategy = ClusteredFedHOO(20, clusters=3, select="main_effect", seed=seed)
            strategy.begin(Setting(ROUNDS, share, np.full(20, 100)))
            for t in range(ROUNDS):
                there = np.sort(rng.choice(20, round(20 * share), replace=False))
                strategy.observe(
                    there, [torch.as_tensor(ways[kinds[k]] + rng.standard_normal((2, 2000))) for k in there]
                )
                probes = strategy.ask()[there]
                rewards = None
                if strategy.patterns():
                    bits = binary_patterns(strategy.n_axes)[:, strategy.axes[there]]
                    rates = np.where(bits == 1, probes[:, 1], probes[:, 0])
                    weights = 5 * strategy.weights(np.full(20, 0.05), there)
                    level = 0.9 - 0.5 * np.exp(-t / 15)
                    rewards = level - (rates - best[there]) ** 2 @ weights + NOISE * rng.standard_normal(len(rates))
                strategy.tell(rewards, present=np.isin(np.arange(20), there))
            errors.append(np.abs(strategy.rates - best).mean())
            same = strategy.axes[:, None] == strategy.axes
            right.append((same == (kinds[:, None] == kinds)).mean())
        print(
            f"participation {share:4.0%}   error {np.mean(errors):.4f} ({np.std(errors):.4f})   "
            f"pairs right {np.mean(right):.1%}"
        )


CASES = {
    "blobs 16,000 x 32, MLP, reference": ({"n_max": 8000, "n_features": 32}, (32, 16, 8), "reference", 1),
    "blobs 16,000 x 32, MLP, auto": ({"n_max": 8000, "n_features": 32}, (32, 16, 8), "auto", 1),
    "digits, MLP, auto, 3 epochs": ({}, (64, 32), "auto", 3),
}


def round_seconds(
    data: dict[str, int], hidden: tuple[int, ...], path: str, epochs: int, rounds: int = 10
) -> tuple[float, float]:
    """Median seconds of a uniform and of a FedHOO round, interleaved; the first two rounds do not count."""
    pool = DATASETS.build("blobs" if data else "digits", **data)
    federation = partition(pool.train, pool.test, clients=K, validation=0.1, transform=pool.transform)
    runs = []
    for rates in (Uniform(K, 0.6), FedHOO(K, 0.55, 0.65, stable_rounds=99)):
        module = build_model("mlp", federation.input_shape, federation.n_classes, hidden=hidden)
        settings = Settings.of(epochs=epochs, path=path)
        problem = assemble(federation, module, METHODS.build("fedcgnm"), rates, settings)
        runs.append((problem, problem.begin(), []))
    for t in range(rounds):
        for problem, state, seconds in runs:
            began = time.perf_counter()
            train_rounds(problem, Settings.of(rounds=t + 1, schedule="constant", diagnostics=()), state)
            seconds.append(time.perf_counter() - began)
    uniform, fedhoo = (float(np.median(seconds[2:])) for _, _, seconds in runs)
    return uniform, fedhoo


def cost() -> None:
    """A FedHOO round against a uniform round of the same method, data, model and engine."""
    print("seconds per round, K = 5, FedCGNM, median of 8 interleaved rounds")
    print(f"{'case':34s} {'uniform':>9s} {'FedHOO':>9s} {'ratio':>7s}   (train 2 probes, validate 32 models)")
    for title, case in CASES.items():
        uniform, fedhoo = round_seconds(*case)
        print(f"{title:34s} {uniform:9.3f} {fedhoo:9.3f} {fedhoo / uniform:7.2f}")


def memory() -> None:
    """Peak memory of building and walking all candidates, in model vectors."""
    print("K   models   vectors held at once (directions + base + buffer + float64 temporaries)")
    n = 1_000_000
    for k in (2, 5, 8, 10):
        x, deltas = torch.zeros(n), [torch.randn(2, n) for _ in range(k)]
        with torch.profiler.profile(profile_memory=True) as profile:
            for _, _vector in binary_candidates(x, np.full(k, 1 / k), deltas, np.arange(k), k).walk():
                pass
        live = peak = 0
        for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):  # type: ignore[union-attr]
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        print(f"{k:2d}  {2**k:6d}   {peak / (4 * n):.1f}")


SECTIONS = {"golden": golden, "search": search, "clusters": clusters, "cost": cost, "memory": memory}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for section in sys.argv[1:] or list(SECTIONS):
        print(f"\n## {section}")
        SECTIONS[section]()
