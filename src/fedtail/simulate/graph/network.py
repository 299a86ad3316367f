"""A module on the device, as a function of its weights: its arithmetic, and the order of its parameters.

Two ways to run it. ``fused`` (see ``fused.py``): our own kernels and cuDNN, one backward pass for all groups.
``plain``: the module as it is, all groups together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtail.data.federation import Transform
from fedtail.data.images.augment import BASIC, PAD, VIEWS
from fedtail.errors import FedtailError, one_of
from fedtail.simulate.batched.chunks import Viewed
from fedtail.simulate.graph.fused import Unsupported, fused_network
from fedtail.simulate.graph.recorder import SideStreams

Weights = dict[str, Tensor]
"""Parameters by name."""
Network = Callable[[Sequence[Weights], Tensor, Tensor, tuple[int, ...]], Tensor]
"""(weights of each group, rest, x, rows of each group) -> float32 logits. A ``plain`` network reads the first ones."""

STORED_AT_ONCE = 4096


class DeviceModel:
    """A module with what it takes to run it: its inputs' transform, its arithmetic, its parameters' layout."""

    def __init__(self, module: nn.Module, transform: Transform, numerics: Numerics) -> None:
        self.module, self.transform, self.numerics = copy.deepcopy(module), transform, numerics
        self.layout, self.side = Layout(module, numerics), SideStreams(numerics.device)

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
        return VIEWS[draws.shape[1]].change(out.float(), draws[:, BASIC:]).to(out.dtype)

    def network(self, *, training: bool) -> Network:
        """The module in training or evaluation mode."""
        skeleton = copy.deepcopy(self.module).to(self.numerics.device).train(training)
        return self._fused(skeleton) if self.numerics.fused else self._plain(skeleton)

    def _fused(self, skeleton: nn.Module) -> Network:
        run, shaped = fused_network(skeleton, self.side), self._shaped(skeleton)
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
            half = torch.autocast(numerics.device.type, torch.bfloat16, enabled=numerics.precision == "bf16")
            with half, Viewed():
                return functional_call(skeleton, tensors, (shaped(x),)).float()

        return plain

    def _shaped(self, skeleton: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return the function that lays out images, and filters, on a GPU: channels last."""
        images = self.numerics.device.type == "cuda" and any(isinstance(m, nn.Conv2d) for m in skeleton.modules())
        last = torch.channels_last
        return lambda t: t.contiguous(memory_format=last) if images and t.ndim == 4 else t


PRECISIONS = ("auto", "bf16", "tf32", "fp32")


@dataclass(frozen=True)
class Numerics:
    """How arithmetic is done on the device. Master weights, momenta and updates are float32 in every mode."""

    device: torch.device
    precision: str
    """``bf16``: weights, activations and their gradients in bfloat16; ``tf32`` / ``fp32``: in float32, matrix
    products with and without TF32."""
    fused: bool
    compile: bool
    """Compile the update."""

    @classmethod
    def choose(
        cls,
        module: nn.Module,
        device: torch.device,
        precision: str = "auto",
        fused: bool | None = None,
        compile: bool | None = None,
    ) -> Numerics:
        """Defaults: bf16 and compiled on CUDA, float32 and not compiled on the CPU; fused wherever the network
        allows it."""
        if precision not in PRECISIONS:
            raise one_of("engine.precision", precision, PRECISIONS)
        cuda = device.type == "cuda"
        if precision == "auto":
            precision = "bf16" if cuda else "fp32"
        if precision == "bf16" and cuda and not torch.cuda.is_bf16_supported():
            raise FedtailError("engine.precision = 'bf16' is not supported by this GPU; use 'tf32' or 'fp32'")
        if fused is None or fused:
            try:
                fused_network(module)
                fused = True
            except Unsupported as error:
                if fused:
                    raise FedtailError(f"this model cannot be fused: {error}") from error
                fused = False
        return cls(device=device, precision=precision, fused=fused, compile=cuda if compile is None else compile)

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def weights(self) -> torch.dtype:
        """The type of the weights that passes read: a network that is not fused casts them itself."""
        return self.dtype if self.fused else torch.float32

    def apply(self) -> None:
        """Set the process-wide switches that PyTorch has for this; other runs of the process may have set others."""
        if self.device.type == "cuda":
            tf32 = self.precision != "fp32"
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.backends.cudnn.allow_tf32 = tf32


class Layout:
    """Order of the parameters on the device: convolution weights channels-last when fused, so that no pass has to
    rearrange them. Norms and all other things that methods compute do not depend on the order."""

    def __init__(self, module: nn.Module, numerics: Numerics) -> None:
        self.names = [(n, tuple(p.shape)) for n, p in module.named_parameters() if p.requires_grad]
        self.sizes = [torch.Size(s).numel() for _, s in self.names]
        self.n_params = sum(self.sizes)
        self.permuted = numerics.fused and any(len(s) > 2 for _, s in self.names)
        if self.permuted:
            parts, offset = [], 0
            for (_, shape), n in zip(self.names, self.sizes, strict=True):
                index = torch.arange(offset, offset + n)
                if len(shape) > 2:
                    index = index.view(shape).movedim(1, -1).reshape(-1)
                parts.append(index)
                offset += n
            self.order = torch.cat(parts).to(numerics.device)
            self.inverse = torch.empty_like(self.order)
            self.inverse[self.order] = torch.arange(self.n_params, device=numerics.device)

    def inward(self, t: Tensor) -> Tensor:
        """Parameters (..., d) as the server has them -> as the device has them; other tensors as they are."""
        return t.index_select(-1, self.order) if self._mine(t) else t

    def outward(self, t: Tensor) -> Tensor:
        return t.index_select(-1, self.inverse) if self._mine(t) else t

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the parameters by name; those of convolutions channels-last when permuted."""
        out = {}
        for (name, s), part in zip(self.names, flat.split(self.sizes), strict=True):
            if self.permuted and len(s) > 2:
                out[name] = part.view(s[0], *s[2:], s[1]).movedim(-1, 1)
            else:
                out[name] = part.view(s)
        return out

    def _mine(self, t: Tensor) -> bool:
        return self.permuted and t.ndim > 0 and t.shape[-1] == self.n_params
