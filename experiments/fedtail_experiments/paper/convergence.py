"""The convergence bound on a problem where everything is known (paper theorem 3.6).

Client k's objective at rate r has two groups, f_{k,h}(x; r) = S_h(r)/2 ||x - c_{k,h}||^2, with majority mass
S_0(r) = 1 / (1 + q^{1-r}) and S_1 = 1 - S_0: resampling moves mass from the majority's optimum to the minority's. So
smoothness is L = 1, gradients are known in closed form, and noise of standard deviation sigma is added to them.
With eta ~ T^(-1/2) the paper's bound is

    (1/T) sum_t ||grad f^(t)(x^t)||^2 <= O(T^(-1/2)) + O(V_T T^(-1/2)).

Two readings come out. With a stabiliser well above the gradients (delta = 10, where steps are nearly plain gradients),
rates that settle let the gradient vanish and rates that oscillate for ever leave a floor: the V_T term. With the
paper's delta = 0.1 there is a floor also at constant rates: normalized group steps come to rest where the *unit
vectors* cancel, not where the gradients do, which the theorem's assumptions exclude.

Both are with beta = .5, as in the paper's experiments. The theorem has beta = 1 - c eta, under which its constants are
not constant: D_0 = A - alpha / 2 < A, and A = 1 - beta (1 - beta^E) / (E (1 - beta)), which is about c eta (E + 1) / 2.
So the first term of the bound, Delta_0 / (eta D_0 E T), is no smaller than a constant when eta ~ T^(-1/2). That is no
weakness of the bound: a momentum of E steps is of length eta then, a round's movement of length eta^2, and T rounds
move as far whatever T is. The mean squared gradient tends to a constant, at constant rates too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedtail.core.momentum import cgnm_direction
from fedtail.core.movement import path_variation
from fedtail.core.random import generator
from fedtail.errors import writing
from fedtail.plots import COLOURS, PAGE
from fedtail_experiments.paper.figures import save_figure, subplots
from fedtail_experiments.paper.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATE_PATHS: dict[str, Callable[[int], float]] = {
    "constant": lambda t: 0.6,
    "drifting": lambda t: 0.6 + 0.2 / (1 + t),
    "oscillating": lambda t: 0.4 if t % 2 else 0.8,
}
"""Name -> the rate of all clients in round t."""
HEADER = ("beta", "delta", "rates", "T", "V_T", "mean ||grad||^2", "last quarter")
THEOREM = "1 - eta"
"""The theorem's beta, with c = 1."""


@dataclass(frozen=True)
class Point:
    """One run of T rounds."""

    path: str
    beta: str
    delta: float
    rounds: int
    seed: int
    mean: float
    """Squared gradient norm, averaged over all rounds: what the theorem bounds."""
    late: float
    """The same over the last quarter of the rounds."""
    variation: float
    """V_T of the rates."""


