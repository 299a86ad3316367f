"""A network as a function of H aliases of its weights, so that one backward pass gives H group gradients.

Samples do not influence each other in these networks, so the gradient with respect to activations is the same whether
groups are run apart or together; only the weight gradients must be kept apart. One forward pass and one backward pass
for activations over the whole batch, and per layer one weight gradient for each group's rows: the same gradients as
H separate passes, at the cost of a plain step, with larger and fewer kernels.

Works for networks that ``torch.fx`` can trace and whose parameters sit in convolutions (Conv1d, Conv2d), Linear
and GroupNorm layers. Output layers of methods' own, which are small, are run group by group.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedtail.models.registry import OUTPUTS
from fedtail.simulate.graph.grouped import HALF, SAME, Conv, GroupedConv, GroupedLinear, GroupedNorm
from fedtail.simulate.graph.recorder import SideStreams

Weights = list[dict[str, Tensor]]
"""Per group of rows: the named parameters. All groups hold the same values."""
Network = Callable[[Weights, Tensor, tuple[int, ...]], Tensor]
Layers = dict[str, nn.Module]
Absorbed = tuple[fx.Node, fx.Node | None]

ADD = (operator.add, operator.iadd, torch.add)
RELU = (F.relu, torch.relu)


class Unsupported(Exception):
    """The network has something that cannot be taken apart by groups of rows."""


LAYERS = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.GroupNorm)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, tuple(OUTPUTS)) or super().is_leaf_module(m, module_qualified_name)


def _run_apart(layer: nn.Module, name: str, x: Tensor, weights: Weights, sizes: tuple[int, ...]) -> Tensor:
    """In float32 at least: a layer that gives logits from few numbers."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    parts = []
    for rows, group in zip(x.to(dtype).split(list(sizes)), weights, strict=True):
        own = {n: group[f"{name}.{n}" if name else n].to(dtype) for n, _ in layer.named_parameters()}
        parts.append(functional_call(layer, own, (rows,)))
    return torch.cat(parts)


def fused_network(module: nn.Module, side: SideStreams | None = None) -> Network:
    """(weights per group, x, rows per group) -> output; the network in its current train / eval mode.

    GroupNorm swallows a ReLU, or an addition and a ReLU, that follow it. Weight gradients are computed ``aside``, and
    not to be read before it is joined. Raises ``Unsupported``.
    """
    beside = side or SideStreams()
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
            out = GroupedNorm.apply(x, None, layer, False, None, beside, sizes, *_pick(weights, name, True))
            return F.relu(out + residual)
        reader, again = readers.get(at, (None, None)) if beside.kernels else (None, None)
        if again == HALF and (x.ndim != 4 or x.shape[2] % 2 or x.shape[3] % 2):
            again = None
        more = GroupedNorm.apply(x, residual, layer, at is not node, again, beside, sizes, *_pick(weights, name, True))
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
        if type(layer) in OUTPUTS:
            x = args[0]
            assert isinstance(x, Tensor)
            return _run_apart(layer, name, x, weights, sizes)
        if isinstance(layer, nn.GroupNorm):
            return norm(node, node, None, env, weights, sizes)
        if isinstance(layer, Conv):
            places = [p[f"{name}.weight"] for p in beside.places]
            x = args[0]
            if (node, node.args[0]) in env:
                x, layer = env[node, node.args[0]], copy.copy(layer)
                layer.stride = (1, 1)
            return GroupedConv.apply(x, layer, beside, places, sizes, *_pick(weights, name, layer.bias is not None))
        if isinstance(layer, nn.Linear):
            return GroupedLinear.apply(args[0], layer, beside, sizes, *_pick(weights, name, layer.bias is not None))
        return layer(*args, **kwargs)

    return run


def _check(module: nn.Module, layers: Layers, graph: fx.Graph) -> None:
    """``Unsupported`` unless every parameter belongs to one layer of a known kind."""
    for name, layer in layers.items():
        own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        known = type(layer) in (*LAYERS, *OUTPUTS) and (not isinstance(layer, nn.GroupNorm) or layer.affine)
        if own and not known:
            raise Unsupported(f"layer {name!r} is a {type(layer).__name__}")
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
