"""Small federations and runs that the method tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedtail.data.federation import Federation, Samples
from fedtail.methods import Method
from fedtail.models import build_model
from fedtail.rates import RATES
from fedtail.rates.base import RateStrategy
from fedtail.rounds.loop import train_rounds
from fedtail.rounds.state import Problem, State
from fedtail.runs.build import assemble
from fedtail.settings import Settings
from fedtail.simulate.reference import ReferenceSimulator

N_CLASSES = 4
COUNTS = ((30, 12, 5, 2), (24, 0, 6, 3), (0, 9, 0, 0), (1, 0, 0, 0), (20, 10, 4, 2))
"""Client 1 lacks a class, client 2 has one class, client 3 one sample."""


def awkward_federation(auxiliary: int = 3, validation: float = 0.0) -> Federation:
    """Five clients whose classes are Gaussian clusters in 6 dimensions."""
    rng = np.random.default_rng(7)
    centres = 1.5 * rng.standard_normal((N_CLASSES, 6))

    def draw(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        y = np.repeat(np.arange(N_CLASSES), counts)
        return (centres[y] + rng.standard_normal((len(y), 6))).astype(np.float32), y

    federation = Federation.from_arrays(
        [draw(c) for c in COUNTS],
        draw((20,) * N_CLASSES),
        classes=[str(c) for c in range(N_CLASSES)],
        validation=validation,
    )
    x, y = draw((auxiliary,) * N_CLASSES)
    pool = Samples(
        torch.cat([federation.pool.x, torch.as_tensor(x)]), torch.cat([federation.pool.y, torch.as_tensor(y)])
    )
    return replace(federation, pool=pool, auxiliary=np.arange(len(federation.pool), len(pool)))


def problem(
    method: Method,
    federation: Federation | None = None,
    *,
    workers: int = 1,
    path: str = "reference",
    metric: str = "accuracy",
    rates: RateStrategy | None = None,
    epochs: int = 3,
    wrap: Callable[[ReferenceSimulator], None] | None = None,
) -> Problem:
    """A fresh problem in the simulator."""
    torch.set_num_threads(1)
    federation = federation or awkward_federation()
    module = build_model("mlp", federation.input_shape, federation.n_classes, seed=3, hidden=(12,))
    strategy = rates or RATES.build("uniform", federation.n_clients, rate=0.5)
    settings = Settings.of(epochs=epochs, batch_size=16, seed=5, path=path, workers=workers, metric=metric)
    made = assemble(federation, module, method, strategy, settings)
    if wrap is not None:
        wrap(made.engine)  # type: ignore[arg-type]
    return made


def train(made: Problem, rounds: int = 3, *, state: State | None = None, **settings: Any) -> State:
    """Train from the start, or go on from ``state``."""
    plan = {"lr": 0.05, "schedule": "constant", "seed": 11, "validate_every": 0, **settings}
    return train_rounds(made, Settings.of(rounds=rounds, **plan), state or made.begin())
