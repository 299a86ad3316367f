"""Layers whose weight gradients are kept apart by groups of rows: one pass over the whole batch for what samples do not
influence, and one weight gradient for each group's rows, computed aside (see ``fused``)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtail.simulate.graph.convolution import kernel_shape, plan_of, weight_gradients
from fedtail.simulate.graph.groupnorm import Saved, has_kernel, norm_backward, norm_forward, norm_gradients
from fedtail.simulate.graph.pixels import halved_inputs, has_halved, same_size, same_tile
from fedtail.simulate.graph.recorder import SideStreams

Conv = nn.Conv1d | nn.Conv2d
SAME, HALF = "same", "half"
"""What a second reader of an output takes of it: all, or even rows and columns."""


class GroupedConv(torch.autograd.Function):
    """Images, and sequences as images of one row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layer: Conv,
        side: SideStreams,
        places: list[Tensor],
        sizes: tuple[int, ...],
        *weights: Tensor,
    ) -> Tensor:
        ctx.layer, ctx.side, ctx.places, ctx.sizes, h = layer, side, places, sizes, len(sizes)
        w, bias = weights[0], weights[h] if layer.bias is not None else None
        ctx.flat = x.ndim == 3
        if ctx.flat:
            x, w = x.unsqueeze(2), w.unsqueeze(2)
            x = x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x
        if x.is_cuda and x.dtype == torch.bfloat16 and layer.groups == 1 and x.shape[1] % 8:
            x, w = _whole_eights(x), _whole_eights(w)
        ctx.save_for_backward(x, w)
        ctx.plain = side.kernels and _is_product(layer, x)
        same = same_tile("forward", layer, x) if side.kernels and any(ctx.needs_input_grad) else None
        if ctx.plain:
            y = F.linear(x.movedim(1, -1), w[:, :, 0, 0], bias).movedim(-1, 1)
        elif same is not None:
            y = same_size(x, w, same, back=False)
        else:
            y = F.conv2d(x, w, bias, *_geometry(layer), layer.groups)
        return y.squeeze(2) if ctx.flat else y

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (dy,), (x, w), layer = upstream, ctx.saved_tensors, ctx.layer
        if ctx.flat:
            dy = dy.unsqueeze(2)
        if x.is_contiguous(memory_format=torch.channels_last):
            dy = dy.contiguous(memory_format=torch.channels_last)
        stride, padding, dilation = _geometry(layer)
        channels = layer.in_channels // layer.groups

        def back(dy: Tensor, x: Tensor, mask: list[bool]) -> Any:
            return torch.ops.aten.convolution_backward(
                dy, x, w, None, stride, padding, dilation, False, [0, 0], layer.groups, mask
            )

        def of_group(dy: Tensor, x: Tensor) -> list[Tensor]:
            """Gradients of the weight and the bias from one group's rows."""
            dw = back(dy, x, [False, True, False])[1] if len(dy) else torch.zeros_like(w)
            if w.shape[1] != channels:
                dw = dw[:, :channels].contiguous(memory_format=torch.channels_last)
            if ctx.flat:
                dw = dw.squeeze(2)
            return [dw] if layer.bias is None else [dw, dy.sum((0, 2, 3))]

        shape = kernel_shape(layer, x, dy) if ctx.side.kernels else None
        plan = None if shape is None or not ctx.places else plan_of(shape)
        if shape is not None and plan is not None:
            work = partial(weight_gradients, sizes=ctx.sizes, shape=shape, plan=plan, places=ctx.places)
            ctx.side(work, x, dy)
            grads = [[place] for place in ctx.places]
        else:
            parts = zip(dy.split(list(ctx.sizes)), x.split(list(ctx.sizes)), strict=True)
            grads = [ctx.side(of_group, d, v) for d, v in parts]
        same = same_tile("backward", layer, x) if ctx.side.kernels else None
        if not ctx.needs_input_grad[0]:
            dx = None
        elif ctx.plain:
            dx = (dy.movedim(1, -1) @ w[:, :, 0, 0]).movedim(-1, 1)
        elif same is not None:
            dx = same_size(dy, w, same, back=True)
        elif shape is not None and has_halved(shape):
            dx = halved_inputs(dy, w, shape)
        else:
            dx = back(dy, x, [True, False, False])[0][:, : layer.in_channels]
        dx = dx.squeeze(2) if dx is not None and ctx.flat else dx
        return dx, None, None, None, None, *(g for kind in zip(*grads, strict=True) for g in kind)


