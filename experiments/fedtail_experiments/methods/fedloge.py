"""FedLoGe (Xiao et al., 2024): features trained by a fixed sparse simplex, answers by a realigned linear head.

The output layer is ``models.classifiers.TwoHeads``. A step takes CE(simplex logits, y), which trains the features, plus
CE(linear logits, y) on features whose gradient is cut off, which trains the head. The head is averaged like everything
else; for answers its rows are brought to one length, since a rare class's row is shorter. The authors' third part, a
head of each client's own that never leaves it, serves personalized models; fedtail trains one global model and has
none."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.methods.base import Batch, Method, cross_entropy


@dataclass(frozen=True)
class FedLoGe(Method):
    title = "FedLoGe"
    paper = "Xiao et al., FedLoGe: Joint Local and Generic Federated Learning under Long-Tailed Data, ICLR 2024"
    classifier = "sparse_etf"

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        c = logits.shape[-1] // 2
        simplex, linear = logits[..., :c], logits[..., c:]
        return cross_entropy(simplex, batch.y) + cross_entropy(linear, batch.y), state
