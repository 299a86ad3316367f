"""What a traced graph of tensor operations says about memory: who owns it, who changes it, who needs it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

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
        self._views: dict[fx.Node, Any] = {}
        self.needed = self._needed()
        self.changes: dict[fx.Node, list[fx.Node]] = {}
        """Owner of memory -> the nodes that change it."""
        for node in self.nodes:
            if node in self.needed and mutates(node):
                self.changes.setdefault(self.base[node], []).append(node)
        self.squeezed = {n for n in self.nodes if n in self.needed and self._trivial_sum(n)}
        """Sums over dimensions of length 1 of memory that nobody changes: they may be views."""
        self.reads: dict[fx.Node, list[fx.Node]] = {}
        """Owner of memory -> the nodes that read it."""
        for node in self.nodes:
            if node in self.needed and not is_view(node):
                for given in node.all_input_nodes:
                    if not (node.target == aten.copy_.default and given is node.args[0]) and not shape_only(node):
                        self.reads.setdefault(self.owner(given), []).append(node)

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

    def owner(self, node: fx.Node) -> fx.Node:
        """``base``, through sums that may be views."""
        base = self.base[node]
        while base in self.squeezed:
            base = self.base[base.all_input_nodes[0]]
        return base

    def view(self, node: fx.Node) -> Any:
        """Where a node's result lies in the memory of its base, as a tensor without contents."""
        if node not in self._views:
            if is_view(node):
                self._views[node] = node.target(*map_arg(node.args, self.view), **node.kwargs)  # type: ignore[operator]
            elif mutates(node):
                self._views[node] = self.view(node.args[0])  # type: ignore[arg-type]
            else:
                meta = node.meta["tensor_meta"]
                self._views[node] = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        return self._views[node]

    def _trivial_sum(self, node: fx.Node) -> bool:
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
                late = any(self.place[n] > self.place[cat] for n in self.changes.get(owner, []))
                whole = is_computed(owner) and _whole(owner, given) and not is_product(owner)
                cast = given.meta["tensor_meta"].dtype != cat.meta["tensor_meta"].dtype
                if whole and not cast and not late and owner not in out:
                    out[owner] = (cat, start)
                start += given.meta["tensor_meta"].shape[dim]
        return out

    def forwarded(self) -> dict[fx.Node, fx.Node]:
        """Result -> the ``copy_`` that moves it elsewhere, where it can be computed in that place to begin with."""
        out: dict[fx.Node, fx.Node] = {}
        for copy in self.nodes:
            if copy not in self.needed or copy.target != aten.copy_.default or len(copy.args) > 2:
                continue
            source = copy.args[1]
            if isinstance(source, fx.Node) and source not in out:
                there = {n: c for n, c in out.items() if self.base[c] is self.base[copy]}
                if self._can_forward(source, copy, there):
                    out[source] = copy
        return out

    def _can_forward(self, source: fx.Node, copy: fx.Node, there: dict[fx.Node, fx.Node]) -> bool:
        """``there``: results that lie in the same memory already, and the copies that need not be made."""
        target = self.base[copy]
        made, moved = self.place[source], self.place[copy]
        if not is_computed(source) or self.base[source] is not source or self.changes.get(source):
            return False
        if target.op != "placeholder" and self.place[target] > made:
            return False
        reads = [n for owner in (target, *there) for n in self.reads.get(owner, []) if n is not there.get(owner)]
        if any(made < self.place[n] < moved for n in reads):
            return False
        aliased = [n for n in source.all_input_nodes if self.owner(n) is target or self.owner(n) in there]
        if aliased and not (torch.Tag.pointwise in source.target.tags and aliased == [copy.args[0]]):  # type: ignore[union-attr]
            return False
        others = [n for n in self.changes[target] if n is not copy]
        between = [n for n in others if made < self.place[n] < moved]
        if any(n.target != aten.copy_.default or _overlap(self.view(n), self.view(copy)) for n in between):
            return False
        last_read = max((self.place[n] for n in self.reads.get(source, [])), default=0)
        return not any(moved < self.place[n] < last_read for n in others)


def _whole(owner: fx.Node, view: fx.Node) -> bool:
    """Whether a view shows a whole result as it lies: neither a part of it nor another order."""
    if "tensor_meta" not in owner.meta:  # several results, each with memory of its own
        return False
    mine, other = owner.meta["tensor_meta"], view.meta["tensor_meta"]
    return (mine.shape, mine.stride, mine.dtype) == (other.shape, other.stride, other.dtype)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two views of the same memory have a value in common."""
    begins = [t.storage_offset() for t in (one, other)]
    lengths = [sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in (one, other)]
    ends = [begin + length + 1 for begin, length in zip(begins, lengths, strict=True)]
    low = min(begins)
    if max(begins) >= min(ends):
        return False
    memory = torch.zeros(max(ends) - low, dtype=torch.bool)
    first, second = (memory.as_strided(t.shape, t.stride(), t.storage_offset() - low) for t in (one, other))
    first.fill_(True)
    return bool(second.any())


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
