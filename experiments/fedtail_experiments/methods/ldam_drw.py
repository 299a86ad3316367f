"""LDAM-DRW (Cao et al., 2019): a margin for rare classes, and class weights once the features are learnt.

    loss = w_y CE(z - m_y e_y, y),      m_c = margin (n_min / n_c)^(1/4),      w_c = 1, later (1 - b) / (1 - b^(n_c))

The weights come in after ``defer`` of the rounds (the authors: epoch 160 of 200) and are rescaled to a mean of 1 over
the classes present; a batch's loss is divided by its sum of weights, as in the authors' code. Counts are the client's
own: margins are of the samples it has, weights of those it trains on after resampling. The authors' classifier compares
directions and multiplies their cosines by 30; here the output layer is the model's own and its logits are taken as they
are, ``scale`` times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.errors import check_range
from fedtail.methods.base import Batch, LocalRun, Method, Server, cross_entropy, one_hot, pick, relative
from fedtail.methods.class_balanced import ClassBalanced


@dataclass(frozen=True)
class LDAMDRW(Method):
    """``margin = 0`` with ``defer = 1`` is FedAvg."""

    title = "LDAM-DRW"
    paper = "Cao et al., Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss, NeurIPS 2019"
    wire = "nothing up; down, whether the weights have come in"
    whole_batch = True

    margin: float = 0.5
    """The margin of the client's rarest class."""
    scale: float = 1.0
    """Factor of the logits after the margin."""
    defer: float = 0.8
    """Share of the rounds before the weights come in."""
    b: float = 0.9999
    """Of the weights: share of a sample's neighbourhood that further samples do not add; in [0, 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.margin", self.margin, 0.0)
        check_range("method.scale", self.scale, 0.0, open_low=True)
        check_range("method.defer", self.defer, 0.0, 1.0)
        check_range("method.b", self.b, 0.0, 1.0, open_high=True)

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        n = torch.as_tensor(run.counts, dtype=torch.float64)
        rarest = n[n > 0].min() if bool((n > 0).any()) else torch.ones(())
        margin = torch.where(n > 0, self.margin * (rarest / n.clamp_min(1)) ** 0.25, self.margin)
        weight = torch.as_tensor(ClassBalanced(b=self.b).class_weights(run.resampled))
        weight = torch.where(run.message["weighted"].cpu() > 0, weight, 1.0)
        return {"margin": margin.float().to(run.device), "class_weight": weight.float().to(run.device)}, {}

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        moved = logits - const["margin"].unsqueeze(-2) * one_hot(batch.y, logits.shape[-1])
        weight = relative(pick(const["class_weight"], batch.y), batch)
        return weight * cross_entropy(self.scale * moved, batch.y), state

    def init_server(self, n_clients: int, n_classes: int, n_params: int) -> Tensors:
        return {"weighted": torch.zeros(())}

    def before_round(self, server: Server, state: Tensors) -> Tensors:
        return {"weighted": torch.tensor(float(server.round >= self.defer * server.rounds))}

    def broadcast(self, state: Tensors) -> Tensors:
        return state
