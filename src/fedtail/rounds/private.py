"""Local privacy in simulation: every update gets its site's noise before the round loop sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fedtail.core.privacy import Privacy
from fedtail.core.records import Refusal, Task, Update
from fedtail.errors import FedtailError
from fedtail.methods.base import Method, run_bound
from fedtail.rounds.engine import Engine


class LocalNoise:
    """An engine whose updates arrive with noise; everything else is the engine's own."""

    def __init__(self, engine: Engine, method: Method, privacy: Privacy, n_classes: int) -> None:
        self.inner, self.method, self.privacy, self.n_classes = engine, method, privacy, n_classes

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        updates, refusals = self.inner.train(task)
        n = self.inner.model.n_params
        return [add_noise(u, task, self.method, self.privacy, self.n_classes, n) for u in updates], refusals

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def add_noise(update: Update, task: Task, method: Method, privacy: Privacy, n_classes: int, n_params: int) -> Update:
    """The update as it leaves a site under local privacy. task: as the site got it, or the whole round's.

    Noise goes to the ``n_params`` trained parameters: frozen ones do not move, and there is nothing to hide in them.
    """
    delta = update.delta.clone()
    for i, steps in enumerate(update.steps):
        bound = run_bound(method, task, update.client, i, steps, n_classes)
        if bound is None:
            raise FedtailError(f"privacy needs a method with a norm bound; {method.name!r} as set has none")
        noise = privacy.draw(n_params, privacy.noise * bound, f"privacy/{i}", update.client, task.round)
        delta[i, :n_params] += noise.to(delta.device)
    return replace(update, delta=torch.as_tensor(delta))
