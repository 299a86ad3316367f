"""What a server-side monitor may know of the data: output-layer gradients on a small auxiliary set (Ratio Loss)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedtail.data.federation import Federation, Samples, Transform
from fedtail.methods.base import cross_entropy
from fedtail.models.flat import FlatModel

CHUNK = 256


def auxiliary_monitor(model: FlatModel, federation: Federation) -> Callable[[Tensor], Tensor] | None:
    """``Problem.auxiliary`` for a federation; None if it has no auxiliary samples.

    The monitor works on a copy of the model, so it never disturbs a running engine.
    """
    if not len(federation.auxiliary):
        return None
    samples = federation.pool.take(federation.auxiliary)
    scratch = model.clone()
    return lambda x: class_gradients(scratch, x, samples, federation.transform, federation.n_classes)


def class_gradients(model: FlatModel, x: Tensor, samples: Samples, transform: Transform, n_classes: int) -> Tensor:
    """(C, rows, columns) mean cross-entropy gradient of the output layer's weight over each class's samples.

    A class without samples has a zero gradient. The model is in evaluation mode: no dropout, fixed statistics.
    """
    model.load(x)
    model.module.eval()
    offset, shape = model.output_layer()
    weight = next(p for p in model.params if p.data_ptr() == model.vector[offset:].data_ptr())
    device = model.vector.device
    out = torch.zeros(n_classes, *shape, device=device)
    for c in range(n_classes):
        mine = samples.x[samples.y == c]
        for part in mine.split(CHUNK):
            logits = model.module(transform(part.to(device)))
            y = torch.full((len(part),), c, device=device)
            (grad,) = torch.autograd.grad(cross_entropy(logits, y).sum(), [weight])
            out[c] += grad / len(mine)
    return out
