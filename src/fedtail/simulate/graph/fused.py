"""A network as a function of H aliases of its weights, so that one backward pass gives H group gradients.

Samples do not influence each other in these networks, so the gradient with respect to activations is the same whether
groups are run apart or together; only the weight gradients must be kept apart. One forward pass and one backward pass
for activations over the whole batch, and per layer one weight gradient for each group's rows: the same gradients as
H separate passes, at the cost of a plain step, with larger and fewer kernels.

Works for networks that ``torch.fx`` can trace and whose parameters sit in convolutions (Conv1d, Conv2d), Linear,
GroupNorm and LSTM layers. The classifiers of ``models.classifiers``, which are small, are run group by group.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedtail.models.classifiers import KINDS
from fedtail.simulate.graph import recurrent
from fedtail.simulate.graph.aside import Aside
from fedtail.simulate.graph.convolution import kernel_shape, plan_of, weight_gradients
from fedtail.simulate.graph.groupnorm import Saved, has_kernel, norm_backward, norm_forward, norm_gradients
from fedtail.simulate.graph.pixels import halved_inputs, has_halved, same_size, same_tile

Weights = list[dict[str, Tensor]]
"""Per group of rows: the named parameters. All groups hold the same values."""
Network = Callable[[Weights, Tensor, tuple[int, ...]], Tensor]
Layers = dict[str, nn.Module]
Conv = nn.Conv1d | nn.Conv2d
Absorbed = tuple[fx.Node, fx.Node | None]
SAME, HALF = "same", "half"
"""What a second reader of an output takes of it: all, or even rows and columns."""

ADD = (operator.add, operator.iadd, torch.add)
RELU = (F.relu, torch.relu)


class Unsupported(Exception):
    """The network has something that cannot be taken apart by groups of rows."""


class _Conv(torch.autograd.Function):
    """Images, and sequences as images of one row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: Conv, aside: Aside, places: list[Tensor], sizes: tuple[int, ...], *weights: Tensor
    ) -> Tensor:
        ctx.layer, ctx.aside, ctx.places, ctx.sizes, h = layer, aside, places, sizes, len(sizes)
        w, bias = weights[0], weights[h] if layer.bias is not None else None
        ctx.flat = x.ndim == 3
        if ctx.flat:
            x, w = x.unsqueeze(2), w.unsqueeze(2)
            x = x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x
        if x.is_cuda and x.dtype == torch.bfloat16 and layer.groups == 1 and x.shape[1] % 8:
            x, w = _whole_eights(x), _whole_eights(w)
        elif w.shape[1] * layer.groups != x.shape[1]:  # images that come filled up
            w = _whole_eights(w)
        ctx.save_for_backward(x, w)
        ctx.plain = aside.kernels and _is_product(layer, x)
        same = same_tile("forward", layer, x) if aside.kernels and any(ctx.needs_input_grad) else None
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

        shape = kernel_shape(layer, x, dy) if ctx.aside.kernels else None
        plan = None if shape is None or not ctx.places else plan_of(shape)
        if shape is not None and plan is not None:
            work = partial(weight_gradients, sizes=ctx.sizes, shape=shape, plan=plan, places=ctx.places)
            ctx.aside(work, x, dy)
            grads = [[place] for place in ctx.places]
        else:
            parts = zip(dy.split(list(ctx.sizes)), x.split(list(ctx.sizes)), strict=True)
            grads = [ctx.aside(of_group, d, v) for d, v in parts]
        same = same_tile("backward", layer, x) if ctx.aside.kernels else None
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
    one = isinstance(layer, nn.Conv1d)
    values = ((layer.stride, 1), (layer.padding, 0), (layer.dilation, 1))
    return tuple([*([none] if one else []), *value] for value, none in values)  # type: ignore[return-value]


def _is_product(layer: Conv, x: Tensor) -> bool:
    """Whether a layer on a GPU is a product of matrices: 1x1, channels-last."""
    one = set(layer.kernel_size) == {1} and set(layer.stride) == {1} and not any(layer.padding) and layer.groups == 1
    return one and x.is_cuda and x.is_contiguous(memory_format=torch.channels_last)


def _whole_eights(t: Tensor) -> Tensor:
    """Zero channels up to a multiple of 8: without them the first layer of an image network misses the matrix units."""
    out = F.pad(t, (0, 0, 0, 0, 0, -t.shape[1] % 8))
    return out.contiguous(memory_format=torch.channels_last)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: nn.Linear, aside: Aside, sizes: tuple[int, ...], *weights: Tensor
    ) -> Tensor:
        ctx.layer, ctx.aside, ctx.sizes, h = layer, aside, sizes, len(sizes)
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
        grads = [ctx.aside(of_group, d, v) for d, v in parts]
        dx = dy @ w if ctx.needs_input_grad[0] else None
        return dx, None, None, None, *(g for kind in zip(*grads, strict=True) for g in kind)


