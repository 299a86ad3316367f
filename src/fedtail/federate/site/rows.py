"""Rows of an update that tell of single samples, kept back before it leaves.

The gradient of a hidden unit's weights is a sum of the inputs that switch it on. A server that chooses the weights can
have a unit that one sample alone switches on (Boenisch et al., EuroS&P 2023), or units that grow from one to the next
by one sample, whose difference is that sample (Fowl et al., ICLR 2022). Such units are found by what the samples here
switch on at the server's model; honestly trained models have next to none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedtail.data.federation import Client
from fedtail.models.flat import FlatModel
from fedtail.rounds.evaluation import Split, model_logits

WINDOW = 4096
"""Units that about as many samples switch on, with which a unit is compared."""
ALIKE = 0.999
"""Cosine from which on two units count as read alike."""


@dataclass(frozen=True)
class Hidden:
    """A fully connected layer, what switches its units on, and the layer that reads them."""

    layer: nn.Linear
    switch: nn.Module
    reader: nn.Linear | None = None


def keep_back(model: FlatModel, client: Client, x: Tensor, delta: Tensor, least: int) -> Tensor:
    """delta: (P, n) without what it says of units that tell of fewer than ``least`` samples."""
    hidden = hidden_layers(model.module) if least > 1 else []
    found = []
    for each, pattern in zip(hidden, switched_on(model, client, x, hidden) if hidden else [], strict=True):
        found.append(lone_units(pattern, None if each.reader is None else each.reader.weight, least))
    if not any(bool(lone.any()) for lone in found):
        return delta
    out, starts, start = delta.clone(), {}, 0
    for part in model.params:
        starts[id(part)] = start
        start += part.numel()
    for each, lone in zip(hidden, found, strict=True):
        lone = lone.to(out.device)
        masks: list[tuple[Tensor | None, Tensor]] = [(each.layer.weight, lone.unsqueeze(-1)), (each.layer.bias, lone)]
        masks += [(each.reader.weight, lone)] if each.reader is not None else []
        for weights, mask in masks:
            if weights is not None and id(weights) in starts:
                piece = out[:, starts[id(weights)] :][:, : weights.numel()]
                piece.unflatten(1, weights.shape).masked_fill_(mask, 0.0)
    return out


def hidden_layers(module: nn.Module) -> list[Hidden]:
    """The hidden layers of a network whose inputs meet a fully connected layer first; else none: in a convolution every
    sample switches on every unit somewhere."""
    leaves = [leaf for leaf in module.modules() if not any(leaf.children())]
    if not isinstance(next((leaf for leaf in leaves if any(True for _ in leaf.parameters())), None), nn.Linear):
        return []
    out: list[Hidden] = []
    layer = None
    for leaf in leaves:
        if isinstance(leaf, nn.Linear):
            if out and out[-1].reader is None and leaf.in_features == out[-1].layer.out_features:
                out[-1] = Hidden(out[-1].layer, out[-1].switch, leaf)
            layer = leaf
        elif isinstance(leaf, nn.ReLU) and layer is not None:
            out.append(Hidden(layer, leaf))
            layer = None
    return out


def switched_on(model: FlatModel, client: Client, x: Tensor, hidden: list[Hidden]) -> list[Tensor]:
    """(n, units) of each hidden layer: which training samples switch which units on at the model ``x``."""
    seen: list[list[Tensor]] = [[] for _ in hidden]
    hooks = [
        each.switch.register_forward_pre_hook(lambda _, values, mine=mine: mine.append((values[0] > 0).cpu()))
        for each, mine in zip(hidden, seen, strict=True)
    ]
    try:
        for _ in model_logits(model, x, Split.of(client, client.train).batches(device=model.vector.device)):
            pass
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(mine).flatten(1) for mine in seen]


def lone_units(on: Tensor, reader: Tensor | None, least: int) -> Tensor:
    """(units,) which of them tell of fewer than ``least`` samples: alone, since no others switch them on, or by the
    difference to a unit that is read alike, so that what they share cancels. on: (n, units) bool; reader:
    (m, units) weights by which the next layer reads them."""
    sizes = on.sum(0)
    lone = (sizes > 0) & (sizes < least)
    order = torch.argsort(sizes)
    heading = None if reader is None else nn.functional.normalize(reader.detach().double().cpu(), dim=0)
    for shift in range(1, len(order)):
        low, high = order[:-shift], order[shift:]
        near = (sizes[high] - sizes[low]) < least  # sets whose sizes differ by more differ in more
        if not bool(near.any()):
            break
        low, high = low[near], high[near]
        if shift > WINDOW:  # no honest model is like this, and to compare all would take a day
            lone[low] = lone[high] = True
            break
        if heading is not None:
            alike = (heading[:, low] * heading[:, high]).sum(0).abs() > ALIKE
            low, high = low[alike], high[alike]
        apart = (on[:, low] ^ on[:, high]).sum(0)
        close = (apart > 0) & (apart < least)
        lone[low[close]] = lone[high[close]] = True
    return lone
