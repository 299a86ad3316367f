"""FedWCM (Li et al., 2025): momentum at the clients, aggregated and trusted by who holds the scarce classes.

As in FedCM, every local step mixes the gradient with the last round's global direction m, and m is what the round's
clients did per step:

    x_k <- x_k - lr (alpha g + (1 - alpha) m),      m = sum_k w_k (x - x_k) / (steps_k lr_k)

What FedWCM adds goes by class counts, which clients send. With pi the class mix of all clients, class c is scarce by
e_c = max(1/C - pi_c, 0), and the score of a client is s_k = sum_c e_c n_kc / n_k:

    w_k ~ p_k exp(s_k / (temperature mean s)),      1 - alpha = (1 - alpha_0) (1 - D) min(1, q)

D is the distance of pi from equal classes (half the sum of absolute differences), and q the mean score of the round's
clients over that of all: the longer the tail, and the less a round has seen of it, the less its direction is followed.
With equal classes w_k = p_k and alpha = alpha_0: FedCM. The authors publish no code; scores, temperature and the
trust in the momentum are our reading of what their paper describes. In the first round there is no direction yet and
alpha is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.records import Tensors, Update
from fedtail.errors import check_range
from fedtail.methods.base import LocalRun, LocalStep, Method, Server


@dataclass(frozen=True)
class FedWCM(Method):
    """``alpha = 1`` is FedAvg with clients weighted by their scores."""

    title = "FedWCM"
    paper = (
        "Li et al., FedWCM: Unleashing the Potential of Momentum-based Federated Learning in Long-Tailed Scenarios, "
        "ICPP 2025"
    )
    wire = "each client's class counts up (a label histogram); the last round's direction, model-sized, down"
    plain_steps = "the global direction is computed from plain gradient steps"

    alpha: float = 0.1
    """Share of the gradient in a step where classes are equally frequent; in (0, 1]."""
    temperature: float = 1.0
    """How evenly clients count: large values are FedAvg's weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.alpha", self.alpha, 0.0, 1.0, open_low=True)
        check_range("method.temperature", self.temperature, 0.0, open_low=True)

    @property
    def reveals_classes(self) -> bool:
        return True

    # -- client

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        alpha, pull = run.message["alpha"].to(run.device), run.message["momentum"].to(run.device)
        return {"alpha": alpha.reshape(1), "pull": (1 - alpha) * pull}, {}

    def direction(self, step: LocalStep) -> tuple[Tensor, Tensors]:
        return step.const["alpha"] * step.grads.sum(dim=-2) + step.const["pull"], step.state

    def finish(
        self, run: LocalRun, delta: Tensor, const: Tensors, state: Tensors, client_state: Tensors
    ) -> tuple[Tensors, Tensors]:
        pace = 1.0 / (run.steps * run.lr) if run.steps and run.lr else 0.0
        counts = torch.as_tensor(np.asarray(run.counts, dtype=np.float32))
        return client_state, {"counts": counts, "pace": torch.tensor([pace])}

    # -- server

    def init_server(self, n_clients: int, n_classes: int, n_params: int) -> Tensors:
        return {
            "counts": torch.zeros(n_clients, n_classes),
            "momentum": torch.zeros(n_params),
            "alpha": torch.ones(()),
        }

    def broadcast(self, state: Tensors) -> Tensors:
        return {"momentum": state["momentum"], "alpha": state["alpha"]}

    def weights(self, p: np.ndarray, updates: Sequence[Update], state: Tensors) -> np.ndarray:
        told = known_counts(state["counts"], updates)
        scores = client_scores(told)
        mean = scores[told.sum(1) > 0].mean()
        if mean <= 0:
            return p
        raised = p * np.exp(scores[[u.client for u in updates]] / (self.temperature * mean))
        return raised * (p.sum() / raised.sum())

    def after_round(self, server: Server, updates: Sequence[Update], choice: Sequence[int], state: Tensors) -> Tensors:
        told = known_counts(state["counts"], updates)
        n = len(state["momentum"])
        p = server.weights[[u.client for u in updates]]
        share = self.weights(p / p.sum(), updates, state)
        momentum = torch.zeros(n, dtype=torch.float64)
        for u, probe, w in zip(updates, choice, share, strict=True):
            pace = float(u.extras["pace"][probe])
            momentum -= float(w) * pace * u.delta[probe][:n].double().cpu()
        alpha = momentum_share(told, [u.client for u in updates], self.alpha)
        return {
            "counts": torch.as_tensor(told, dtype=torch.float32),
            "momentum": momentum.float(),
            "alpha": torch.tensor(alpha, dtype=torch.float32),
        }

    def stats(self, state: Tensors) -> dict[str, Any]:
        return {"gradient_share": float(state["alpha"])}


def known_counts(before: Tensor, updates: Sequence[Update]) -> np.ndarray:
    """(K, C) class counts of all clients that have sent any, with those of the round."""
    told = before.double().cpu().numpy().copy()
    for u in updates:
        told[u.client] = u.extras["counts"][0].double().cpu().numpy()
    return told


def class_mix(counts: np.ndarray) -> np.ndarray:
    """(C,) proportions of the classes over all clients. counts: (K, C)."""
    return np.asarray(counts.sum(0) / max(counts.sum(), 1.0))


def client_scores(counts: np.ndarray) -> np.ndarray:
    """(K,) how much each client holds of scarce classes; 0 for one that has sent nothing."""
    scarce = np.maximum(1 / counts.shape[1] - class_mix(counts), 0.0)
    return np.asarray(counts @ scarce / np.maximum(counts.sum(1), 1.0))


def momentum_share(counts: np.ndarray, present: Sequence[int], alpha: float) -> float:
    """The share of the gradient in the next round's steps."""
    distance = 0.5 * float(np.abs(class_mix(counts) - 1 / counts.shape[1]).sum())
    scores = client_scores(counts)
    mean = float(scores[counts.sum(1) > 0].mean())
    seen = float(scores[list(present)].mean()) / mean if mean > 0 else 1.0
    return 1.0 - (1.0 - alpha) * (1.0 - distance) * min(1.0, seen)
