"""A module on the device, as a function of its weights.

Two ways to run it. ``fused`` (see ``fused.py``): our own GroupNorm kernels and cuDNN, no compiler, one backward pass
for all groups. ``plain``: the module as it is, one pass per group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtail.data.federation import Transform
from fedtail.data.images.augment import apply_augment
from fedtail.simulate.graph.aside import Aside
from fedtail.simulate.graph.fused import fused_network, reads_images
from fedtail.simulate.graph.numerics import Layout, Numerics
from fedtail.simulate.graph.samples import Look

Weights = Tensor | dict[str, Tensor]
"""Parameters as a flat vector or by name."""
Network = Callable[[Sequence[Weights], Tensor, Tensor, tuple[int, ...]], Tensor]
"""(weights of each group, rest, x, rows of each group) -> float32 logits. A ``plain`` network takes one group."""


class DeviceModel:
    """A module with what it takes to run it: its inputs' transform, its arithmetic, its parameters' layout."""

    def __init__(self, module: nn.Module, transform: Transform, input_ndim: int, numerics: Numerics) -> None:
        self.module, self.transform, self.numerics = copy.deepcopy(module), transform, numerics
        self.layout = Layout(module, numerics)
        # a recorded graph cannot copy from the host, so constants are on the device from the start
        shape = (len(transform.mean),) + (1,) * (input_ndim - 1)
        mean, std = (torch.tensor(v, device=numerics.device).view(shape) for v in (transform.mean, transform.std))
        self._normal = (mean, std) if transform.mean else None
        self.aside = Aside(numerics.device)
        bf16 = numerics.fused and numerics.dtype == torch.bfloat16 and numerics.device.type == "cuda"
        self.look = (
            Look(transform.scale, mean.flatten(), std.flatten())
            if bf16 and transform.mean and reads_images(module)
            else None
        )
        """For the kernel that reads images, where the model can be given what it reads."""

    def inputs(self, pool: Tensor, index: Tensor, draws: Tensor | None = None) -> Tensor:
        """Model input of some samples; equal to ``Transform`` and ``apply_augment``."""
        out = pool[index].to(torch.float32)
        if self.transform.scale != 1.0:
            out = out * self.transform.scale
        if self._normal is not None:
            mean, std = self._normal
            out = (out - mean) / std
        return out if draws is None else apply_augment(out, draws)

    def network(self, *, training: bool) -> Network:
        """The module in training or evaluation mode."""
        skeleton = copy.deepcopy(self.module).to(self.numerics.device).train(training)
        return self._fused(skeleton) if self.numerics.fused else self._plain(skeleton)

    def _fused(self, skeleton: nn.Module) -> Network:
        run, images = fused_network(skeleton, self.aside), self._images(skeleton)
        numerics, layout = self.numerics, self.layout

        def fused(weights: Sequence[Weights], rest: Tensor, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
            x = x.to(numerics.dtype)
            if images and x.ndim == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            return run([w if isinstance(w, dict) else layout.named(w) for w in weights], x, sizes).float()

        return fused

    def _plain(self, skeleton: nn.Module) -> Network:
        others = [(n, tuple(p.shape)) for n, p in skeleton.named_parameters() if not p.requires_grad]
        others += [(n, tuple(b.shape)) for n, b in skeleton.named_buffers() if b.is_floating_point()]
        other_sizes = [torch.Size(s).numel() for _, s in others]
        images, numerics, layout = self._images(skeleton), self.numerics, self.layout

        def shaped(w: Tensor) -> Tensor:
            return w.contiguous(memory_format=torch.channels_last) if images and w.ndim == 4 else w

        def plain(weights: Sequence[Weights], rest: Tensor, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
            given = weights[0] if isinstance(weights[0], dict) else layout.named(weights[0])
            tensors = {n: shaped(w) for n, w in given.items()}
            if others:
                tensors |= {n: p.view(s) for (n, s), p in zip(others, rest.split(other_sizes), strict=True)}
            with torch.autocast(numerics.device.type, torch.bfloat16, enabled=numerics.precision == "bf16"):
                return functional_call(skeleton, tensors, (shaped(x),)).float()

        return plain

    def _images(self, skeleton: nn.Module) -> bool:
        """Whether images are laid out channels-last."""
        return self.numerics.device.type == "cuda" and any(isinstance(m, nn.Conv2d) for m in skeleton.modules())
