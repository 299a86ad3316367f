"""Any other model, batched over clients by ``torch.func``: slower than ``network``, but it takes what it gets."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from fedtail.simulate.batched.layers import Window, add_into


class FunctionalKernel:
    """A module without BatchNorm, dropout or buffers, as a function of its flat parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.answering = copy.deepcopy(module).train(), copy.deepcopy(module).eval()
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.n_params = sum(s.numel() for s in self.shapes.values())

    def logits(self, x: Tensor, inputs: Tensor, module: nn.Module | None = None) -> Tensor:
        """(B, C) logits of one model (d,) on one batch."""
        params, offset = {}, 0
        for name, shape in self.shapes.items():
            params[name] = x[offset : offset + shape.numel()].view(shape)
            offset += shape.numel()
        out: Tensor = functional_call(module or self.module, params, (inputs,))
        return out

    def forward(self, x: Tensor, inputs: Tensor) -> tuple[Tensor, Any]:
        logits, pull = vjp(lambda v: vmap(self.logits)(v, inputs), x)  # type: ignore[misc]
        return logits.transpose(1, 2), pull

    def answers(self, x: Tensor, inputs: Tensor) -> Tensor:
        return vmap(lambda v, given: self.logits(v, given, self.answering))(x, inputs).transpose(1, 2)

    def backward(
        self, saved: Any, d: Tensor, windows: Sequence[Window], masks: Tensor | None, into: Tensor, keep: float | Tensor
    ) -> None:
        d = d.transpose(1, 2)
        for h in range(into.shape[1]):
            grads = saved(d if masks is None else d * masks[:, h].unsqueeze(-1))[0]
            add_into(into[:, h], grads, keep.squeeze(1) if isinstance(keep, Tensor) else keep)
