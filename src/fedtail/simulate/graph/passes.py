"""The host's half of the graph path: a local run as a list of passes of few different shapes.

Rows of a batch are sorted by group. A recorded pass has fixed sizes, so each group's part is filled up to the next
multiple of ``grain`` with samples of weight zero, which keeps g_h = sum/B exact whatever the sizes of the groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtail.rounds.plan import LocalPlan

MODES = ("joint", "single", "masked")
"""How a step gets its H gradients. ``joint``: one pass, rows sorted by group; ``single``: one pass per group, since
many groups would need too many shapes; ``masked``: one pass, unsorted, H masked sums (samples influence each other)."""


@dataclass(frozen=True)
class Step:
    """The passes of one local step (sizes per group of each), and the groups without a sample in it."""

    passes: tuple[tuple[int, ...], ...]
    absent: tuple[int, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """A local run: what its passes read, in the order they run."""

    steps: tuple[Step, ...]
    rows: np.ndarray
    """(M,) int64 pool index; filling has ~index of a real sample of the same pass."""
    draws: np.ndarray | None
    """(M, 3 or 12) augmentation draws."""
    scales: np.ndarray
    """(M,) float32 factor of each sample's loss in its group's gradient: 1/B or 1/N_h; 0 for filling."""
    shares: np.ndarray
    """(M,) float32 factor in the logged loss: 1/B; 0 for filling."""
    groups: np.ndarray
    """(L,) int64 group of each pass (0 unless one pass per group)."""
    at: np.ndarray
    """(L,) int64 step of each pass."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """What goes to the device."""
        names = ("rows", "scales", "shares", "groups", *(() if self.draws is None else ("draws",)))
        return {name: getattr(self, name) for name in names}

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """What must be recorded."""
        return {sizes for step in self.steps for sizes in step.passes}


def default_grain(batch_size: int) -> int:
    """Sizes are multiples of this: at most 1/32 of a batch, so that filling stays near 2 %."""
    return max(1, batch_size // 32)


def padded(n: int, grain: int) -> int:
    """The size that is recorded for ``n`` samples."""
    return -(-n // grain) * grain


def build_schedule(
    plan: LocalPlan, labels: np.ndarray, groups: np.ndarray, n_groups: int, *, mode: str, grain: int
) -> Schedule:
    """Passes of a local run. labels: of the whole pool; groups: (C,)."""
    order: list[np.ndarray] = []
    draws: list[np.ndarray] = []
    scales: list[np.ndarray] = []
    shares: list[np.ndarray] = []
    steps, pass_groups, at = [], [], []
    for i, batch in enumerate(plan.batches):
        member = groups[labels[batch]]
        counts = np.bincount(member, minlength=n_groups)
        factor = np.full(n_groups, 1.0 / len(batch))[member]
        if mode == "masked":
            parts = [np.arange(len(batch))]
        else:
            parts = np.split(np.argsort(member, kind="stable"), np.cumsum(counts)[:-1])
        sizes = []
        for mine in parts:
            size = padded(len(mine), grain)
            sizes.append(size)
            if size:
                fill = np.full(size - len(mine), mine[0])
                order += [batch[mine], ~batch[fill]]
                scales += [factor[mine], np.zeros(len(fill))]
                shares += [np.full(len(mine), 1.0 / len(batch)), np.zeros(len(fill))]
                if plan.draws is not None:
                    draws.append(plan.draws[i][np.concatenate([mine, fill])])
        present = [h for h, n in enumerate(sizes) if n]
        if mode == "single":
            steps.append(Step(tuple((sizes[h],) for h in present), tuple(np.flatnonzero(counts == 0).tolist())))
            pass_groups += present
            at += [i] * len(present)
        else:
            steps.append(Step((tuple(sizes),)))
            pass_groups.append(0)
            at.append(i)
    return Schedule(
        steps=tuple(steps),
        rows=np.concatenate(order).astype(np.int64),
        draws=None if plan.draws is None else np.concatenate(draws),
        scales=np.concatenate(scales).astype(np.float32),
        shares=np.concatenate(shares).astype(np.float32),
        groups=np.asarray(pass_groups, dtype=np.int64),
        at=np.asarray(at, dtype=np.int64),
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
