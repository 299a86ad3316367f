"""What becomes of every node of a traced graph, and in whose memory its result lies; decided before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from fedtail.simulate.batched.trace import Trace, is_product, is_view, mutates, shape_only

Kind = Literal["constant", "view", "dropped", "squeezed", "change", "joined", "result"]
"""``constant``: no replay changes it. ``dropped``: a copy whose source is computed in its place to begin with.
``squeezed``: a sum over dimensions of length 1, which can be a view. ``change``: in place. ``joined``: a ``cat``, some
parts of which are computed in it. ``result``: computed in every replay."""


@dataclass(frozen=True)
class Placement:
    """The nodes that outputs depend on, by kind, and the results that lie in others' memory."""

    trace: Trace
    kinds: dict[fx.Node, Kind]
    forwarded: dict[fx.Node, fx.Node]
    """Result -> the node in whose memory it is computed, instead of being copied there."""
    inside: dict[fx.Node, tuple[fx.Node, int]]
    """Result -> the ``cat`` it is computed in, and its start there."""

    def memory(self, node: fx.Node) -> fx.Node:
        """The node whose memory the result of ``node`` lies in, which may be another's."""
        owner = self.trace.owner(node)
        while owner in self.forwarded or owner in self.inside:
            owner = self.trace.owner(self.forwarded[owner] if owner in self.forwarded else self.inside[owner][0])
        return owner

    def last_reads(self) -> dict[fx.Node, int]:
        """Owner of memory -> the position after which nobody reads it."""
        last = {}
        for i, node in enumerate(self.trace.nodes):
            if node in self.trace.needed:
                for n in [*node.all_input_nodes, node]:
                    last[self.memory(n)] = i if node.op != "output" else len(self.trace.nodes)
        return last


def place(trace: Trace, *, in_cat: bool) -> Placement:
    """``in_cat``: parts of a ``cat`` are computed in it."""
    kinds = _kinds(trace)
    forwarded = {n: c for n, c in trace.forwarded().items() if kinds[n] == "result" and _fits(n, c.all_input_nodes[0])}
    inside = {
        n: (cat, start)
        for n, (cat, start) in (trace.concatenated() if in_cat else {}).items()
        if kinds[n] == kinds[cat] == "result" and n not in forwarded and cat not in forwarded
    }
    kinds |= dict.fromkeys(forwarded.values(), "dropped")
    kinds |= {cat: "joined" for cat, _ in inside.values()}
    return Placement(trace, kinds, {n: c.all_input_nodes[0] for n, c in forwarded.items()}, inside)


def _kinds(trace: Trace) -> dict[fx.Node, Kind]:
    """The kind of every needed node, as far as it shows in the node itself and in those before it."""
    kinds: dict[fx.Node, Kind] = {}
    for node in trace.nodes:
        if node.op in ("placeholder", "output") or node not in trace.needed:
            continue
        if mutates(node):
            kinds[node] = "change"
        elif node.op == "get_attr":
            kinds[node] = "constant"
        elif is_view(node):
            kinds[node] = "constant" if kinds.get(trace.base[node]) == "constant" else "view"
        elif not trace.changes.get(node) and (
            shape_only(node) or all(kinds.get(n) == "constant" for n in node.all_input_nodes)
        ):
            kinds[node] = "constant"
        else:
            kinds[node] = "squeezed" if node in trace.squeezed else "result"
    return kinds


def _fits(node: fx.Node, place: fx.Node) -> bool:
    """Whether a result can be computed in that place: same shape and type, and no matrix product with gaps."""
    mine, other = node.meta["tensor_meta"], place.meta["tensor_meta"]
    gaps = other.memory_format != torch.contiguous_format
    return mine.shape == other.shape and mine.dtype == other.dtype and not (gaps and is_product(node))
