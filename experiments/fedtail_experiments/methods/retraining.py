"""A linear classifier fitted on features at the server, for methods that do so."""

from __future__ import annotations

import torch
from torch import Tensor


def fit_linear(
    weight: Tensor,
    bias: Tensor,
    features: Tensor,
    labels: Tensor,
    *,
    steps: int,
    lr: float,
    momentum: float = 0.9,
    decay: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(C, d) weight and (C,) bias after ``steps`` steps of gradient descent on the mean cross-entropy, from those
    given.

    Whole passes, so that nothing is drawn. Features are brought to mean 0 and unit mean square first, the layer with
    them, which changes no answer and lets one learning rate suit all models. ``decay`` / 2 times the squared weight, as
    it is then, is added to the loss.
    """
    centre = features.mean(0)
    size = (features - centre).square().mean().sqrt().clamp_min(1e-12)
    f = (features - centre) / size
    w, b = weight * size, bias + weight @ centre
    target = torch.nn.functional.one_hot(labels, len(bias)).T.to(f.dtype)
    velocity_w, velocity_b = torch.zeros_like(w), torch.zeros_like(b)
    for _ in range(steps):
        # (C, n): such thin products take half the time that way around
        pull = (torch.softmax(torch.addmm(b.unsqueeze(1), w, f.T), 0) - target) / len(f)
        velocity_w = torch.addmm(velocity_w, pull, f, beta=momentum) + decay * w
        velocity_b = momentum * velocity_b + pull.sum(1)
        w, b = w - lr * velocity_w, b - lr * velocity_b
    w = w / size
    return w, b - w @ centre
