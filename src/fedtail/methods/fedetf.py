"""FedETF (Li et al., 2023): a fixed simplex as classifier, balanced softmax as loss.

Clients that each train a classifier pull it apart; here it is a fixed equiangular tight frame (``models.classifiers``)
and only features, their projection and a temperature are trained. The loss is CE(z + gamma log n, y) with the client's
own class counts after resampling: ``LogitAdjustment`` with a local prior. The authors fine-tune projection and simplex
at each client after training; fedtail trains one global model and does not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.errors import check_range
from fedtail.methods.base import Batch, LocalRun, Method, cross_entropy
from fedtail.methods.logit_adjustment import adjusted, adjustment, proportions
from fedtail.methods.registry import METHODS


@METHODS.add("fedetf")
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
        shift = adjustment(proportions(run.resampled), self.gamma)
        return {"adjustment": torch.as_tensor(shift, device=run.device)}, {}

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        return cross_entropy(adjusted(logits, const["adjustment"]), batch.y), state
