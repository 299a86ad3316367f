"""Measurements of the paper's figures, taken beside a simulated run without changing it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.movement import alignment
from fedtail.core.records import Task, Tensors
from fedtail.data.federation import Federation
from fedtail.errors import FedtailError
from fedtail.methods import FedAvg
from fedtail.methods.base import Batch, Method, cross_entropy
from fedtail.models.flat import FlatModel
from fedtail.rounds.evaluation import EVAL_BATCH, Split, model_logits
from fedtail.rounds.local import group_gradients, load_batch, train_probe
from fedtail.rounds.plan import plan_local_run
from fedtail.rounds.state import Monitor
from fedtail.settings import Settings
from fedtail.simulate import simulator


def loss_monitor(federation: Federation, model: FlatModel, method: Method, settings: Settings) -> Monitor:
    """``validation_loss``: mean cross-entropy of the new global model on the pooled private validation splits."""
    model = model.clone()
    split = Split.of(federation, np.concatenate(list(federation.validation)))

    def measure(task: Task, x: Tensor) -> dict[str, Any]:
        outputs = model_logits(model, x, split.batches(device=model.vector.device))
        total = sum(float(cross_entropy(z, y).double().sum()) for z, y in outputs)
        return {"validation_loss": total / max(len(split), 1)}

    return measure


def shadow_monitor(federation: Federation, model: FlatModel, method: Method, settings: Settings) -> Monitor:
    """``sgd_alignment``: alignment of plain SGD updates from the same global model, with the same batches.

    What FedAvg computes is measured and thrown away.
    """
    engine = simulator(federation, model.clone().module, FedAvg(weight_decay=method.weight_decay), settings)

    def measure(task: Task, x: Tensor) -> dict[str, Any]:
        plain = replace(task, probes={"rate": task.probes["rate"][:, :1]}, broadcast={}, messages={})
        updates, _ = engine.train(plain)
        engine.commit({})
        p = np.array([u.n_samples for u in updates], dtype=np.float64)
        deltas = np.stack([u.delta[0].cpu().numpy() for u in updates]).astype(np.float64)
        return {"sgd_alignment": alignment(deltas @ deltas.T, p / p.sum())}

    return measure


def assumption_monitor(federation: Federation, model: FlatModel, method: Method, settings: Settings) -> Monitor:
    """``assumption``: per group, the two quantities of Assumption 3.5, averaged over clients and local steps.

    cos(grad f_{k,h}(x^t), m^{t,i}) and | ||m^{t,i}|| - (1 - beta^i) ||grad f_{k,h}(x^t)|| |, where the gradient is the
    full one on the resampled data at the round's start.
    """
    if "beta" not in method.tunable:
        raise FedtailError(f"run.diagnostics 'assumption' needs a method with group momentum, not {method.name!r}")
    model = model.clone()

    def measure(task: Task, x: Tensor) -> dict[str, Any]:
        n_groups = method.group_count(federation.n_classes)
        cosines: list[list[float]] = [[] for _ in range(n_groups)]
        gaps: list[list[float]] = [[] for _ in range(n_groups)]
        for row, k in enumerate(task.clients):
            full = full_group_gradient(model, federation, k, method, float(task.probes["rate"][row, 0]), task, settings)
            beta = method.hyper()["beta"]

            def record(step: int, params: Tensor, state: Tensors, full: Tensor = full, beta: float = beta) -> None:
                momentum = state["momentum"].double()
                for h in range(n_groups):
                    size, target = float(momentum[h].norm()), float(full[h].norm())
                    if size > 0 and target > 0:
                        cosines[h].append(float(momentum[h] @ full[h]) / (size * target))
                        gaps[h].append(abs(size - (1 - beta ** (step + 1)) * target))

            train_probe(model, federation.client(k), method, task, row, 0, {}, settings, on_step=record)
        return {
            "assumption": {
                "cosine": [float(np.mean(c)) if c else float("nan") for c in cosines],
                "gap": [float(np.mean(g)) if g else float("nan") for g in gaps],
            }
        }

    return measure


def full_group_gradient(
    model: FlatModel, federation: Federation, k: int, method: Method, rate: float, task: Task, settings: Settings
) -> Tensor:
    """(H, d) gradient of f_{k,h} at the round's global model over one whole resampled epoch."""
    client = federation.client(k)
    whole = {"epochs": 1, "batch_size": EVAL_BATCH, "epoch_length": "inflated"}
    one_epoch = settings.model_copy(update={"local": settings.local.model_copy(update=whole)})
    plan = plan_local_run(client, rate, task.round, one_epoch, method.sampler, method.traits.views)
    model.load(task.x)
    model.module.train()
    device = model.vector.device
    groups = torch.as_tensor(method.groups(plan.resampled), device=device)
    n_groups = method.group_count(client.n_classes)
    total = torch.zeros(n_groups, model.n_params, dtype=torch.float64, device=device)
    size = sum(map(len, plan.batches))
    for index in plan.batches:
        inputs, y = load_batch(client, index, None, device)
        batch = Batch(y, torch.ones_like(y, dtype=torch.float32))
        grads, _, _ = group_gradients(model, method, inputs, batch, groups, n_groups, {}, {})
        total += grads.double() * (len(index) / size)
    return total