class _Norm(torch.autograd.Function):
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
        aside: Aside,
        name: str,
        sizes: tuple[int, ...],
        *weights: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        w, b = weights[0], weights[len(sizes)]
        kernel = x.ndim == 4 and has_kernel(layer.num_channels, layer.num_groups, x.device)
        if kernel:
            x = x.contiguous(memory_format=torch.channels_last)
            residual = None if residual is None else residual.contiguous(memory_format=torch.channels_last)
        saved, half = norm_forward(
            x, residual, w, b, layer.num_groups, layer.eps, relu=relu, kernel=kernel, halved=again == HALF
        )
        ctx.save_for_backward(*saved)
        ctx.relu, ctx.aside, ctx.name, ctx.sizes, ctx.kernel = relu, aside, name, sizes, kernel
        ctx.residual = residual is not None
        if again is None:
            return saved.y
        return saved.y, saved.y.detach() if half is None else half

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        saved, aside, name = Saved(*ctx.saved_tensors), ctx.aside, ctx.name
        if ctx.kernel:
            upstream = tuple(d.contiguous(memory_format=torch.channels_last) for d in upstream)
        dy, more = upstream[0], upstream[1] if len(upstream) > 1 else None
        sums = aside.sums.get(name) if ctx.kernel else None
        dx, dz, left = norm_backward(
            dy, saved, relu=ctx.relu, residual=ctx.residual, kernel=ctx.kernel, more=more, sums=sums
        )
        grads: Any
        if sums is not None:
            grads = [place[f"{name}.{kind}"] for kind in ("weight", "bias") for place in aside.places]
        else:
            work = partial(norm_gradients, sizes=ctx.sizes, dtype=saved.w.dtype, kernel=ctx.kernel)
            both = aside(work, left)
            grads = [*both[:, 0].unbind(), *both[:, 1].unbind()]
        return dx, dz, None, None, None, None, None, None, *grads


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, aside: Aside, sizes: tuple[int, ...], *weights: Tensor) -> Tensor:
        h = len(sizes)
        w_in, w = weights[0], weights[h]
        b_in, b_again = (weights[i * h].to(torch.promote_types(w.dtype, torch.float32)) for i in (2, 3))
        ctx.aside, ctx.sizes, ctx.kernel = aside, sizes, aside.kernels and recurrent.has_kernel(w.shape[1], x.device)
        saved = recurrent.lstm_forward(F.linear(x, w_in), w, b_in + b_again, kernel=ctx.kernel)
        ctx.save_for_backward(x, w_in, w, *saved)
        return saved.y

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (dy,), (x, w_in, w, *kept) = upstream, ctx.saved_tensors
        saved = recurrent.Saved(*kept)
        d = recurrent.lstm_backward(dy, w, saved, kernel=ctx.kernel)

        def of_group(d: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
            later, before = d[:, 1:].flatten(0, 1), y[:, :-1].flatten(0, 1)
            flat = d.flatten(0, 1)
            db = flat.sum(0)
            return [flat.T @ x.flatten(0, 1), later.T @ before, db, db.clone()]

        parts = zip(*(t.split(list(ctx.sizes)) for t in (d, x, saved.y)), strict=True)
        grads = [ctx.aside(of_group, *part) for part in parts]
        dx = d @ w_in if ctx.needs_input_grad[0] else None
        return dx, None, None, *(g for kind in zip(*grads, strict=True) for g in kind)


LAYERS = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.GroupNorm, nn.LSTM)
APART = tuple(KINDS.values())
"""Layers that are run as they are, group by group."""


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, APART) or super().is_leaf_module(m, module_qualified_name)


