"""A local run as passes: every sample of every batch once, in its group, with the right weight."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedtail.rounds.plan import LocalPlan
from fedtail.simulate.graph.lane import assign, build_schedule, default_grain, padded


@given(st.integers(0, 10_000), st.integers(1, 2), st.integers(1, 5), st.booleans())
def test_passes_hold_every_sample_once_and_filling_has_no_weight(
    seed: int, n_groups: int, grain: int, apart: bool
) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 6, size=50)
    groups = rng.integers(0, n_groups, size=6)
    batches = [rng.choice(50, size=n) for n in (9, 9, 4)]
    draws = [rng.integers(0, 9, size=(len(b), 3)) for b in batches]
    counts = np.bincount(labels, minlength=6)
    plan = LocalPlan(
        np.concatenate(batches), np.array([len(b) for b in batches]), np.concatenate(draws), counts, counts
    )
    schedule = build_schedule(plan, labels, groups, n_groups, apart=apart, grain=grain)
    cursor = 0
    for passes, batch, drawn in zip(schedule.passes, batches, draws, strict=True):
        assert len(passes) == (n_groups if apart else 1)
        seen = []
        for h, size in enumerate(passes):
            here = slice(cursor, cursor + size)
            cursor += size
            rows, real = schedule.rows[here], schedule.rows[here] >= 0
            assert size % grain == 0 and size - real.sum() < grain
            assert set(~rows[~real]) <= set(rows[real])
            assert not schedule.scales[here][~real].any()
            np.testing.assert_allclose(schedule.scales[here][real], 1 / len(batch), rtol=1e-6)
            assert not apart or (groups[labels[rows[real]]] == h).all()
            seen += [(int(r), *map(int, d)) for r, d in zip(rows[real], schedule.draws[here][real], strict=True)]
        assert sorted(seen) == sorted((int(r), *map(int, d)) for r, d in zip(batch, drawn, strict=True))
    assert cursor == len(schedule.rows)


@given(st.integers(1, 500), st.sampled_from([16, 32, 64, 128, 256]))
def test_filling_costs_less_than_a_thirty_second_of_a_batch_per_group(n: int, batch_size: int) -> None:
    grain = default_grain(batch_size)
    assert n <= padded(n, grain) < n + grain
    assert grain <= max(2, batch_size / 32)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 8))
def test_lanes_share_the_work_evenly(lengths: list[int], n_lanes: int) -> None:
    lanes = assign(lengths, n_lanes)
    assert sorted(i for lane in lanes for i in lane) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in lane) for lane in lanes]
    assert max(loads) - min(loads) <= max(lengths)
