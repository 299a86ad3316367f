"""Record a function of tensors once and replay it with next to no overhead: a "CUDA graph" for the CPU.

Small models spend most of a step in Python, in autograd and in memory allocation. ``capture`` traces the step into
its elementary operations (through autograd and ``torch.func``), gives every result a fixed place in memory, makes
all views once, folds constants, and keeps a list of calls. No compiler is involved, tracing takes a fraction of a
second, and the arithmetic is that of the traced function, bit for bit; ``check`` makes sure of that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate, map_arg

Call = Callable[[], Any]
Function = Callable[..., Sequence[Tensor]]

EMPTY = {"new_empty", "empty_like"}
SHAPE_ONLY = {"full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones"} | EMPTY
"""Operations that read nothing of their argument but its shape."""


class CaptureError(Exception):
    """The function cannot be captured; call it instead."""


@dataclass(frozen=True)
class Tape:
    """``replay`` recomputes ``outputs`` in place from whatever ``inputs`` hold now, and changes the inputs that the
    function changes."""

    inputs: list[Tensor]
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
    needed: set[fx.Node]
    """What outputs, or inputs that are changed, depend on."""
    changed: set[fx.Node]
    """Nodes whose memory some operation changes."""
    over: dict[int, list[fx.Node]]
    """Place of a node -> results that nobody reads after it."""


def record(function: Function, inputs: Sequence[Tensor]) -> Recording:
    """Trace ``function`` on copies of ``inputs``. One at a time: tracing changes torch as a whole while it lasts."""
    with torch.no_grad():
        graph = make_fx(function, tracing_mode="real")(*(t.clone() for t in inputs))
    nodes = list(graph.graph.nodes)
    owner: dict[fx.Node, fx.Node] = {}  # whose memory a node's result lies in
    for node in nodes:
        owner[node] = owner[given(node)] if is_view(node) or mutates(node) else node
    needed: set[fx.Node] = set()
    memory = {n for n in nodes if n.op == "placeholder"}
    for node in reversed(nodes):
        if node.op in ("output", "placeholder") or node in needed or (mutates(node) and owner[node] in memory):
            needed |= {node, *node.all_input_nodes}
            memory |= {owner[n] for n in node.all_input_nodes}
    if any(is_random(n) for n in needed):
        raise CaptureError("the step draws random numbers")
    last = {owner[n]: i for i, node in enumerate(nodes) if node in needed for n in (node, *node.all_input_nodes)}
    over: dict[int, list[fx.Node]] = {}
    for node, i in last.items():
        over.setdefault(i, []).append(node)
    return Recording(graph, needed, {owner[n] for n in needed if mutates(n)}, over)


def capture(function: Function, inputs: Sequence[Tensor], recording: Recording | None = None) -> Tape:
    """Return a tape of ``function`` that works on these very tensors, whose contents are left unchanged.

    The function may change its inputs in place but must not branch on their values.
    """
    recording = recording or record(function, inputs)
    before = [t.clone() for t in inputs]
    with torch.no_grad():
        tape = _tape(recording, list(inputs))
    restore(inputs, before)
    return tape


def _tape(recording: Recording, inputs: list[Tensor]) -> Tape:
    """Run the graph once, which gives every result its memory, and note the calls that recompute it."""
    nodes: list[fx.Node] = list(recording.graph.graph.nodes)
    value: dict[fx.Node, Any] = dict(zip((n for n in nodes if n.op == "placeholder"), inputs, strict=True))
    constants: set[fx.Node] = set()
    calls: list[Call] = []
    memory = _Memory()
    for i, node in enumerate(nodes):
        memory.free(recording.over.get(i - 1, ()))
        if node.op in ("placeholder", "output") or node not in recording.needed:
            continue
        if node.op == "get_attr":
            value[node] = getattr(recording.graph, str(node.target))
            constants.add(node)
            continue
        args, kwargs = map_arg(node.args, value.__getitem__), map_arg(node.kwargs, value.__getitem__)
        if mutates(node):
            calls.append(_quick(node.target, args, kwargs))
            calls[-1]()
            value[node] = kwargs.get("out", args[0])
            continue
        value[node] = result = node.target(*args, **kwargs)  # type: ignore[operator]
        settled = shape_only(node) or all(n in constants for n in node.all_input_nodes)
        if settled and node not in recording.changed:
            constants.add(node)
        elif not is_view(node):
            value[node] = memory.place(node, result)
            if not is_empty(node):
                calls.append(_into(node.target, args, kwargs, value[node], result))
    results: Any = nodes[-1].args[0]
    return Tape(inputs, [value[n] for n in results], calls)


class _Memory:
    """Memory of results that are no longer read goes to later ones: a step that fits the cache runs faster."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self.held: dict[fx.Node, Tensor] = {}

    def free(self, nodes: Sequence[fx.Node]) -> None:
        self.blocks += [self.held.pop(n) for n in nodes if n in self.held]

    def place(self, node: fx.Node, result: Any) -> Any:
        """Return where the node's result lives from now on."""
        if not isinstance(result, Tensor) or not result.numel():
            return result
        if sum((n - 1) * s for n, s in zip(result.size(), result.stride(), strict=True)) + 1 != result.numel():
            return result  # with gaps
        size = result.numel() * result.element_size()
        fitting = [b for b in self.blocks if size <= b.numel() <= 2 * size]
        block = min(fitting, key=Tensor.numel) if fitting else torch.empty(max(size, 64), dtype=torch.uint8)
        self.blocks = [b for b in self.blocks if b is not block]
        self.held[node] = block
        return block[:size].view(result.dtype).as_strided(result.size(), result.stride())


def check(function: Function, tape: Tape, values: Sequence[Tensor]) -> None:
    """Raise ``CaptureError`` unless a replay on ``values`` has the bits of the function, and changes something.

    ``values`` stand for the inputs; where they are 0, as states and learning rates may be, a call that is missing on
    the tape would not show. The inputs' contents are left unchanged.
    """
    before = [t.clone() for t in tape.inputs]
    with torch.no_grad():
        expected_inputs = [t.clone() for t in values]
        expected = function(*expected_inputs)
        restore(tape.inputs, values)
        tape.replay()
        same = all(map(same_bits, [*tape.inputs, *tape.outputs], [*expected_inputs, *expected]))
    restore(tape.inputs, before)
    if not same:
        raise CaptureError("the replayed step does not give the bits of the step itself")
    if all(map(same_bits, expected_inputs, values)):
        raise CaptureError("the step changes nothing, so that nothing shows whether it is replayed")


def restore(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for t, v in zip(tensors, values, strict=True):
        t.copy_(v)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


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
    """Return a call that recomputes ``place``, which holds ``result`` afterwards."""
    variant = _out_variant(target) if isinstance(place, Tensor) else None
    if variant is not None:
        try:
            call = _quick(target, args, kwargs, out=place)
            if call.func is target:  # type: ignore[attr-defined]
                call = partial(variant, *args, **kwargs, **{variant._schema.arguments[-1].name: place})
            call()
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


def is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def given(node: fx.Node) -> Any:
    """Return what a view shows, or an operation changes."""
    return node.kwargs.get("out", node.args[0])


def shape_only(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket.__name__ in SHAPE_ONLY


def is_empty(node: fx.Node) -> bool:
    """A result without contents: nothing to recompute."""
    return shape_only(node) and node.target.overloadpacket.__name__ in EMPTY  # type: ignore[union-attr]


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws; attention does only where it drops something."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = [a.name for a in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(given.get("dropout_p", 0.0))
