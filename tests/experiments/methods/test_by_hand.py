"""Whole runs against loops written from the papers alone: some clients a round, cosine learning rates, weight decay,
several local epochs, clients that lack classes. Only the batches and who takes part are the engine's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.core.grouping import group_classes
from fedtail.core.random import generator
from fedtail.core.sampling import local_batches
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.models.flat import FlatModel
from fedtail.rates import RATES
from fedtail.rounds.loop import sample_clients, train_rounds
from fedtail.runs.build import assemble
from fedtail.settings import Settings
from tests.methods.federations import N_CLASSES, awkward_federation

ROUNDS, EPOCHS, BATCH, RATE, LR, DECAY, SEED = 4, 2, 16, 0.5, 0.1, 0.01, 5
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.3},
    "scaffold": {},
    "fedcgnm": {"beta": 0.7, "delta": 0.2},
    "weighted_ce": {},
    "logit_adjustment": {},
    "fedwcm": {"alpha": 0.3, "temperature": 1.0},
    "climb": {"eta": 5.0, "eps": 0.0, "primal_rounds": 2, "clip": 0.5},
}
"""What is written out below."""


def module() -> torch.nn.Module:
    return build_model("mlp", (6,), N_CLASSES, seed=3, hidden=(12,))


def by_hand(name: str, participation: float) -> Tensor:
    """The model after all rounds, in float64."""
    federation, net, o = awkward_federation(), module().double(), OPTIONS[name]
    shapes = {n: p.shape for n, p in net.named_parameters()}

    def logits(x: Tensor, inputs: Tensor) -> Tensor:
        parts = x.split([s.numel() for s in shapes.values()])
        weights = {n: part.view(s) for (n, s), part in zip(shapes.items(), parts, strict=True)}
        return torch.func.functional_call(net, weights, (inputs,))

    def gradient(x: Tensor, rows: np.ndarray, weight: Tensor, shift: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        losses = F.cross_entropy(logits(x, pool_x[rows]) + shift, pool_y[rows], reduction="none")
        return torch.autograd.grad((weight * losses).sum(), [x])[0]

    pool_x, pool_y, n_clients = federation.pool.x.double(), federation.pool.y, federation.n_clients
    counts = np.stack([np.bincount(pool_y[rows], minlength=N_CLASSES) for rows in federation.train]).astype(float)
    p = counts.sum(1) / counts.sum()
    x = FlatModel(module()).vector.detach().double().clone()
    own, common = torch.zeros(n_clients, len(x)).double(), torch.zeros(len(x)).double()  # SCAFFOLD's controls
    momentum, alpha, told = torch.zeros(len(x)).double(), 1.0, np.zeros_like(counts)  # FedWCM's
    dual, losses = np.zeros(n_clients), np.zeros(n_clients)  # CLIMB's
    for t in range(ROUNDS):
        lr = 1e-4 + 0.5 * (LR - 1e-4) * (1 + math.cos(math.pi * t / (ROUNDS - 1)))
        here = list(sample_clients(n_clients, participation, SEED, t))
        if name == "climb" and t % o["primal_rounds"] == 0:
            if t:
                dual = np.clip(dual + o["eta"] * (losses - losses.mean() - o["eps"]) / n_clients, 0, 100)
            losses = np.array([float(F.cross_entropy(logits(x, pool_x[r]), pool_y[r])) for r in federation.train])
        moved, steps, controls = {}, {}, own.clone()
        for k in here:
            present, y = counts[k] > 0, x.clone()
            times = np.where(present, (counts[k].max() / np.where(present, counts[k], 1)) ** RATE, 0)
            resampled = torch.tensor(counts[k] * np.floor(times) + np.rint(counts[k] * (times - np.floor(times))))
            groups, m = torch.tensor(group_classes(resampled.numpy(), 2)), torch.zeros(2, len(x)).double()
            shift = torch.zeros(N_CLASSES).double()
            if name == "logit_adjustment":
                shift = (resampled / resampled.sum()).log()
            labels = pool_y[federation.train[k]].numpy()
            drawn, sizes = local_batches(
                labels, RATE, generator(SEED, "batches", k, t), batch_size=BATCH, epochs=EPOCHS, n_classes=N_CLASSES
            )
            for places in np.split(drawn, np.cumsum(sizes)[:-1]):
                rows = federation.train[k][places]
                weight = torch.full((len(rows),), 1 / len(rows)).double()
                if name == "weighted_ce":
                    weight = (1 / resampled)[pool_y[rows]]
                    weight = weight / weight.sum()
                if name == "fedcgnm":
                    step = torch.zeros(len(x)).double()
                    for h in range(2):
                        g = gradient(y, rows, weight * (groups[pool_y[rows]] == h), shift)
                        m[h] = o["beta"] * m[h] + (1 - o["beta"]) * g
                        step += m[h] / (m[h].norm() + o["delta"])
                else:
                    step = gradient(y, rows, weight, shift)
                if name == "fedprox":
                    step = step + o["mu"] * (y - x)
                if name == "scaffold":
                    step = step - own[k] + common
                if name == "fedwcm":
                    step = alpha * step + (1 - alpha) * momentum
                if name == "climb":
                    step = step * min(1.0, o["clip"] / float(step.norm()))
                y = y - lr * (step + DECAY * y)
            moved[k], steps[k] = y - x, len(sizes)
            controls[k] = own[k] - common - moved[k] / (steps[k] * lr)  # option II
        share = {k: p[k] / p[here].sum() for k in here}
        if name == "climb":
            share = {k: share[k] * max(1 + dual[k] - dual.mean(), 0) for k in here}
        if name == "fedwcm":
            told[here] = counts[here]
            mix = told.sum(0) / told.sum()
            scores = told @ np.maximum(1 / N_CLASSES - mix, 0) / np.maximum(told.sum(1), 1)
            mean = scores[told.sum(1) > 0].mean()
            raised = {k: share[k] * np.exp(scores[k] / (o["temperature"] * mean)) for k in here}
            share = {k: raised[k] / sum(raised.values()) for k in here}
            momentum = torch.stack([-share[k] * moved[k] / (steps[k] * lr) for k in here]).sum(0)
            trust = (1 - 0.5 * np.abs(mix - 1 / N_CLASSES).sum()) * min(1, scores[here].mean() / mean)
            alpha = 1 - (1 - o["alpha"]) * trust
        x = x + torch.stack([share[k] * moved[k] for k in here]).sum(0)
        common, own = common + torch.tensor(p) @ (controls - own), controls
    return x


@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_run_is_what_its_paper_says(name: str, participation: float) -> None:
    torch.set_num_threads(1)
    expected = by_hand(name, participation)
    for path in ("reference", "batched"):
        settings = Settings.of(
            epochs=EPOCHS,
            batch_size=BATCH,
            lr=LR,
            seed=SEED,
            rounds=ROUNDS,
            participation=participation,
            path=path,
            workers=1,
            validate_every=0,
        )
        method = METHODS.build(name, weight_decay=DECAY, **OPTIONS[name])
        made = assemble(awkward_federation(), module(), method, RATES.build("uniform", 5, rate=RATE), settings)
        found = train_rounds(made, settings, made.begin()).x.double()
        assert float((found - expected).norm() / expected.norm()) < 5e-6, path
