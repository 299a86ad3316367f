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

from fedtail.simulate.batched.placement import Placement, place
from fedtail.simulate.batched.trace import Trace, is_empty, is_random, is_view, mutates

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


@dataclass(frozen=True)
class Recording:
    """A function traced into elementary operations. It takes most of a capture's time, and any number of tapes can be
    made of it, at once too: every worker has a tape on tensors of its own."""

    graph: fx.GraphModule
    trace: Trace


def record(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Recording:
    """Trace ``function`` on copies of ``inputs``. One at a time: tracing changes torch as a whole while it lasts."""
    with torch.no_grad():
        graph = make_fx(function, tracing_mode="real")(*(t.clone() for t in inputs))
    trace = Trace(graph)
    if any(is_random(n) for n in trace.needed):
        raise CaptureError("the step draws random numbers")
    return Recording(graph, trace)


def capture(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    recording: Recording | None = None,
    *,
    check: bool = True,
) -> Tape:
    """Trace ``function(*inputs)``; the tape works on these very tensors. Their contents are left unchanged.

    The function may change its inputs in place but must not branch on their values. ``check``: whether to compare it
    with the function, which a recording need not be asked twice.
    """
    recording = recording or record(function, inputs)
    held, before = list(inputs), [t.clone() for t in inputs]
    with torch.no_grad():
        graph, trace = recording.graph, recording.trace
        try:
            tape = _Emitter(graph, place(trace, in_cat=True), held).tape()
        except RuntimeError:  # a view of memory inside a larger result need not exist
            restore(held, before)
            tape = _Emitter(graph, place(trace, in_cat=False), held).tape()
        restore(held, before)
        if not check:
            return tape
        expected_inputs = [t.clone() for t in before]
        expected = function(*expected_inputs)
        tape.replay()
        same = all(map(same_bits, [*held, *tape.outputs], [*expected_inputs, *expected]))
        restore(held, before)
    if not same:
        raise CaptureError("the replayed step does not give the bits of the step itself")
    return tape


def restore(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for t, v in zip(tensors, values, strict=True):
        t.copy_(v)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


class _Emitter:
    """Runs a placed graph once, which gives every result its memory, and notes the calls that recompute it."""

    def __init__(self, graph: fx.GraphModule, placement: Placement, inputs: list[Tensor]) -> None:
        self.graph, self.placement, self.inputs = graph, placement, inputs
        self.pool = _Pool(placement.last_reads())
        placeholders = [n for n in placement.trace.nodes if n.op == "placeholder"]
        self.value: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
        self.whole: dict[fx.Node, Tensor] = {}
        """Memory of a ``cat``, from its first part on."""
        self.calls: list[Call] = []

    def tape(self) -> Tape:
        trace = self.placement.trace
        for i, node in enumerate(trace.nodes):
            if node in self.placement.kinds and node not in self.value:
                self._emit(i, node)
        used = [any(u in trace.needed for u in n.users) for n in trace.nodes if n.op == "placeholder"]
        results: Any = trace.nodes[-1].args[0]
        return Tape(self.inputs, used, [self._look_up(n) for n in results], self.calls)

    def _emit(self, i: int, node: fx.Node) -> None:
        """Set the node's value, and add its call if it has one."""
        kind = self.placement.kinds[node]
        if node.op == "get_attr":
            self.value[node] = getattr(self.graph, str(node.target))
            return
        args, kwargs = self._bound(node)
        if kind == "dropped":
            self.value[node] = args[0]
        elif kind == "squeezed":
            self.value[node] = args[0].view(node.meta["tensor_meta"].shape)
        elif kind == "change":
            self.calls.append(_quick(node.target, args, kwargs))
            self.calls[-1]()
            self.value[node] = args[0]
        elif kind == "joined":
            self.value[node] = self.whole[node]
            self._join(node, args)
        else:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            self.value[node] = result if kind in ("constant", "view") else self._place(i, node, result)
            if kind == "result" and not is_empty(node):
                self.calls.append(_into(node.target, args, kwargs, self.value[node], result))

    def _place(self, i: int, node: fx.Node, result: Any) -> Any:
        """Memory for a result."""
        if node in self.placement.forwarded:
            return self._look_up(self.placement.forwarded[node])
        if node not in self.placement.inside:
            return self.pool.place(node, i, result)
        return self._part(i, node)

    def _part(self, i: int, node: fx.Node) -> Tensor:
        """The memory of a result inside a ``cat``, which may lie inside another."""
        cat, start = self.placement.inside[node]
        if cat not in self.whole:
            meta = cat.meta["tensor_meta"]
            inside = cat in self.placement.inside
            self.whole[cat] = (
                self._part(i, cat) if inside else self.pool.place(cat, i, torch.empty(meta.shape, dtype=meta.dtype))
            )
        dim = _dimension(cat)
        return self.whole[cat].narrow(dim, start, node.meta["tensor_meta"].shape[dim])

    def _join(self, cat: fx.Node, args: Any) -> None:
        """Copy the parts of a ``cat`` that are not computed in it."""
        dim, start = _dimension(cat), 0
        nodes: Any = cat.args[0]
        for node, part in zip(nodes, args[0], strict=True):
            if self.placement.inside.get(self.placement.trace.owner(node)) != (cat, start):
                copy = partial(Tensor.copy_, self.whole[cat].narrow(dim, start, part.shape[dim]), part)
                copy()
                self.calls.append(copy)
            start += part.shape[dim]

    def _bound(self, node: fx.Node) -> tuple[Any, Any]:
        return map_arg(node.args, self._look_up), map_arg(node.kwargs, self._look_up)

    def _look_up(self, node: fx.Node) -> Any:
        """The node's value; a view that lies ahead is made now, and a change that lies ahead has a place already."""
        if node not in self.value and mutates(node):
            return self._look_up(node.args[0])  # type: ignore[arg-type]
        if node not in self.value and is_view(node):
            args, kwargs = self._bound(node)
            self.value[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self.value[node]


def _dimension(cat: fx.Node) -> int:
    dim: Any = cat.args[1] if len(cat.args) > 1 else 0
    return int(dim)


class _Pool:
    """Memory of results that are no longer read goes to later ones: a step that fits the cache runs faster."""

    def __init__(self, last_reads: dict[fx.Node, int]) -> None:
        self.last = last_reads
        self.free: list[Tensor] = []
        self.held: dict[fx.Node, Tensor] = {}

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
