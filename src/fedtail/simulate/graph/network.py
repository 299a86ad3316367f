"""A module on the device, as a function of its weights.

Two ways to run it. ``fused`` (see ``fused.py``): our own kernels and cuDNN, one backward pass for all groups.
``plain``: the module as it is, all groups together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtail.data.federation import Transform
from fedtail.data.images.augment import BASIC, PAD, apply_strong
from fedtail.simulate.graph.aside import Aside
from fedtail.simulate.graph.fused import fused_network
from fedtail.simulate.graph.numerics import Layout, Numerics

Weights = dict[str, Tensor]
"""Parameters by name."""
Network = Callable[[Sequence[Weights], Tensor, Tensor, tuple[int, ...]], Tensor]
"""(weights of each group, rest, x, rows of each group) -> float32 logits. A ``plain`` network reads the first ones."""

STORED_AT_ONCE = 4096


class DeviceModel:
    """A module with what it takes to run it: its inputs' transform, its arithmetic, its parameters' layout."""

    def __init__(self, module: nn.Module, transform: Transform, numerics: Numerics) -> None:
        self.module, self.transform, self.numerics = copy.deepcopy(module), transform, numerics
        self.layout, self.aside = Layout(module, numerics), Aside(numerics.device)

    def stored(self, x: Tensor) -> Tensor:
        """Samples as they stay on the device: as the model reads them, images (N, H, W, C) with the border of zeros
        that a crop may take in, so that reading a batch is one gathering."""
        parts = []
        for part in x.split(STORED_AT_ONCE):
            out = self.transform(part.to(self.numerics.device))
            if out.ndim == 4:
                out = nn.functional.pad(out, (PAD, PAD, PAD, PAD)).permute(0, 2, 3, 1)
            parts.append(out.to(self.numerics.weights).contiguous())
        return torch.cat(parts)

    def inputs(self, stored: Tensor, index: Tensor, draws: Tensor | None = None) -> Tensor:
        """Model input of some samples; equal to ``Transform`` and ``apply_augment``."""
        if stored.ndim < 4:
            return stored[index]
        height, width = (n - 2 * PAD for n in stored.shape[1:3])
        rows, columns = (torch.arange(n, device=stored.device).unsqueeze(0) for n in (height, width))
        if draws is None:
            rows, columns = rows + PAD, columns + PAD
        else:
            columns = torch.where(draws[:, 2:BASIC] > 0, width - 1 - columns, columns) + draws[:, 1:2]
            rows = rows + draws[:, :1]
        out = stored[index[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        if draws is None or draws.shape[1] == BASIC:
            return out
        return apply_strong(out.float(), draws[:, BASIC:]).to(out.dtype)

    def network(self, *, training: bool) -> Network:
        """The module in training or evaluation mode."""
        skeleton = copy.deepcopy(self.module).to(self.numerics.device).train(training)
        return self._fused(skeleton) if self.numerics.fused else self._plain(skeleton)

    def _fused(self, skeleton: nn.Module) -> Network:
        run, shaped = fused_network(skeleton, self.aside), self._shaped(skeleton)
        return lambda weights, rest, x, sizes: run(list(weights), shaped(x), sizes).float()

    def _plain(self, skeleton: nn.Module) -> Network:
        others = [(n, tuple(p.shape)) for n, p in skeleton.named_parameters() if not p.requires_grad]
        others += [(n, tuple(b.shape)) for n, b in skeleton.named_buffers() if b.is_floating_point()]
        other_sizes = [torch.Size(s).numel() for _, s in others]
        numerics, shaped = self.numerics, self._shaped(skeleton)

        def plain(weights: Sequence[Weights], rest: Tensor, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
            tensors = {n: shaped(w) for n, w in weights[0].items()}
            if others:
                tensors |= {n: p.view(s) for (n, s), p in zip(others, rest.split(other_sizes), strict=True)}
            with torch.autocast(numerics.device.type, torch.bfloat16, enabled=numerics.precision == "bf16"):
                return functional_call(skeleton, tensors, (shaped(x),)).float()

        return plain

    def _shaped(self, skeleton: nn.Module) -> Callable[[Tensor], Tensor]:
        """What lays out images, and filters, on a GPU: channels last."""
        images = self.numerics.device.type == "cuda" and any(isinstance(m, nn.Conv2d) for m in skeleton.modules())
        last = torch.channels_last
        return lambda t: t.contiguous(memory_format=last) if images and t.ndim == 4 else t
