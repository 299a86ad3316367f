from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtail.rates.tree import BoxTree


@st.composite
def grown_trees(draw: st.DrawFn) -> BoxTree:
    k = draw(st.integers(1, 4))
    tree = BoxTree(np.full(k, 0.4), np.full(k, 0.8))
    for _ in range(draw(st.integers(0, 6))):
        leaves = np.flatnonzero(tree.is_leaf())
        leaf = int(leaves[draw(st.integers(0, len(leaves) - 1))])
        axes = draw(st.sets(st.integers(0, k - 1), min_size=1))
        tree.split(leaf, tuple(sorted(axes)))
    return tree


@given(grown_trees(), st.integers(0, 2**32 - 1))
def test_leaves_partition_the_root_box(tree: BoxTree, seed: int) -> None:
    leaf = tree.is_leaf()
    volume = (tree.high - tree.low).prod(axis=1)
    np.testing.assert_allclose(volume[leaf].sum(), volume[0])
    points = np.random.default_rng(seed).uniform(0.4, 0.8, (50, tree.n_axes))
    inside = ((points[:, None] >= tree.low[leaf]) & (points[:, None] < tree.high[leaf])).all(axis=-1)
    np.testing.assert_array_equal(inside.sum(axis=1), 1)


@given(grown_trees())
def test_every_box_has_positive_width_and_lies_in_its_parent(tree: BoxTree) -> None:
    assert (tree.high > tree.low).all()
    for node in range(1, len(tree)):
        parent = tree.parent[node]
        assert (tree.low[node] >= tree.low[parent]).all() and (tree.high[node] <= tree.high[parent]).all()
        np.testing.assert_allclose(tree.high[node] - tree.low[node], 0.4 / 2.0 ** tree.level[node])


@given(grown_trees())
def test_a_tree_is_rebuilt_from_its_splits(tree: BoxTree) -> None:
    copy = BoxTree(tree.low[0], tree.high[0])
    copy.load_state(tree.state())
    np.testing.assert_array_equal(copy.low, tree.low)
    np.testing.assert_array_equal(copy.high, tree.high)
    np.testing.assert_array_equal(copy.parent, tree.parent)


def test_probes_are_the_centres_of_the_halves() -> None:
    tree = BoxTree(np.zeros(2), np.ones(2))
    children = tree.split(0, (0, 1))
    np.testing.assert_array_equal(tree.probes(0), [[0.25, 0.75]] * 2)
    np.testing.assert_array_equal(tree.centre(int(children[2])), [0.25, 0.75])  # bit 1 set: upper half of axis 1
    assert tree.path(int(children[2])) == [3, 0] and tree.depth(3) == 1


def test_a_box_is_split_once() -> None:
    tree = BoxTree(np.zeros(1), np.ones(1))
    tree.split(0, (0,))
    with pytest.raises(ValueError, match="already has children"):
        tree.split(0, (0,))
