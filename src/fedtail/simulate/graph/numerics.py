"""How a model computes and lies on the device: arithmetic, and the order of its parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedtail.errors import FedtailError, one_of
from fedtail.simulate.graph.fused import Unsupported, fused_network

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