def run_point(
    path: str,
    rounds: int,
    seed: int,
    *,
    clients: int = 5,
    dim: int = 20,
    steps: int = 5,
    sigma: float = 0.1,
    ratio: float = 0.05,
    beta: float | None = 0.5,
    delta: float = 0.1,
    scale: float = 1.0,
) -> Point:
    """FedCGNM for ``rounds`` rounds with eta = ``scale`` / sqrt(T); ``ratio``: minority to majority mass at rate 0;
    ``beta``: None for the theorem's."""
    rng = generator(seed, "convergence")
    # Optima differ mostly between groups, which clients share: what resampling trades off.
    shared = rng.standard_normal((1, 2, dim))
    optima = torch.as_tensor(shared + 0.3 * rng.standard_normal((clients, 2, dim)))
    x = torch.as_tensor(2.0 * rng.standard_normal(dim))
    eta = scale / math.sqrt(rounds)
    decay = max(0.0, 1.0 - eta) if beta is None else beta
    rates, squared = [], []
    for t in range(rounds):
        rate = RATE_PATHS[path](t)
        majority = 1.0 / (1.0 + ratio ** (1.0 - rate))
        mass = torch.tensor([majority, 1.0 - majority], dtype=torch.float64)[None, :, None]
        squared.append(float((mass * (x - optima)).sum(1).mean(0).pow(2).sum()))
        rates.append(np.full(clients, rate))
        local = x.expand(clients, dim).clone()
        momentum = torch.zeros(clients, 2, dim, dtype=torch.float64)
        for _ in range(steps):
            noise = torch.as_tensor(sigma / math.sqrt(dim) * rng.standard_normal((clients, 2, dim)))
            grads = mass * (local[:, None] - optima) + noise
            direction, momentum = cgnm_direction(momentum, grads, decay, delta)
            local = local - eta * direction
        x = local.mean(0)
    variation = float(path_variation(np.array(rates), np.full(clients, 1 / clients))[-1])
    return Point(
        path=path,
        beta=THEOREM if beta is None else f"{beta:g}",
        delta=delta,
        rounds=rounds,
        seed=seed,
        mean=float(np.mean(squared)),
        late=float(np.mean(squared[-max(1, rounds // 4) :])),
        variation=variation,
    )


def run_points(horizons: Sequence[int], seeds: int) -> list[Point]:
    """Every rate path at every horizon and seed, with the paper's delta and with one far above the gradients; constant
    rates once more with the theorem's beta.

    The step scale grows with delta, since m / (||m|| + delta) is about m / delta there.
    """
    return [
        run_point(path, rounds, seed, beta=beta, delta=delta, scale=scale)
        for beta, paths in ((0.5, list(RATE_PATHS)), (None, ["constant"]))
        for delta, scale in ((0.1, 0.5), (10.0, 5.0))
        for path in paths
        for rounds in horizons
        for seed in range(seeds)
    ]


def reproduce_convergence(scale: str, seeds: int, folder: Path) -> tuple[list[list[str]], list[Path]]:
    """Run the experiment and write its table and figure: the table's rows and the files."""
    points = run_points((16, 64, 256) if scale == "smoke" else (16, 64, 256, 1024, 4096), seeds)
    rows, table = summarize(points), folder / "table.md"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        table.write_text(markdown_table(HEADER, rows), encoding="utf-8")
        return rows, [table, *save_figure(folder, lambda: draw(points))]


def summarize(points: Sequence[Point]) -> list[list[str]]:
    """A row under ``HEADER`` per beta, delta, rate path and horizon: means over seeds."""
    rows = []
    for beta, delta, path, rounds in dict.fromkeys((p.beta, p.delta, p.path, p.rounds) for p in points):
        same = [p for p in points if (p.beta, p.delta, p.path, p.rounds) == (beta, delta, path, rounds)]
        variation, mean, late = (_mean(same, key) for key in ("variation", "mean", "late"))
        rows.append([beta, f"{delta:g}", path, str(rounds), f"{variation:.2f}", f"{mean:.4f}", f"{late:.5f}"])
    return rows


def draw(points: Sequence[Point]) -> Figure:
    """Squared gradient norm against T, one panel per delta, one line per rate path and beta."""
    deltas, horizons = list(dict.fromkeys(p.delta for p in points)), sorted({p.rounds for p in points})
    lines = list(dict.fromkeys((p.path, p.beta) for p in points))
    figure, axes = subplots(1, len(deltas), (PAGE, 2.8))
    for ax, delta in zip(axes[0], deltas, strict=True):
        for (path, beta), colour in zip(lines, COLOURS, strict=False):
            mine = [p for p in points if (p.delta, p.path, p.beta) == (delta, path, beta)]
            said = f"{path}, beta {beta}" if beta == THEOREM else path
            for style, key, label in (("-", "late", said), (":", "mean", None)):
                means = [_mean([p for p in mine if p.rounds == rounds], key) for rounds in horizons]
                ax.loglog(horizons, means, style, marker="o", markersize=3, color=colour, label=label)
        ax.set_title(f"delta = {delta:g}")
        ax.set_xlabel("rounds T")
    axes[0][0].set_ylabel("squared gradient norm\n(solid: last quarter, dotted: all rounds)")
    axes[0][0].legend(title="rates")
    return figure


def _mean(points: Sequence[Point], key: str) -> float:
    """Of one number of the points."""
    return float(np.mean([getattr(p, key) for p in points]))
