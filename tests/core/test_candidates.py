from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fedtail.core.candidates import binary_candidates, binary_patterns, uniform_candidates


def make(k: int, n: int, seed: int = 0) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    weights = np.random.default_rng(seed).dirichlet(np.ones(k))
    return torch.randn(n, generator=g), weights, torch.randn(k, 2, n, generator=g)


def direct(x: torch.Tensor, weights: np.ndarray, deltas: torch.Tensor, s: int) -> torch.Tensor:
    total = x.double()
    for k, a in enumerate(weights):
        total = total + float(a) * deltas[k, (s >> k) & 1].double()
    return total.float()


@given(st.integers(1, 10), st.integers(0, 1000))
def test_the_gray_code_walk_visits_every_candidate_once_and_equals_the_direct_sum(k: int, seed: int) -> None:
    x, weights, deltas = make(k, 17, seed)
    candidates = binary_candidates(x, weights, deltas, np.arange(k), k)
    seen = set()
    for s, vector in candidates.walk():
        seen.add(s)
        expected = direct(x, weights, deltas, s)
        assert float((vector - expected).abs().max()) <= 1e-5
        if s % 37 == 0:
            assert float((candidates.model(s) - expected).abs().max()) <= 1e-6
    assert seen == set(range(2**k))


@pytest.mark.parametrize("k", [1, 3, 6])
def test_neighbours_on_the_walk_differ_in_one_direction(k: int) -> None:
    x, weights, deltas = make(k, 4)
    order = [s for s, _ in binary_candidates(x, weights, deltas, np.arange(k), k).walk()]
    assert all((a ^ b).bit_count() == 1 for a, b in pairwise(order))


def test_identical_probes_make_all_candidates_the_plain_average() -> None:
    x, weights, deltas = make(4, 30)
    deltas[:, 1] = deltas[:, 0]
    candidates = binary_candidates(x, weights, deltas, np.arange(4), 4)
    for _, vector in candidates.walk():
        assert torch.equal(vector, candidates.model(0))


def test_clients_of_one_axis_move_together_and_an_empty_axis_does_not_move() -> None:
    x, weights, deltas = make(4, 12)
    candidates = binary_candidates(x, weights, deltas, np.array([0, 2, 0, 2]), 3)
    assert len(candidates) == 8 and not candidates.directions[1].any()
    expected = direct(x, weights, deltas, 0b0101)
    torch.testing.assert_close(candidates.model(0b001), expected, atol=1e-5, rtol=0)
    assert torch.equal(candidates.model(0b001), candidates.model(0b011))


@given(st.integers(1, 5), st.integers(1, 4))
def test_uniform_candidates_take_one_probe_everywhere(p: int, k: int) -> None:
    g = torch.Generator().manual_seed(p)
    x, deltas = torch.randn(9, generator=g), [torch.randn(p, 9, generator=g) for _ in range(k)]
    weights = np.full(k, 1 / k)
    candidates = uniform_candidates(x, weights, deltas)
    assert len(candidates) == p
    for s, vector in candidates.walk():
        expected = x + sum(d[s] for d in deltas) / k
        torch.testing.assert_close(vector, expected, atol=1e-5, rtol=0)


def test_patterns_have_bit_a_in_column_a() -> None:
    np.testing.assert_array_equal(binary_patterns(2), [[0, 0], [1, 0], [0, 1], [1, 1]])


class Allocations(TorchDispatchMode):
    """Tracks bytes of live tensors that operations create (views count once, with their storage)."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self.seen = {t.untyped_storage()._cdata for t in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._track(tensor.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)

        def freed() -> None:
            self.live -= size
            self.seen.discard(key)

        weakref.finalize(storage, freed)


@pytest.mark.parametrize("k", [5, 10])
def test_all_candidates_need_memory_for_k_plus_a_few_vectors(k: int) -> None:
    """2^10 models at the cost of 10 directions, a base, a buffer and temporaries in float64."""
    n = 10_000
    x, weights, deltas = make(k, n)
    with Allocations(x, deltas) as memory:
        for _, vector in binary_candidates(x, weights, list(deltas), np.arange(k), k).walk():
            vector.sum()
    assert k <= memory.peak / (4 * n) <= k + 8


def test_the_count_of_allocations_sees_candidates_that_are_kept() -> None:
    x, weights, deltas = make(5, 10_000)
    candidates = binary_candidates(x, weights, deltas, np.arange(5), 5)
    with Allocations(x, deltas, candidates.base, candidates.directions) as memory:
        kept = [vector.clone() for _, vector in candidates.walk()]
    assert len(kept) == 32 and 32 <= memory.peak / 40_000 <= 35


@pytest.mark.parametrize("n_axes", [1, 3, 5])
def test_one_candidate_alone_has_the_bits_it_has_in_the_walk(n_axes: int) -> None:
    rng = torch.Generator().manual_seed(n_axes)
    x = torch.randn(50, generator=rng)
    deltas = [torch.randn(2, 50, generator=rng) for _ in range(n_axes)]
    made = binary_candidates(x, np.full(n_axes, 1 / n_axes), deltas, np.arange(n_axes), n_axes)
    for s, vector in made.walk():
        assert torch.equal(made.vector(s), vector)
