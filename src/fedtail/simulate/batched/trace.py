"""What a traced graph of tensor operations says about memory: who owns it, who changes it, who needs it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

EMPTY = {"new_empty", "empty_like"}
SHAPE_ONLY = {"full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones"} | EMPTY
"""Operations that read nothing of their argument but its shape."""

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward"}


class Trace:
    """The nodes of a graph in order, with the relations between them."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.nodes: list[fx.Node] = list(graph.graph.nodes)
        self.place = {n: i for i, n in enumerate(self.nodes)}
        self.base: dict[fx.Node, fx.Node] = {}
        """The node whose result owns the memory of a node's result."""
        for node in self.nodes:
            shares = is_view(node) or mutates(node)
            self.base[node] = self.base[node.args[0]] if shares else node  # type: ignore[index]
        self.needed = self._needed()
        self.changes: dict[fx.Node, list[fx.Node]] = {}
        """Owner of memory -> the nodes that change it."""
        for node in self.nodes:
            if node in self.needed and mutates(node):
                self.changes.setdefault(self.base[node], []).append(node)
        self.reads: dict[fx.Node, list[fx.Node]] = {}
        """Owner of memory -> the nodes that read it."""
        for node in self.nodes:
            if node in self.needed and not is_view(node):
                for given in node.all_input_nodes:
                    if not (node.target == aten.copy_.default and given is node.args[0]) and not shape_only(node):
                        self.reads.setdefault(self.base[given], []).append(node)

    def _needed(self) -> set[fx.Node]:
        """Nodes that outputs depend on. A change of memory counts if the memory is an input or needed itself."""
        needed: set[fx.Node] = set()
        memory = {n for n in self.nodes if n.op == "placeholder"}
        for node in reversed(self.nodes):
            if node.op in ("output", "placeholder") or node in needed or (mutates(node) and self.base[node] in memory):
                needed.add(node)
                needed.update(node.all_input_nodes)
                memory.update(self.base[n] for n in node.all_input_nodes)
        return needed

    def trivial_sum(self, node: fx.Node) -> bool:
        """A sum over dimensions of length 1 of memory that nobody changes: it may be a view."""
        if node.target != aten.sum.dim_IntList or node.kwargs or self.changes.get(node):
            return False
        given: Any = node.args[0]
        dims: Any = node.args[1]
        later = [n for n in self.changes.get(self.base[given], []) if self.place[n] > self.place[node]]
        return not later and bool(dims) and all(given.meta["tensor_meta"].shape[d] == 1 for d in dims)

    def concatenated(self) -> dict[fx.Node, tuple[fx.Node, int]]:
        """Result -> (the ``cat`` it goes into, its start there), where it can be computed in that place."""
        out: dict[fx.Node, tuple[fx.Node, int]] = {}
        for cat in self.nodes:
            if cat not in self.needed or cat.target != aten.cat.default or self.changes.get(cat):
                continue
            inputs: Any = cat.args[0]
            rest: Any = cat.args[1:]
            dim, start = rest[0] if rest else 0, 0
            for given in inputs:
                owner = self.base[given]
                shape = owner.meta["tensor_meta"].shape if is_computed(owner) else None
                late = any(self.place[n] > self.place[cat] for n in self.changes.get(owner, []))
                if shape == given.meta["tensor_meta"].shape and owner not in out and not late and not is_product(owner):
                    out[owner] = (cat, start)
                start += given.meta["tensor_meta"].shape[dim]
        return out

    def forwarded(self) -> dict[fx.Node, fx.Node]:
        """Result -> the ``copy_`` that moves it elsewhere, where it can be computed in that place to begin with."""
        out = {}
        for copy in self.nodes:
            if copy not in self.needed or copy.target != aten.copy_.default or len(copy.args) > 2:
                continue
            source = copy.args[1]
            if isinstance(source, fx.Node) and source not in out and self._can_forward(source, copy):
                out[source] = copy
        return out

    def _can_forward(self, source: fx.Node, copy: fx.Node) -> bool:
        target = self.base[copy]
        made, moved = self.place[source], self.place[copy]
        if not is_computed(source) or self.base[source] is not source or self.changes.get(source):
            return False
        if target.op != "placeholder" and self.place[target] > made:
            return False
        between = [n for n in self.reads.get(target, []) if made < self.place[n] < moved]
        aliased = [n for n in source.all_input_nodes if self.base[n] is target]
        if between or (aliased and not (torch.Tag.pointwise in source.target.tags and aliased == [copy.args[0]])):  # type: ignore[union-attr]
            return False
        others = [n for n in self.changes[target] if n is not copy]
        if any(n.target != aten.copy_.default and made < self.place[n] < moved for n in others):
            return False
        last_read = max((self.place[n] for n in self.reads.get(source, [])), default=0)
        return not any(moved < self.place[n] < last_read for n in others)


def is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_computed(node: fx.Node) -> bool:
    """A plain operation with a result of its own."""
    return isinstance(node.target, torch._ops.OpOverload) and not is_view(node) and not mutates(node)


def shape_only(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket.__name__ in SHAPE_ONLY


def is_empty(node: fx.Node) -> bool:
    """A result without contents: nothing to recompute."""
    return shape_only(node) and node.target.overloadpacket.__name__ in EMPTY  # type: ignore[union-attr]


def is_product(node: fx.Node) -> bool:
    """A matrix product; these are slow where their result is not contiguous."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket.__name__ in PRODUCTS


def is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
