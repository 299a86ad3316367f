"""The class-grouped normalized momentum step on flat vectors (paper section 3.1).

    m_h <- beta m_h + (1 - beta) g_h
    direction = sum_h m_h / (||m_h|| + delta)

All functions take leading batch dimensions: one client is (H, d), all clients at once are (K, H, d).
"""

from __future__ import annotations

import torch
from torch import Tensor

Scalar = float | Tensor

FEW = 4


def like(value: Scalar, target: Tensor) -> Scalar:
    """A scalar, or one value per leading batch entry, shaped to broadcast against ``target``."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    return value.reshape(value.shape + (1,) * (target.ndim - value.ndim))


def group_momentum(momentum: Tensor, grads: Tensor, beta: Scalar) -> Tensor:
    """(..., H, d) momentum after one step; an absent group has a zero gradient and decays."""
    return torch.lerp(momentum, grads, 1.0 - like(beta, grads))


def normalizers(momentum: Tensor, delta: Scalar, natural: bool = False) -> Tensor:
    """(..., H, 1) what each group's momentum is multiplied with: 1 / (||m_h|| + delta), or 1 for a zero vector.

    With ``natural`` length it is L / (||m_h|| + delta L), where L is the mean of the groups' lengths.
    """
    norm = torch.linalg.vector_norm(momentum, dim=-1, keepdim=True)
    if natural:
        length = norm.mean(dim=-2, keepdim=True)
        return length / torch.where(length > 0, norm + like(delta, momentum) * length, torch.ones_like(norm))
    denominator = norm + like(delta, momentum)
    return torch.where(denominator > 0, denominator, torch.ones_like(denominator)).reciprocal()


def normalized_sum(momentum: Tensor, delta: Scalar, natural: bool = False) -> Tensor:
    """(..., d) sum over groups of m_h / (||m_h|| + delta); the norm is over all parameters jointly.

    A zero vector contributes zero also with ``delta = 0``.
    """
    factor = normalizers(momentum, delta, natural)
    if momentum.shape[-2] > FEW:
        return (momentum * factor).sum(dim=-2)
    total = momentum[..., 0, :] * factor[..., 0, :]
    for h in range(1, momentum.shape[-2]):  # for few groups half the memory traffic of a product and a sum
        total = torch.addcmul(total, momentum[..., h, :], factor[..., h, :])
    return total


def cgnm_direction(
    momentum: Tensor, grads: Tensor, beta: Scalar, delta: Scalar, natural: bool = False
) -> tuple[Tensor, Tensor]:
    """One CGNM step: the direction (..., d) to subtract, and the new momentum (..., H, d)."""
    momentum = group_momentum(momentum, grads, beta)
    return normalized_sum(momentum, delta, natural), momentum
