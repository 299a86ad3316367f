"""A tape as TorchScript: no Python between its operations.

Called one by one from Python, every operation takes and leaves the interpreter's lock, and workers stand in each
other's way at every one of them: two threads were 1.3 times as fast as one where two processes were 1.9 times. Written
out as a function of the tape's tensors, a whole step is one call, and computes without the lock. The operations are the
very same ones, on the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Call = Callable[[], Any]
Scripts = dict[str, Callable[..., None]]
"""Functions by their source: workers' tapes of one recording share them."""

CALLS_TO_SETTLE = 3
"""TorchScript watches the first calls of a function and settles how to run it after them."""


class _Unwritten(Exception):
    """A call that is better left to Python."""


class _Writer:
    """Calls as lines of a function, and the tensors that are its arguments."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.tensors: list[Tensor] = []
        self.names: dict[int, str] = {}
        self.lines = [_statement(call, self.value) for call in calls]

    @property
    def arguments(self) -> str:
        return ", ".join(f"t{i}: Tensor" for i in range(len(self.tensors)))

    def compiled(self, scripts: Scripts, source: str) -> Callable[..., None]:
        if source not in scripts:
            scripts[source] = torch.jit.CompilationUnit(source).replay
        return scripts[source]

    def value(self, value: Any) -> str:
        if isinstance(value, Tensor):
            if id(value) not in self.names:
                self.names[id(value)] = f"t{len(self.tensors)}"
                self.tensors.append(value)
            return self.names[id(value)]
        if isinstance(value, bool | int | None) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        if isinstance(value, list | tuple) and value:
            return f"[{', '.join(map(self.value, value))}]"
        raise _Unwritten


def _statement(call: Any, value: Callable[[Any], str]) -> str:
    """A ``functools.partial`` of an operation, as a line of TorchScript."""
    if not hasattr(call, "func"):
        raise _Unwritten
    words = [value(a) for a in call.args], [f"{k}={value(v)}" for k, v in call.keywords.items()]
    schema = getattr(call.func, "_schema", None)
    if schema is not None:
        space, name = schema.name.split("::")
        return f"torch.ops.{space}.{name}({', '.join([*words[0], *words[1]])})"
    name = getattr(call.func, "__name__", "")
    if getattr(Tensor, name, None) is call.func:
        return f"{words[0][0]}.{name}({', '.join([*words[0][1:], *words[1]])})"
    if getattr(torch, name, None) is call.func:
        return f"torch.{name}({', '.join([*words[0], *words[1]])})"
    raise _Unwritten


def scripted(calls: Sequence[Call], scripts: Scripts) -> Call | None:
    """One call that does what ``calls`` do; None if one of them cannot be written."""
    try:
        writer = _Writer(calls)
    except _Unwritten:
        return None
    function = writer.compiled(scripts, "\n    ".join([f"def replay({writer.arguments}):", *writer.lines]) + "\n")
    tensors = tuple(writer.tensors)
    return lambda: function(*tensors)


class Feed(NamedTuple):
    """Inputs and losses, step by step."""

    rows: Tensor
    """(S, n B) of the pool."""
    labels: Tensor
    """(S, n, 2, B) see ``Cohort``."""
    shares: Tensor
    loss: Tensor
    """(S, n, B) where losses go."""


Stretch = Callable[[Feed, int, int], None]
"""Takes the steps from one to another."""


def looped(
    calls: Sequence[Call], pool: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor, out: Tensor, scripts: Scripts
) -> Stretch | None:
    """A whole stretch of steps as one call, each with its rows of the pool; None if a call cannot be written.

    inputs: (n B, ...), labels, shares: where a step finds them; out: where it leaves its losses.
    """
    try:
        writer = _Writer(calls)
    except _Unwritten:
        return None
    there, x, y, weights, losses = (writer.value(t) for t in (pool, inputs, labels, shares, out))
    lines = [
        f"def replay(rows: Tensor, labels: Tensor, shares: Tensor, loss: Tensor, first: int, last: int, "
        f"{writer.arguments}):",
        "    for s in range(first, last):",
        f"torch.index_select({there}, 0, rows[s], out={x})",
        f"{y}.copy_(labels[s])",
        f"{weights}.copy_(shares[s])",
        *writer.lines,
        f"loss[s].copy_({losses})",
    ]
    function = writer.compiled(scripts, "\n".join([*lines[:2], *(f"        {line}" for line in lines[2:])]) + "\n")
    tensors = tuple(writer.tensors)
    return lambda feed, first, last: function(*feed, first, last, *tensors)
