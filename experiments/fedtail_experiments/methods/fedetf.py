"""FedETF (Li et al., 2023): a fixed simplex as classifier, balanced softmax as loss.

Clients that each train a classifier pull it apart; here it is a fixed equiangular tight frame (``models.classifiers``)
and only features, their projection and a temperature are trained. The loss is CE(z + gamma log max(n, 1), y) with the
client's own class counts n after resampling.

A class that the client does not have counts as one sample, as in the authors' code, and so stays in the softmax:
features are brought to length 1 before the simplex, so leaving it out would not leave it alone. They fine-tune
projection and simplex at each client after training; fedtail trains one global model and does not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.errors import check_range
from fedtail.methods.base import Batch, LocalRun, Method, cross_entropy


@dataclass(frozen=True)
class FedETF(Method):
    """``gamma = 0`` is plain cross-entropy on the fixed classifier."""

    title = "FedETF"
    paper = (
        "Li et al., No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and Fixed "
        "Classifier, ICCV 2023"
    )
    classifier = "etf"

    gamma: float = 1.0
    """Strength of the balancing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.gamma", self.gamma, 0.0)

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        shift = self.gamma * np.log(np.maximum(run.resampled, 1))
        return {"shift": torch.as_tensor(shift, dtype=torch.float32, device=run.device)}, {}

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        return cross_entropy(logits + const["shift"].unsqueeze(-2), batch.y), state
