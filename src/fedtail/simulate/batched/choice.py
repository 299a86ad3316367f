"""Which kernel runs many models at once: known layers, images in chunks, or any module through ``torch.func``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from fedtail.data.federation import Federation
from fedtail.methods.base import Method
from fedtail.models.flat import FlatModel, has_batchnorm
from fedtail.simulate.batched.chunks import ChunkedKernel
from fedtail.simulate.batched.layers import Window, add_into
from fedtail.simulate.batched.network import Network, recognise
from fedtail.simulate.batched.step import AnyKernel
from fedtail.simulate.workers import forward_flops

CONVOLVES = 2.5e5
"""Operations of one image from which on a convolutional model runs a few images at a time."""


def operations_that_pay(kernel: AnyKernel) -> float:
    """Operations of one model's forward pass on a batch up to which the batched path is ahead on a CPU (measured).

    Known layers need no autograd and write no gradients, which pays for a single large model too; a library's
    convolutions, one model at a time, win from some size on.
    """
    if isinstance(kernel, Network):
        return 2e8 if kernel.along_sequences else 2e9
    if isinstance(kernel, FunctionalKernel):
        convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in kernel.module.modules())
        return 5e6 if convolves else 1.6e7
    return float("inf")


def choose_cpu_kernel(model: FlatModel, federation: Federation, method: Method) -> tuple[AnyKernel | None, str]:
    """Return the kernel that runs the model on a CPU, and which it is or why there is none."""
    if reason := refusal(model, federation, method):
        return None, reason
    network = recognise(model.module, federation.input_shape)
    if network is not None:
        return network, "a small model of known layers"
    if _convolves(model.module, federation.input_shape):
        chunked = ChunkedKernel(model.module, federation.input_shape)
        if not (chunked.draws and method.traits.whole):
            return chunked, "images in chunks"
    if any(getattr(m, "p", 0) and isinstance(m, nn.modules.dropout._DropoutNd) for m in model.module.modules()):
        return None, "dropout draws random numbers in every step"
    kernel = FunctionalKernel(model.module)
    sample = torch.zeros(2, 1, *federation.input_shape)
    try:
        with torch.no_grad():
            kernel.forward(model.vector.expand(2, -1), sample)
    except Exception as error:  # a user's module may fail under torch.func in any way
        return None, f"torch.func cannot batch the model ({type(error).__name__})"
    return kernel, "a small model through torch.func"


def refusal(model: FlatModel, federation: Federation, method: Method) -> str:
    """Why no kernel takes the run; empty if one may."""
    if model.vector.device.type != "cpu":
        return f"it runs on the CPU, not on {model.vector.device}"
    if has_batchnorm(model.module):
        return "BatchNorm couples the samples of a batch"
    if model.size != model.n_params:
        return "the model has frozen parameters or buffers"
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.module.modules())
    if recurrent and recognise(model.module, federation.input_shape) is None:
        return "recurrent layers cannot be batched over clients"
    if method.traits.stateful_loss and method.group_count(federation.n_classes) > 1:
        return "a stateful loss with several groups needs a backward pass per group"
    return ""


def _convolves(module: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether a module convolves images at some length; that each image stands alone is tried with the whole path."""
    convolves = len(input_shape) == 3 and any(isinstance(m, nn.Conv2d) for m in module.modules())
    return convolves and forward_flops(module, input_shape) >= CONVOLVES


class FunctionalKernel:
    """A module without BatchNorm, dropout or buffers, as a function of its flat parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.answering = copy.deepcopy(module).train(), copy.deepcopy(module).eval()
        self.shapes = {name: p.shape for name, p in module.named_parameters()}

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
