"""Whether the batched path takes a run and pays for it, and with which kernel."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from fedtail.data.federation import Federation
from fedtail.methods.base import Method
from fedtail.models.flat import FlatModel, has_batchnorm
from fedtail.simulate.batched.chunks import ChunkedKernel
from fedtail.simulate.batched.functional import FunctionalKernel
from fedtail.simulate.batched.network import Network, recognise
from fedtail.simulate.batched.step import AnyKernel, Kernel
from fedtail.simulate.reference import draws_numbers
from fedtail.simulate.workers import forward_flops

LAUNCH_BOUND = {"Network": 2e9, "FunctionalKernel": 1.6e7, "ChunkedKernel": math.inf}
"""Operations of one model's forward pass on a batch up to which the batched path pays (measured). Known layers need no
autograd and write no gradients, which pays for a single large model too."""
SEQUENCES = 2e8
"""The same for networks along sequences: beyond it a library's convolutions win (measured: 1.6 times as fast at 5.9e7,
as fast at 2.3e8, two thirds at 1.9e9)."""
CONVOLVES = 2.5e5
"""Operations of one image from which on a convolutional model runs a few images at a time."""


def batched_pays(module: nn.Module, federation: Federation, method: Method, batch_size: int) -> tuple[bool, str]:
    """Whether ``auto`` takes the batched path, and why (not)."""
    kernel, why = choose_cpu_kernel(FlatModel(copy.deepcopy(module)), federation, method)
    if kernel is None:
        return False, why
    name, flops = type(kernel).__name__, batch_size * forward_flops(module, federation.input_shape)
    if flops > (SEQUENCES if isinstance(kernel, Network) and kernel.along_sequences else LAUNCH_BOUND[name]):
        return False, f"a batch of the model takes {flops:.2g} operations, enough to fill a core"
    size = "images in chunks" if name == "ChunkedKernel" else "a small model"
    return True, f"{size} ({flops:.2g} operations per batch; {why})"


def choose_cpu_kernel(model: FlatModel, federation: Federation, method: Method) -> tuple[AnyKernel | None, str]:
    """The kernel that can run the model on a CPU, and which or why none."""
    kernel, why = choose_kernel(model, federation, method)
    if isinstance(kernel, Network) or _refusal(model, federation, method):
        return kernel, why
    if _chunks(model.module, federation.input_shape):
        return ChunkedKernel(model.module, federation.input_shape), "convolutions"
    return kernel, why


def choose_kernel(model: FlatModel, federation: Federation, method: Method) -> tuple[Kernel | None, str]:
    """The kernel that can run many models at once, and which or why none."""
    if reason := _refusal(model, federation, method):
        return None, reason
    network = recognise(model.module, federation.input_shape)
    if network is not None:
        return network, "known layers"
    kernel = FunctionalKernel(model.module)
    sample = torch.zeros(2, 1, *federation.input_shape)
    try:
        with torch.no_grad():
            kernel.forward(model.vector.expand(2, -1), sample)
    except Exception as error:  # a user's module may fail under torch.func in any way
        return None, f"torch.func cannot batch the model ({type(error).__name__})"
    return kernel, "torch.func"


def _refusal(model: FlatModel, federation: Federation, method: Method) -> str:
    """Why no kernel takes the run; empty if one may."""
    if model.vector.device.type != "cpu":
        return f"it runs on the CPU, not on {model.vector.device}"
    if has_batchnorm(model.module):
        return "BatchNorm couples the samples of a batch"
    if model.size != model.n_params:
        return "the model has frozen parameters or buffers"
    if any(getattr(m, "p", 0) and isinstance(m, nn.modules.dropout._DropoutNd) for m in model.module.modules()):
        return "dropout draws random numbers in every step"
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.module.modules())
    if recurrent and recognise(model.module, federation.input_shape) is None:
        return "recurrent layers cannot be batched over clients"
    if method.stateful_loss and method.group_count(federation.n_classes) > 1:
        return "a stateful loss with several groups needs a backward pass per group"
    return ""


def _chunks(module: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether a module convolves images at some length, each by itself: that is tried, for it may be a user's own."""
    if len(input_shape) != 3 or not any(isinstance(m, nn.Conv2d) for m in module.modules()):
        return False
    if forward_flops(module, input_shape) < CONVOLVES or draws_numbers(module, input_shape):
        return False
    images = torch.rand(3, *input_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together, alone = module(images), torch.cat([module(image.unsqueeze(0)) for image in images])
    return together.shape == alone.shape and torch.allclose(together, alone, rtol=1e-3, atol=1e-4)
