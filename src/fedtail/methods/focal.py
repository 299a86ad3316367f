"""Focal loss (Lin et al., 2017): loss = -(1 - p_y)^gamma log p_y, so well-classified samples count less."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.core.records import Tensors
from fedtail.errors import check_range
from fedtail.methods.base import Batch, Method
from fedtail.methods.registry import METHODS


@METHODS.add("focal")
@dataclass(frozen=True)
class Focal(Method):
    """``gamma = 0`` is cross-entropy."""

    title = "Focal loss"
    paper = "Lin et al., Focal Loss for Dense Object Detection, ICCV 2017"

    gamma: float = 2.0
    """Focusing exponent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.gamma", self.gamma, 0.0)

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        log_p = F.log_softmax(logits, dim=-1).gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
        miss = (-torch.expm1(log_p)).clamp_min(1e-12)  # 1 - p; the floor keeps gradients finite for gamma < 1
        return -(miss**self.gamma * log_p), state
