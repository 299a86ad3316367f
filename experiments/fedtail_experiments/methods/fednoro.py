"""FedNoRo (Wu et al., 2023): long tails and clients with noisy labels.

Clients train logit-adjusted cross-entropy (LA) with their own prior. After ``warmup`` rounds the server clusters the
clients' per-class losses by a two-component Gaussian mixture (majority vote of 9 seeds) into clean and noisy. Noisy
clients then train

    w KL(teacher softmax at temperature 0.8 || student) + (1 - w) LA,   w = kd exp(-5 (1 - (t - warmup) / ramp)^2)

with the round's global model as teacher, and aggregation is distance-aware: a_k ~ n_k exp(-d_k / max d), d_k the
distance of a noisy client's update to the nearest clean one. With clean labels there is nothing for it to find, yet
the mixture always names somebody.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.core.records import Tensors, Update
from fedtail.errors import check_range
from fedtail.methods.base import Batch, LocalRun, Method, Server
from fedtail.methods.logit_adjustment import MASKED, adjusted, adjustment, proportions
from fedtail_experiments.methods.measurements import CLASS_LOSS

VOTES = 9
AT_ONCE = 1 << 22
"""Values of all updates together that are in memory at once when they are compared."""


@dataclass(frozen=True)
class FedNoRo(Method):
    """Runs shorter than ``warmup`` rounds are logit adjustment with a local prior."""

    title = "FedNoRo"
    paper = (
        "Wu et al., FedNoRo: Towards Noise-Robust Federated Learning by Addressing Class Imbalance and Label Noise "
        "Heterogeneity, IJCAI 2023"
    )
    wire = (
        "mean losses per class up from each client, once (they show which classes it has); a distillation weight "
        "down to each client"
    )
    needs_teacher = True

    tau: float = 1.0
    """Strength of the logit adjustment."""
    warmup: int = 10
    ramp: int = 39
    """Rounds over which the distillation weight rises to ``kd``."""
    kd: float = 0.8
    temperature: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.tau", self.tau, 0.0)
        check_range("method.warmup", self.warmup, 0)
        check_range("method.ramp", self.ramp, 1)
        check_range("method.kd", self.kd, 0.0, 1.0)
        check_range("method.temperature", self.temperature, 0.0, open_low=True)

    @property
    def reveals_classes(self) -> bool:
        return True

    # -- client

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        shift = torch.as_tensor(adjustment(proportions(run.resampled), self.tau), device=run.device)
        weight = run.message.get("kd_weight", torch.zeros(1)).to(run.device, torch.float32)
        return {"adjustment": shift, "kd_weight": weight.reshape(1)}, {}

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        shift = const["adjustment"]
        log_p = F.log_softmax(adjusted(logits, shift), dim=-1)
        la = -log_p.gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
        if batch.teacher is None:
            raise ValueError("FedNoRo needs the teacher's logits")
        soft = torch.softmax(batch.teacher / self.temperature, dim=-1)
        # classes the client does not have are out of its softmax; their log-probability counts as 0
        log_p = torch.where(shift.unsqueeze(-2) > MASKED, log_p, 0.0)
        kl = (torch.xlogy(soft, soft) - soft * log_p).sum(dim=-1)
        w = const["kd_weight"]
        return w * kl + (1.0 - w) * la, state

    # -- server

    def init_server(self, n_clients: int, n_classes: int, n_params: int) -> Tensors:
        return {"noisy": torch.zeros(n_clients), "kd_weight": torch.zeros(())}

    def before_round(self, server: Server, state: Tensors) -> Tensors:
        if server.round < self.warmup:
            return state
        noisy = state["noisy"]
        if server.round == self.warmup:
            losses = np.full((server.n_clients, server.n_classes), np.nan)
            for k, values in server.measure(CLASS_LOSS).items():
                losses[k] = values.double().cpu().numpy()
            noisy = torch.as_tensor(noisy_clients(losses), dtype=torch.float32)
        return {"noisy": noisy, "kd_weight": torch.tensor(self.kd_weight(server.round))}

    def kd_weight(self, t: int) -> float:
        """w of round t."""
        phase = 1.0 - min(max(t - self.warmup, 0), self.ramp) / self.ramp
        return float(self.kd * np.exp(-5.0 * phase * phase))

    def message(self, state: Tensors, client: int) -> Tensors:
        return {"kd_weight": (state["kd_weight"] * state["noisy"][client]).reshape(1)}

    def weights(self, p: np.ndarray, updates: Sequence[Update], state: Tensors) -> np.ndarray:
        noisy = state["noisy"].bool().cpu().numpy()[[u.client for u in updates]]
        if not noisy.any() or noisy.all():
            return p
        distance = np.zeros(len(updates))
        distance[noisy] = distances(updates, noisy).min(dim=1).values.cpu().numpy()
        if distance.max() == 0:
            return p
        scaled = p * np.exp(-distance / distance.max())
        return scaled / scaled.sum()

    def stats(self, state: Tensors) -> dict[str, Any]:
        noisy = np.flatnonzero(state["noisy"].cpu().numpy()).tolist()
        return {"noisy_clients": noisy, "kd_weight": float(state["kd_weight"])}


def distances(updates: Sequence[Update], noisy: np.ndarray) -> Tensor:
    """(noisy, clean) Euclidean distances of mean updates, in float64.

    A few values of all of them at a time: updates that wait on disk stay there.
    """
    n, width = updates[0].delta.shape[-1], max(1, AT_ONCE // len(updates))
    squares: Tensor | float = 0.0
    for first in range(0, n, width):
        part = torch.stack([u.delta[:, first : first + width].double().mean(dim=0) for u in updates])
        apart = torch.cdist(part[noisy], part[~noisy], compute_mode="donot_use_mm_for_euclid_dist")
        squares = squares + apart.square()
    return torch.as_tensor(squares).sqrt()


def noisy_clients(losses: np.ndarray) -> np.ndarray:
    """(K,) bool from (K, C) mean losses per class, NaN where a client has none.

    NaN becomes the class's least loss; classes are scaled to [0, 1]; the component with the larger mean is noisy.
    """
    seen = ~np.isnan(losses).all(axis=0)
    table = losses[:, seen]
    if len(table) < 3 or not table.size:
        return np.zeros(len(losses), dtype=bool)
    table = np.where(np.isnan(table), np.nanmin(table, axis=0), table)
    low, high = table.min(axis=0), table.max(axis=0)
    table = (table - low) / np.where(high > low, high - low, 1.0)
    if not table.any():
        return np.zeros(len(losses), dtype=bool)
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    votes: Counter[tuple[bool, ...]] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for seed in range(VOTES):
            mixture = GaussianMixture(n_components=2, random_state=seed).fit(table)
            worse = int(np.argmax(mixture.means_.sum(axis=1)))
            votes[tuple((mixture.predict(table) == worse).tolist())] += 1
    return np.array(votes.most_common(1)[0][0])