def _geometry(layer: Conv) -> tuple[list[int], list[int], list[int]]:
    """Stride, padding and dilation in two dimensions."""
    assert not isinstance(layer.padding, str)
    flat = isinstance(layer, nn.Conv1d)
    values = ((layer.stride, 1), (layer.padding, 0), (layer.dilation, 1))
    return tuple([*([none] if flat else []), *value] for value, none in values)  # type: ignore[return-value]


def _is_product(layer: Conv, x: Tensor) -> bool:
    """Whether a layer on a GPU is a product of matrices: 1x1, channels-last."""
    plain = set(layer.kernel_size) == {1} and set(layer.stride) == {1} and not any(layer.padding) and layer.groups == 1
    return plain and x.is_cuda and x.is_contiguous(memory_format=torch.channels_last)


def _whole_eights(t: Tensor) -> Tensor:
    """Zero channels up to a multiple of 8: without them the first layer of an image network misses the matrix units."""
    out = F.pad(t, (0, 0, 0, 0, 0, -t.shape[1] % 8))
    return out.contiguous(memory_format=torch.channels_last)


class GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: nn.Linear, side: SideStreams, sizes: tuple[int, ...], *weights: Tensor
    ) -> Tensor:
        ctx.layer, ctx.side, ctx.sizes, h = layer, side, sizes, len(sizes)
        ctx.save_for_backward(x, weights[0])
        return F.linear(x, weights[0], weights[h] if layer.bias is not None else None)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (dy,), (x, w) = upstream, ctx.saved_tensors

        def of_group(dy: Tensor, x: Tensor) -> list[Tensor]:
            dy = dy.flatten(0, -2)
            dw = dy.T @ x.flatten(0, -2)
            return [dw] if ctx.layer.bias is None else [dw, dy.sum(0)]

        parts = zip(dy.split(list(ctx.sizes)), x.split(list(ctx.sizes)), strict=True)
        grads = [ctx.side(of_group, d, v) for d, v in parts]
        dx = dy @ w if ctx.needs_input_grad[0] else None
        return dx, None, None, None, *(g for kind in zip(*grads, strict=True) for g in kind)


class GroupedNorm(torch.autograd.Function):
    """An output that is read twice is given twice, the second time all of it or its even rows and columns, so that the
    backward pass has both gradients and adds them where it reads them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        layer: nn.GroupNorm,
        relu: bool,
        again: str | None,
        side: SideStreams,
        sizes: tuple[int, ...],
        *weights: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        w, b = weights[0], weights[len(sizes)]
        kernel = side.kernels and x.ndim == 4 and has_kernel(layer.num_channels, layer.num_groups, x.device)
        if kernel:
            x = x.contiguous(memory_format=torch.channels_last)
            residual = None if residual is None else residual.contiguous(memory_format=torch.channels_last)
        saved, half = norm_forward(
            x, residual, w, b, layer.num_groups, layer.eps, relu=relu, kernel=kernel, halved=again == HALF
        )
        ctx.save_for_backward(*saved)
        ctx.relu, ctx.side, ctx.sizes, ctx.kernel = relu, side, sizes, kernel
        ctx.residual = residual is not None
        if again is None:
            return saved.y
        return saved.y, saved.y.detach() if half is None else half

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        saved = Saved(*ctx.saved_tensors)
        if ctx.kernel:
            upstream = tuple(d.contiguous(memory_format=torch.channels_last) for d in upstream)
        dy, more = upstream[0], upstream[1] if len(upstream) > 1 else None
        dx, dz, sums = norm_backward(dy, saved, relu=ctx.relu, residual=ctx.residual, kernel=ctx.kernel, more=more)
        work = partial(norm_gradients, sizes=ctx.sizes, dtype=saved.w.dtype, kernel=ctx.kernel)
        both = ctx.side(work, sums)
        return dx, dz, None, None, None, None, None, *both[:, 0].unbind(), *both[:, 1].unbind()
