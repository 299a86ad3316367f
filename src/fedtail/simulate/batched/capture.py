"""Record a function of tensors once and replay it with next to no overhead: a "CUDA graph" for the CPU.

Small models spend most of a step in Python, in autograd and in memory allocation. ``capture`` traces the step into
its elementary operations (through autograd and ``torch.func``), gives every result a fixed place in memory, makes
all views once, folds constants, drops copies, and keeps a list of calls. No compiler is involved, tracing takes a
fraction of a second, and the arithmetic is that of the traced function, bit for bit; ``capture`` checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate, map_arg

from fedtail.simulate.batched.trace import Trace, is_empty, is_product, is_random, is_view, mutates, shape_only

Call = Callable[[], Any]


class CaptureError(Exception):
    """The function cannot be captured; call it instead."""


@dataclass(frozen=True)
class Tape:
    """``replay`` recomputes ``outputs`` in place from whatever ``inputs`` hold now (and changes inputs that the
    function changes)."""

    inputs: list[Tensor]
    used: list[bool]
    """Which inputs anything depends on."""
    outputs: list[Tensor]
    calls: list[Call]

    def replay(self) -> None:
        for call in self.calls:
            call()


def capture(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Tape:
    """Trace ``function(*inputs)``; the tape works on these very tensors. Their contents are left unchanged.

    The function may change its inputs in place but must not branch on their values.
    """
    held, before = list(inputs), [t.clone() for t in inputs]
    with torch.no_grad():
        graph = make_fx(function, tracing_mode="real")(*(t.clone() for t in before))
        try:
            tape = _bind(graph, held, in_cat=True)
        except RuntimeError:  # a view of memory inside a larger result need not exist
            _restore(held, before)
            tape = _bind(graph, held, in_cat=False)
        expected_inputs = [t.clone() for t in before]
        expected = function(*expected_inputs)
        _restore(held, before)
        tape.replay()
        same = all(map(_equal, [*held, *tape.outputs], [*expected_inputs, *expected]))
        _restore(held, before)
    if not same:
        raise CaptureError("the replayed step does not give the bits of the step itself")
    return tape


def _restore(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for t, v in zip(tensors, values, strict=True):
        t.copy_(v)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _bind(graph: fx.GraphModule, inputs: list[Tensor], *, in_cat: bool) -> Tape:
    """Give every result a place and turn the graph into calls. ``in_cat``: parts of a ``cat`` are computed in it."""
    trace = Trace(graph)
    if any(is_random(n) for n in trace.nodes if n in trace.needed):
        raise CaptureError("the step draws random numbers")
    forwarded = trace.forwarded()
    dropped = set(forwarded.values())
    concatenated = trace.concatenated() if in_cat else {}
    whole: dict[fx.Node, Tensor] = {}
    inside: dict[fx.Node, tuple[fx.Node, int]] = {}  # results that do lie in a cat
    pool = _Pool(trace)
    value: dict[fx.Node, Any] = {}
    fixed: set[fx.Node] = set()  # results that no replay can change
    calls: list[Call] = []
    feed = iter(inputs)

    def bound(node: fx.Node) -> tuple[Any, Any]:
        return map_arg(node.args, look_up), map_arg(node.kwargs, look_up)

    def look_up(node: fx.Node) -> Any:
        """The node's value; a view that lies ahead is made now."""
        if node not in value and is_view(node):
            args, kwargs = bound(node)
            value[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return value[node]

    for i, node in enumerate(trace.nodes):
        if node.op == "placeholder":
            value[node] = next(feed)
        elif node.op == "get_attr":
            value[node] = getattr(graph, str(node.target))
            fixed.add(node)
        elif node.op == "output":
            results: Any = node.args[0]
            outputs = [look_up(n) for n in results]
            used = [any(u in trace.needed for u in n.users) for n in trace.nodes if n.op == "placeholder"]
            return Tape(inputs, used, outputs, calls)
        elif node not in trace.needed or node in value:
            continue
        elif is_view(node):
            look_up(node)
            if trace.base[node] in fixed:
                fixed.add(node)
        elif node in dropped:
            value[node] = look_up(node.args[0])  # type: ignore[arg-type]
        else:
            args, kwargs = bound(node)
            if mutates(node):
                calls.append(_quick(node.target, args, kwargs))
                calls[-1]()
                value[node] = args[0]
                continue
            if node in whole:
                value[node] = whole[node]
                _join(calls, whole[node], node, args, inside, trace)
                continue
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            constant = shape_only(node) or all(n in fixed for n in node.all_input_nodes)
            if constant and not trace.changes.get(node):
                value[node] = result
                fixed.add(node)
            elif trace.trivial_sum(node, args[0]):
                value[node] = args[0].view(result.shape)
                trace.base[node] = trace.base[node.args[0]]  # type: ignore[index]
            else:
                place = None
                if node in forwarded:
                    place = look_up(forwarded[node].args[0])  # type: ignore[arg-type]
                    fits = place.shape == result.shape and place.dtype == result.dtype
                    if not fits or (is_product(node) and not place.is_contiguous()):
                        dropped.discard(forwarded[node])
                        place = None
                elif node in concatenated and concatenated[node][0] not in forwarded:
                    cat, start = inside[node] = concatenated[node]
                    if cat not in whole:
                        whole[cat] = pool.place(cat, i, _cat_result(cat))
                    dim = cat.args[1] if len(cat.args) > 1 else 0
                    place = whole[cat].narrow(dim, start, result.shape[dim])  # type: ignore[arg-type]
                if place is None:
                    place = pool.place(node, i, result)
                value[node] = place
                if not is_empty(node):
                    calls.append(_into(node.target, args, kwargs, place, result))
    raise AssertionError("a traced graph ends in its output")


def _cat_result(cat: fx.Node) -> Tensor:
    meta = cat.meta["tensor_meta"]
    return torch.empty(meta.shape, dtype=meta.dtype)


def _join(calls: list[Call], whole: Tensor, cat: fx.Node, args: Any, inside: dict[fx.Node, Any], trace: Trace) -> None:
    """Copy the parts of a ``cat`` that are not computed in it."""
    dim, start = args[1] if len(args) > 1 else 0, 0
    nodes: Any = cat.args[0]
    for node, part in zip(nodes, args[0], strict=True):
        if inside.get(trace.base[node], (None, 0)) != (cat, start):
            copy = partial(Tensor.copy_, whole.narrow(dim, start, part.shape[dim]), part)
            copy()
            calls.append(copy)
        start += part.shape[dim]


class _Pool:
    """Memory of results that are no longer read goes to later ones: a step that fits the cache runs faster."""

    def __init__(self, trace: Trace) -> None:
        self.free: list[Tensor] = []
        self.held: dict[fx.Node, Tensor] = {}
        self.last: dict[fx.Node, int] = {}
        for i, node in enumerate(trace.nodes):
            if node in trace.needed:
                for n in [*node.all_input_nodes, node]:
                    self.last[trace.base[n]] = i if node.op != "output" else len(trace.nodes)
        for node in trace.nodes:  # a trivial sum lives in its argument's memory
            if node.target == torch.ops.aten.sum.dim_IntList and node in self.last:
                given = trace.base[node.args[0]]  # type: ignore[index]
                self.last[given] = max(self.last.get(given, 0), self.last[node])

    def place(self, node: fx.Node, now: int, result: Any) -> Any:
        """Where the node's result lives from now on."""
        if not isinstance(result, Tensor) or not result.numel():
            return result
        extent = sum((s - 1) * t for s, t in zip(result.size(), result.stride(), strict=True)) + 1
        if extent != result.numel():
            return result
        for other in [n for n in self.held if self.last[n] < now]:
            self.free.append(self.held.pop(other))
        size = result.numel() * result.element_size()
        fitting = [b for b in self.free if size <= b.numel() <= 2 * size]
        if fitting:
            block = min(fitting, key=Tensor.numel)
            self.free = [b for b in self.free if b is not block]
        else:
            block = torch.empty(max(size, 64), dtype=torch.uint8)
        self.held[node] = block
        return block[:size].view(result.dtype).as_strided(result.size(), result.stride())


def _quick(target: Any, args: Any, kwargs: Any, **out: Any) -> Call:
    """A call of ``target``, through torch's own bindings where they take the same arguments: half the overhead.

    Bindings are tried on copies, since an in-place operation must not happen twice.
    """
    name = target._schema.name.split("::")[1]
    in_place = name.endswith("_") and not name.startswith("_")
    bound = getattr(Tensor if in_place else torch, name, None)
    if bound is not None:
        copies = map_aggregate((args, kwargs, out), lambda a: a.clone() if isinstance(a, Tensor) else a)
        try:
            bound(*copies[0], **copies[1], **copies[2])
        except (TypeError, RuntimeError, ValueError):
            pass
        else:
            return partial(bound, *args, **kwargs, **out)
    return partial(target, *args, **kwargs, **out)


def _into(target: Any, args: Any, kwargs: Any, place: Any, result: Any) -> Call:
    """A call that recomputes ``place``, which holds ``result`` afterwards."""
    variant = _out_variant(target) if isinstance(place, Tensor) else None
    if variant is not None:
        try:
            call = _quick(target, args, kwargs, out=place)
            if call.func is target:  # type: ignore[attr-defined]
                call = partial(variant, *args, **kwargs, **{variant._schema.arguments[-1].name: place})
            aliased = any(isinstance(a, Tensor) and a.data_ptr() == place.data_ptr() for a in args)
            if not aliased:
                call()
            else:
                place.copy_(result)
            return call
        except (TypeError, RuntimeError, ValueError):
            pass
    if isinstance(place, Tensor):
        place.copy_(result)
    return partial(_copy_results, target, args, kwargs, place)


def _copy_results(target: Any, args: Any, kwargs: Any, place: Any) -> None:
    result = target(*args, **kwargs)
    if isinstance(place, Tensor):
        place.copy_(result)
        return
    for old, new in zip(place, result, strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)


def _out_variant(target: Any) -> Any:
    """The overload of an operation that writes into a given tensor, if there is one with the same arguments."""
    given = [(a.name, str(a.type)) for a in target._schema.arguments]
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        arguments = other._schema.arguments
        same = [(a.name, str(a.type)) for a in arguments[:-1]] == given
        if same and len(arguments) == len(given) + 1 and arguments[-1].is_out:
            return other
    return None
