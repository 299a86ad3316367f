"""What a server-side monitor may know of the data: output-layer gradients on a small auxiliary set (Ratio Loss)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedtail.data.federation import Federation, Samples, Transform
from fedtail.methods.base import cross_entropy
from fedtail.models.flat import FlatModel
from fedtail_experiments.methods.measurements import class_gradients

CHUNK = 256


def auxiliary_monitor(model: FlatModel, federation: Federation) -> Callable[[Tensor], Tensor]:
    """Model vector -> (C, rows, columns) mean cross-entropy gradient of the output layer's weight over each class's
    auxiliary samples.

    A class without samples has a zero gradient. The model is in evaluation mode: no dropout, fixed statistics. The
    monitor works on a copy of the model, so it never disturbs a running engine.
    """
    samples = federation.pool.take(federation.auxiliary)
    scratch = model.clone()
    gradients = in_one_pass if answers_with_its_output_layer(scratch, samples, federation.transform) else class_by_class
    return lambda x: gradients(scratch, x, samples, federation.transform, federation.n_classes)


def answers_with_its_output_layer(model: FlatModel, samples: Samples, transform: Transform) -> bool:
    """Whether logits are what a plain linear layer says, and nothing is done to them afterwards."""
    said: list[Tensor] = []
    layer = model.output_linear()
    model.module.eval()
    hook = layer.register_forward_hook(lambda _, given, out: said.append(out))
    try:
        with torch.no_grad():
            logits = model.module(transform(samples.x[:1].to(model.vector.device)))
    finally:
        hook.remove()
    return type(layer) is nn.Linear and len(said) == 1 and said[0] is logits


def in_one_pass(model: FlatModel, x: Tensor, samples: Samples, transform: Transform, n_classes: int) -> Tensor:
    """``class_by_class`` from one pass over all samples without a backward one: a linear layer's gradient is what its
    inputs and the probabilities say."""
    device = model.vector.device
    parts = zip(samples.x.split(CHUNK), samples.y.split(CHUNK), strict=True)
    found = model.features(x, ((transform(part.to(device)), y.to(device)) for part, y in parts))
    return class_gradients(*found, n_classes, dtype=x.dtype)[..., :-1].nan_to_num(0.0)


def class_by_class(model: FlatModel, x: Tensor, samples: Samples, transform: Transform, n_classes: int) -> Tensor:
    """Compute the gradients by automatic differentiation, for any output layer: as many passes as there are classes."""
    model.load(x)
    model.module.eval()
    offset, shape = model.output_layer()
    weight = next(p for p in model.params if p.data_ptr() == model.vector[offset:].data_ptr())
    device = model.vector.device
    out = torch.zeros(n_classes, *shape, device=device)
    for c in samples.y.unique().tolist():
        mine = samples.x[samples.y == c]
        for part in mine.split(CHUNK):
            logits = model.module(transform(part.to(device)))
            y = torch.full((len(part),), c, device=device)
            (grad,) = torch.autograd.grad(cross_entropy(logits, y).sum(), [weight])
            out[c] += grad / len(mine)
    return out
