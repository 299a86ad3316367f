"""The host's half of the graph path: a local run as a list of forward/backward passes of few different sizes.

A batch is cut by group, and each group's part becomes one pass on its own samples, so a step costs what a plain step
costs (SPEC 1.2). A recorded pass has a fixed size; parts are filled up to the next multiple of ``grain`` with
samples of weight zero, which keeps g_h = sum/B exact, whatever the sizes of the groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtail.engines.local import LocalPlan


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass over ``size`` rows, for one group (or all of them, when not cut)."""

    track: int
    group: int
    size: int


@dataclass(frozen=True)
class Track:
    """What the passes of one track read, in the order they run."""

    rows: np.ndarray
    """(M,) int64 pool index; filling has ~index of a real sample of the same pass."""
    draws: np.ndarray | None
    """(M, 3) augmentation draws."""
    scales: np.ndarray
    """(L, W) float32: factors of each pass's loss sums; W = 1 when batches are cut by group, else H."""
    shares: np.ndarray
    """(L,) float32: 1 / batch length, for the logged mean loss."""
    groups: np.ndarray
    """(L,) int64 group of each pass."""
    steps: np.ndarray
    """(L,) int64 step of each pass."""


@dataclass(frozen=True)
class Schedule:
    """A local run: per step its passes, and the groups that have no sample in it."""

    tracks: tuple[Track, ...]
    steps: tuple[tuple[tuple[Pass, ...], tuple[int, ...]], ...]

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """The (track, size) pairs that must be recorded."""
        return {(p.track, p.size) for passes, _ in self.steps for p in passes}


def default_grain(batch_size: int, n_groups: int) -> int:
    """Sizes are multiples of this: at most 1/32 of a batch, so that filling stays near 2 %."""
    return max(2, batch_size // 32) if n_groups > 1 else 2


def padded(n: int, grain: int) -> int:
    """The size that is recorded for ``n`` samples."""
    return -(-n // grain) * grain


def build_schedule(
    plan: LocalPlan,
    labels: np.ndarray,
    groups: np.ndarray,
    n_groups: int,
    *,
    split: bool,
    scale: str,
    grain: int,
    n_tracks: int,
) -> Schedule:
    """Passes of a local run. labels: of the whole pool; groups: (C,).

    With ``split`` group h runs on track h modulo ``n_tracks``; otherwise a step is one pass with H masked sums.
    """
    rows: list[list[np.ndarray]] = [[] for _ in range(n_tracks)]
    draws: list[list[np.ndarray]] = [[] for _ in range(n_tracks)]
    scales: list[list[list[float]]] = [[] for _ in range(n_tracks)]
    shares: list[list[float]] = [[] for _ in range(n_tracks)]
    order: list[list[int]] = [[] for _ in range(n_tracks)]
    at: list[list[int]] = [[] for _ in range(n_tracks)]
    steps = []
    for i, batch in enumerate(plan.batches):
        member = groups[labels[batch]]
        counts = np.bincount(member, minlength=n_groups)
        share = [1.0 / (len(batch) if scale == "batch" else max(int(c), 1)) for c in counts]
        passes, absent = [], []
        for h in range(n_groups) if split else (0,):
            mine = np.flatnonzero(member == h) if split else np.arange(len(batch))
            if not len(mine):
                absent.append(h)
                continue
            t, size = h % n_tracks, padded(len(mine), grain)
            fill = size - len(mine)
            rows[t] += [batch[mine], np.full(fill, ~batch[mine[0]])]
            if plan.draws is not None:
                draws[t].append(plan.draws[i][np.concatenate([mine, np.full(fill, mine[0], dtype=mine.dtype)])])
            scales[t].append([share[h]] if split else share)
            shares[t].append(1.0 / len(batch))
            order[t].append(h)
            at[t].append(i)
            passes.append(Pass(t, h, size))
        steps.append((tuple(passes), tuple(absent)))
    width = 1 if split else n_groups
    return Schedule(
        tuple(
            Track(
                np.concatenate(rows[t]).astype(np.int64) if rows[t] else np.empty(0, dtype=np.int64),
                None if plan.draws is None else np.concatenate([np.empty((0, 3), dtype=np.int64), *draws[t]]),
                np.asarray(scales[t], dtype=np.float32).reshape(-1, width),
                np.asarray(shares[t], dtype=np.float32),
                np.asarray(order[t], dtype=np.int64),
                np.asarray(at[t], dtype=np.int64),
            )
            for t in range(n_tracks)
        ),
        tuple(steps),
    )


def assign(lengths: list[int], n_lanes: int) -> list[list[int]]:
    """Runs to lanes: longest first, always to the lane with the least work (ties: the lower lane)."""
    lanes: list[list[int]] = [[] for _ in range(n_lanes)]
    load = [0] * n_lanes
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        lane = load.index(min(load))
        lanes[lane].append(i)
        load[lane] += lengths[i]
    return lanes
