"""A local run as passes: every sample of every batch once, in its group, with the right weight."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedtail.engines.local import LocalPlan
from fedtail.engines.simulator.passes import assign, build_schedule, default_grain, padded


@given(
    st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.booleans(),
    st.sampled_from(["batch", "group"]),
)  # fmt: skip
def test_passes_hold_every_sample_once_and_filling_has_no_weight(
    seed: int, n_groups: int, n_tracks: int, grain: int, split: bool, scale: str
) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 6, size=50)
    groups = rng.integers(0, n_groups, size=6)
    batches = [rng.choice(50, size=n) for n in (9, 9, 4)]
    draws = [rng.integers(0, 9, size=(len(b), 3)) for b in batches]
    plan = LocalPlan(batches, draws, np.bincount(labels, minlength=6))
    tracks = n_tracks if split else 1
    schedule = build_schedule(
        plan, labels, groups, n_groups, split=split, scale=scale, grain=grain, n_tracks=tracks
    )  # fmt: skip
    cursors, counters = [0] * tracks, [0] * tracks
    for i, ((passes, absent), batch) in enumerate(zip(schedule.steps, batches, strict=True)):
        seen = []
        for p in passes:
            track, c = schedule.tracks[p.track], counters[p.track]
            here = slice(cursors[p.track], cursors[p.track] + p.size)
            rows, drawn = track.rows[here], track.draws[here]
            real = rows >= 0
            assert p.size % grain == 0 and p.size - real.sum() < grain
            assert set(~rows[~real]) <= set(rows[real])
            seen += [(int(r), *map(int, d)) for r, d in zip(rows[real], drawn[real], strict=True)]
            if split:
                assert set(groups[labels[rows[real]]]) == {p.group} and track.groups[c] == p.group
                size = len(batch) if scale == "batch" else real.sum()
                np.testing.assert_allclose(track.scales[c], [1 / size], rtol=1e-6)
            assert track.steps[c] == i
            np.testing.assert_allclose(track.shares[c], 1 / len(batch), rtol=1e-6)
            cursors[p.track] += p.size
            counters[p.track] += 1
        assert sorted(seen) == sorted((int(r), *map(int, d)) for r, d in zip(batch, draws[i], strict=True))
        if split:
            assert set(absent) == set(range(n_groups)) - set(groups[labels[batch]])


@given(st.integers(1, 500), st.sampled_from([16, 32, 64, 128, 256]))
def test_filling_costs_less_than_a_thirty_second_of_a_batch_per_group(n: int, batch_size: int) -> None:
    grain = default_grain(batch_size, 2)
    assert n <= padded(n, grain) < n + grain
    assert grain <= max(2, batch_size / 32)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 8))
def test_lanes_share_the_work_evenly(lengths: list[int], n_lanes: int) -> None:
    lanes = assign(lengths, n_lanes)
    assert sorted(i for lane in lanes for i in lane) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in lane) for lane in lanes]
    assert max(loads) - min(loads) <= max(lengths)
