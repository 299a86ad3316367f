"""Rows of an update that tell of single samples, kept back before it leaves.

The gradient of a hidden unit's weights is a sum of the inputs that switch it on. A server that chooses the weights can
have a unit that one sample alone switches on (Boenisch et al., EuroS&P 2023), or units that grow from one to the next
by one sample, whose difference is that sample (Fowl et al., ICLR 2022). Such units are found by what the samples here
switch on at the server's model; honestly trained models have next to none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.data.federation import Client
from fedtail.methods.base import cross_entropy
from fedtail.models.flat import FlatModel
from fedtail.rounds.evaluation import Split

ALIKE, SCALE = 0.999, 0.01
"""Cosine, and where a layer is normalized also the deviation of the ratio from 1, of what flows back to two units whose
difference leaves what they share out."""
FEW = 8
"""Units of a layer that may differ by so little from others without being alike; in an honest model it is chance."""
MOST = 8192
"""Units that are compared with each other; where more come into question, all count as close: no honest model is so."""


@dataclass(frozen=True)
class Hidden:
    """A fully connected layer, what switches its units on, and the layer that reads them."""

    layer: nn.Linear
    switch: nn.Module
    normed: bool
    reader: nn.Linear | None = None


def keep_back(model: FlatModel, client: Client, x: Tensor, delta: Tensor, least: int) -> Tensor:
    """delta: (P, n) without what it says of units that tell of fewer than ``least`` samples."""
    hidden = hidden_layers(model.module) if least > 1 else []
    lone = find_lone(model, client, x, hidden, least) if hidden else []
    if not any(bool(units.any()) for units in lone):
        return delta
    out, starts, start = delta.clone(), {}, 0
    for part in model.params:
        starts[id(part)] = start
        start += part.numel()
    for each, units in zip(hidden, lone, strict=True):
        mask = units.to(out.device)
        masks: list[tuple[Tensor | None, Tensor]] = [(each.layer.weight, mask.unsqueeze(-1)), (each.layer.bias, mask)]
        masks += [(each.reader.weight, mask)] if each.reader is not None else []
        for weights, where in masks:
            if weights is not None and id(weights) in starts:
                piece = out[:, starts[id(weights)] :][:, : weights.numel()]
                piece.unflatten(1, weights.shape).masked_fill_(where, 0.0)
    return out


def hidden_layers(module: nn.Module) -> list[Hidden]:
    """The hidden layers of a network whose inputs meet a fully connected layer first; else none: in a convolution every
    sample switches on every unit somewhere."""
    leaves = [leaf for leaf in module.modules() if not any(leaf.children())]
    if not isinstance(next((leaf for leaf in leaves if any(True for _ in leaf.parameters())), None), nn.Linear):
        return []
    out: list[Hidden] = []
    layer, between = None, False
    for leaf in leaves:
        if isinstance(leaf, nn.Linear):
            if out and out[-1].reader is None and leaf.in_features == out[-1].layer.out_features:
                out[-1] = replace(out[-1], reader=leaf)
            layer, between = leaf, False
        elif isinstance(leaf, nn.ReLU) and layer is not None:
            out.append(Hidden(layer, leaf, between))
            layer = None
        else:
            between = between or any(True for _ in leaf.parameters())
    return out


def find_lone(model: FlatModel, client: Client, x: Tensor, hidden: list[Hidden], least: int) -> list[Tensor]:
    """(units,) of each hidden layer: which of them tell of fewer than ``least`` samples."""
    on = watched(model, client, x, hidden, back=False)
    pairs = [close_pairs(pattern, least) for pattern in on]
    out = [(pattern.sum(0) > 0) & (pattern.sum(0) < least) for pattern in on]
    signals = watched(model, client, x, hidden, back=True) if any(len(low) for low, _ in pairs) else on
    for each, lone, pattern, signal, (low, high) in zip(hidden, out, on, signals, pairs, strict=True):
        if len(torch.cat([low, high]).unique()) <= FEW:
            alike = read_alike(pattern, signal, low, high, each.normed)
            low, high = low[alike], high[alike]
        lone[low] = lone[high] = True
    return out


def watched(model: FlatModel, client: Client, x: Tensor, hidden: list[Hidden], *, back: bool) -> list[Tensor]:
    """(n, units) of each hidden layer at the model ``x``: which training samples switch which units on, or what flows
    back to the units from each sample's loss."""
    seen: list[list[Tensor]] = [[] for _ in hidden]

    def note(mine: list[Tensor]) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_: nn.Module, inputs: Any, output: Tensor) -> None:
            if back:
                output.register_hook(lambda grad: mine.append(grad.detach().flatten(1).cpu()))
            else:
                mine.append((output > 0).flatten(1).cpu())

        return hook

    hooks = [each.switch.register_forward_hook(note(mine)) for each, mine in zip(hidden, seen, strict=True)]
    model.load(x)
    model.module.eval()
    try:
        for inputs, y in Split.of(client, client.train).batches(device=model.vector.device):
            with torch.set_grad_enabled(back):
                logits = model.module(inputs)
                if back:
                    torch.autograd.grad(cross_entropy(logits, y).sum(), model.params, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(mine) for mine in seen]


def close_pairs(on: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Two units each that fewer than ``least`` samples, but at least one, tell apart. on: (n, units) bool."""
    sizes, order = torch.sort(on.sum(0))
    near = (sizes[1:] - sizes[:-1]) < least  # sets whose sizes differ by more differ in more
    some = order[torch.cat([near, near[:0].new_zeros(1)]) | torch.cat([near[:0].new_zeros(1), near])]
    if len(some) > MOST:
        return some[:-1], some[1:]
    mine = on[:, some].float()
    size = mine.sum(0)
    apart = size + size.unsqueeze(1) - 2 * mine.T @ mine
    low, high = torch.nonzero(torch.triu((apart > 0.5) & (apart < least - 0.5))).T
    return some[low], some[high]


def read_alike(on: Tensor, signal: Tensor, low: Tensor, high: Tensor, normed: bool) -> Tensor:
    """(pairs,) whether what flows back to two units from the samples they share is the same up to a factor, so that it
    cancels in a difference. Behind a normalization no factor helps. on, signal: (n, units)."""
    both = on[:, low] & on[:, high]
    one, other = (torch.where(both, signal[:, units], 0.0).double() for units in (low, high))
    square, mixed = (one**2).sum(0), (one * other).sum(0)
    size = (square * (other**2).sum(0)).sqrt()
    alike = mixed.abs() >= ALIKE * size
    return alike & ((mixed - square).abs() <= SCALE * square) if normed else alike