def _run_apart(layer: nn.Module, name: str, x: Tensor, weights: Weights, sizes: tuple[int, ...]) -> Tensor:
    """In float32 at least: a layer that gives logits from few numbers."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    parts = []
    for rows, group in zip(x.to(dtype).split(list(sizes)), weights, strict=True):
        own = {n: group[f"{name}.{n}" if name else n].to(dtype) for n, _ in layer.named_parameters()}
        parts.append(functional_call(layer, own, (rows,)))
    return torch.cat(parts)


def fused_network(module: nn.Module, aside: Aside | None = None) -> Network:
    """(weights per group, x, rows per group) -> output; the network in its current train / eval mode.

    GroupNorm swallows a ReLU, or an addition and a ReLU, that follow it. Weight gradients are computed ``aside``, and
    not to be read before it is joined. Raises ``Unsupported``.
    """
    beside = aside or Aside()
    try:
        graph = _Tracer().trace(module)
    except Exception as error:
        raise Unsupported(str(error)) from error
    layers = dict(module.named_modules())
    _check(module, layers, graph)
    late, skipped = _absorbing(layers, graph)
    readers = _second_readers(layers, graph, late)

    def norm(
        at: fx.Node, node: fx.Node, other: fx.Node | None, env: dict[Any, Any], weights: Weights, sizes: Any
    ) -> Tensor:
        """The norm ``node`` with what is computed with it, up to ``at``."""
        name = str(node.target)
        layer = layers[name]
        assert isinstance(layer, nn.GroupNorm)
        source = node.args[0]
        assert isinstance(source, fx.Node)
        x, residual = env[source], None if other is None else env.get((at, other), env[other])
        if residual is not None and residual.shape != x.shape:
            out = _Norm.apply(x, None, layer, False, None, beside, name, sizes, *_pick(weights, name, True))
            return F.relu(out + residual)
        reader, again = readers.get(at, (None, None)) if beside.kernels else (None, None)
        if again == HALF and (x.ndim != 4 or x.shape[2] % 2 or x.shape[3] % 2):
            again = None
        more = _Norm.apply(x, residual, layer, at is not node, again, beside, name, sizes, *_pick(weights, name, True))
        if again is None:
            return more
        env[reader, at] = more[1]
        return more[0]

    def run(weights: Weights, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        env: dict[Any, Any] = {}
        for node in graph.nodes:
            if node in skipped:
                continue
            if node.op == "placeholder":
                env[node] = x
            elif node.op == "output":
                result = node.args[0]
                assert isinstance(result, fx.Node)
                return env[result]
            elif node in late:
                env[node] = norm(node, *late[node], env, weights, sizes)
            else:
                env[node] = call(node, env, weights, sizes)
        raise AssertionError("a traced graph ends with its output")

    def call(node: fx.Node, env: dict[Any, Any], weights: Weights, sizes: tuple[int, ...]) -> Any:
        args = fx.node.map_arg(node.args, lambda n: env[n])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: env[n])
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        name = str(node.target)
        layer = layers[name]
        if isinstance(layer, APART):
            x = args[0]
            assert isinstance(x, Tensor)
            return _run_apart(layer, name, x, weights, sizes)
        if isinstance(layer, nn.GroupNorm):
            return norm(node, node, None, env, weights, sizes)
        if isinstance(layer, nn.LSTM):
            return _Lstm.apply(args[0], beside, sizes, *_pick_recurrent(weights, name)), None
        if isinstance(layer, Conv):
            places = [p[f"{name}.weight"] for p in beside.places]
            x = args[0]
            if (node, node.args[0]) in env:
                x, layer = env[node, node.args[0]], copy.copy(layer)
                layer.stride = (1, 1)
            return _Conv.apply(x, layer, beside, places, sizes, *_pick(weights, name, layer.bias is not None))
        if isinstance(layer, nn.Linear):
            return _Linear.apply(args[0], layer, beside, sizes, *_pick(weights, name, layer.bias is not None))
        return layer(*args, **kwargs)

    return run


def reads_images(module: nn.Module) -> bool:
    """Whether the only reader of the input is a convolution of images, which takes them with channels filled up."""
    try:
        graph = _Tracer().trace(module)
    except Exception:
        return False
    layers = dict(module.named_modules())
    readers = [user for node in graph.nodes if node.op == "placeholder" for user in node.users]
    first = layers.get(str(readers[0].target)) if len(readers) == 1 and readers[0].op == "call_module" else None
    return isinstance(first, nn.Conv2d) and first.groups == 1


def _check(module: nn.Module, layers: Layers, graph: fx.Graph) -> None:
    """``Unsupported`` unless every parameter belongs to one layer of a known kind."""
    for name, layer in layers.items():
        own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        known = type(layer) in (*LAYERS, *APART) and (not isinstance(layer, nn.GroupNorm) or layer.affine)
        if own and not known:
            raise Unsupported(f"layer {name!r} is a {type(layer).__name__}")
        if isinstance(layer, nn.LSTM):
            _check_recurrent(name, layer, graph)
        if isinstance(layer, Conv) and (layer.padding_mode != "zeros" or isinstance(layer.padding, str)):
            raise Unsupported(f"layer {name!r} pads with {layer.padding_mode!r}, {layer.padding!r}")
        if any(not p.requires_grad for p in own):
            raise Unsupported(f"layer {name!r} is frozen")
    if len(list(module.parameters())) != len(list(module.named_parameters(remove_duplicate=False))):
        raise Unsupported("layers share parameters")
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    twice = [n for n in set(called) if called.count(n) > 1 and list(layers[str(n)].parameters())]
    if twice:
        raise Unsupported(f"layer {twice[0]!r} is used twice")  # gradients are written to one place
    if any(node.op == "get_attr" for node in graph.nodes):
        raise Unsupported("a parameter is used outside a layer")


def _check_recurrent(name: str, layer: nn.LSTM, graph: fx.Graph) -> None:
    """One plain layer from a zero state, of which only the outputs are used."""
    plain = layer.num_layers == 1 and layer.batch_first and layer.bias
    plain = plain and not layer.bidirectional and not layer.proj_size
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target == name]
    users = [user for call in calls for user in call.users]
    read = all(u.target is operator.getitem and (u.args[1] == 0 or not u.users) for u in users)
    if not (plain and read and all(len(c.args) == 1 and not c.kwargs for c in calls)):
        raise Unsupported(f"layer {name!r} is more than a plain LSTM whose outputs are used")


def _absorbing(layers: Layers, graph: fx.Graph) -> tuple[dict[fx.Node, Absorbed], set[fx.Node]]:
    """ReLU -> the GroupNorm that is computed with it, and what is added in between, if anything; and the nodes that
    are not computed where they stand."""

    def is_relu(node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(layers[str(node.target)], nn.ReLU)
        return (node.op == "call_function" and node.target in RELU) or (
            node.op == "call_method" and node.target in ("relu", "relu_")
        )

    def only_user(node: fx.Node) -> fx.Node | None:
        return next(iter(node.users)) if len(node.users) == 1 else None

    late: dict[fx.Node, Absorbed] = {}
    skipped: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_module" or not isinstance(layers[str(node.target)], nn.GroupNorm):
            continue
        user = only_user(node)
        if user is None or user in skipped:
            continue
        if is_relu(user):
            late[user] = (node, None)
            skipped.add(node)
        elif user.op == "call_function" and user.target in ADD and len(user.args) == 2 and not user.kwargs:
            after = only_user(user)
            other = user.args[1] if user.args[0] is node else user.args[0]
            if after is not None and is_relu(after) and isinstance(other, fx.Node) and other is not node:
                late[after] = (node, other)
                skipped |= {node, user}
    return late, skipped


def _second_readers(
    layers: Layers, graph: fx.Graph, late: dict[fx.Node, Absorbed]
) -> dict[fx.Node, tuple[fx.Node, str]]:
    """Norm, or the ReLU it is computed with -> the second of two readers of its output, and what that one takes. These
    are a residual network's shortcuts: an addition, named by the ReLU it is computed with, or a 1x1 convolution with
    stride 2."""
    absorbed = {norm for norm, _ in late.values()}
    norms = {n for n in graph.nodes if n.op == "call_module" and isinstance(layers[str(n.target)], nn.GroupNorm)}
    adds = {other: at for at, (_, other) in late.items() if other is not None}
    out: dict[fx.Node, tuple[fx.Node, str]] = {}
    for node in (norms - absorbed) | set(late):
        if len(node.users) != 2:
            continue
        if node in adds:
            out[node] = (adds[node], SAME)
        for user in node.users:
            layer = layers[str(user.target)] if user.op == "call_module" else None
            if isinstance(layer, nn.Conv2d) and user.args == (node,) and _is_halving(layer):
                out[node] = (user, HALF)
    return out


def _is_halving(layer: nn.Conv2d) -> bool:
    kind = (layer.kernel_size, layer.stride, layer.padding, layer.groups)
    return kind == ((1, 1), (2, 2), (0, 0), 1)


def _pick(weights: Weights, name: str, bias: bool) -> list[Tensor]:
    """The layer's weight in every group, then its bias in every group."""
    out = [w[f"{name}.weight"] for w in weights]
    return out + [w[f"{name}.bias"] for w in weights] if bias else out


def _pick_recurrent(weights: Weights, name: str) -> list[Tensor]:
    """The layer's input and recurrent weights in every group, then its biases in every group."""
    return [w[f"{name}.{kind}_l0"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh") for w in weights]
