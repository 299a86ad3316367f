"""The tree of boxes that FedHOO and HOO search: a node is a box, its children halve it along some axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtail.core.candidates import binary_patterns


class BoxTree:
    """Nodes 0, 1, 2 ... in order of creation; node 0 is the root box. The leaves always partition the root.

    Per node: ``low``, ``high`` (A,) bounds; ``level`` (A,) how often each axis was halved; ``parent``.
    """

    def __init__(self, low: np.ndarray, high: np.ndarray) -> None:
        self.low = np.array(low, dtype=np.float64)[None]
        self.high = np.array(high, dtype=np.float64)[None]
        self.level = np.zeros((1, len(low)), dtype=np.int64)
        self.parent = np.array([-1])
        self.expansions: list[tuple[int, tuple[int, ...]]] = []
        """(node, axes it was split along), in order; with the root it says all about the boxes."""
        self._children: dict[int, range] = {}

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def n_axes(self) -> int:
        return int(self.low.shape[1])

    def is_leaf(self) -> np.ndarray:
        """(nodes,) bool."""
        leaf = np.ones(len(self), dtype=bool)
        leaf[list(self._children)] = False
        return leaf

    def depth(self, node: int) -> int:
        """Halvings that every axis has had; below a round with missing clients, axes may differ."""
        return int(self.level[node].min())

    def children(self, node: int) -> np.ndarray:
        """Indices of a node's children, empty for a leaf; bit j of a child's position is its half along the
        j-th axis of the split."""
        return np.array(self._children.get(node, range(0)), dtype=np.int64)

    def path(self, node: int) -> list[int]:
        """The node, its parent, ... up to the root."""
        nodes = [node]
        while self.parent[nodes[-1]] >= 0:
            nodes.append(int(self.parent[nodes[-1]]))
        return nodes

    def centre(self, node: int) -> np.ndarray:
        """(A,)."""
        return np.asarray((self.low[node] + self.high[node]) / 2)

    def probes(self, node: int) -> np.ndarray:
        """(A, 2) quarter points (3L+U)/4 and (L+3U)/4: the centres of the two halves along each axis."""
        low, high = self.low[node], self.high[node]
        return np.stack([(3 * low + high) / 4, (low + 3 * high) / 4], axis=1)

    def split(self, node: int, axes: np.ndarray | tuple[int, ...]) -> np.ndarray:
        """Halve a leaf along ``axes`` (all others keep their interval); returns the 2^len(axes) children.

        The paper's formula for the child box gives back the parent, reversed where s_k = 1. A child
        takes the lower half [L, (L+U)/2] along axes with bit 0 and the upper half along axes with bit 1, as in
        the paper's worked example.
        """
        axes = np.asarray(axes, dtype=np.int64)
        if node in self._children or axes.size == 0:
            raise ValueError(f"node {node} already has children, or nothing to split on")
        bits = binary_patterns(len(axes)).astype(bool)
        low, high = np.repeat(self.low[node][None], len(bits), 0), np.repeat(self.high[node][None], len(bits), 0)
        middle = self.centre(node)[axes]
        low[:, axes] = np.where(bits, middle, low[:, axes])
        high[:, axes] = np.where(bits, high[:, axes], middle)
        level = np.repeat(self.level[node][None], len(bits), 0)
        level[:, axes] += 1
        first = len(self)
        self.low, self.high = np.concatenate([self.low, low]), np.concatenate([self.high, high])
        self.level = np.concatenate([self.level, level])
        self.parent = np.concatenate([self.parent, np.full(len(bits), node)])
        self._children[node] = range(first, first + len(bits))
        self.expansions.append((node, tuple(int(a) for a in axes)))
        return self.children(node)

    def state(self) -> list[Any]:
        """JSON; with the root box it rebuilds the tree."""
        return [[node, list(axes)] for node, axes in self.expansions]

    def load_state(self, state: list[Any]) -> None:
        """Inverse of ``state``, for a tree that is still a root."""
        for node, axes in state:
            self.split(int(node), tuple(int(a) for a in axes))
