"""The host's half of the graph path: a local run as a list of passes of few different shapes.

Rows of a batch are sorted by group where the network keeps groups apart. A recorded pass has fixed sizes, so each
group's part is filled up to the next multiple of ``grain`` with samples of weight zero, which keeps g_h = sum/B exact
whatever the sizes of the groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtail.rounds.plan import LocalPlan

GROUPS_APART = 2
"""Most groups that rows are sorted by: of more, there would be too many shapes."""


@dataclass(frozen=True)
class Schedule:
    """A local run: what its passes read, one for each step, in the order they run."""

    passes: tuple[tuple[int, ...], ...]
    """Rows of each group, or of all groups together, in each."""
    rows: np.ndarray
    """(M,) int64 pool index; filling has ~index of a real sample of the same pass."""
    draws: np.ndarray | None
    """(M, 3 or 12) augmentation draws."""
    scales: np.ndarray
    """(M,) float32 factor of each sample's loss, 1/B; 0 for filling."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that go to the device."""
        drawn = {} if self.draws is None else {"draws": self.draws}
        return {"rows": self.rows, "scales": self.scales, **drawn}


def default_grain(batch_size: int) -> int:
    """Sizes are multiples of this: at most 1/32 of a batch, so that filling stays near 2 %."""
    return max(1, batch_size // 32)


def padded(n: int, grain: int) -> int:
    """The size that is recorded for ``n`` samples."""
    return -(-n // grain) * grain


def build_schedule(
    plan: LocalPlan, labels: np.ndarray, groups: np.ndarray, n_groups: int, *, apart: bool, grain: int
) -> Schedule:
    """Passes of a local run. labels: of the whole pool; groups: (C,); apart: whether rows are sorted by group."""
    order: list[np.ndarray] = []
    draws: list[np.ndarray] = []
    scales: list[np.ndarray] = []
    passes = []
    for i, batch in enumerate(plan.batches):
        member = groups[labels[batch]] if apart else np.zeros(len(batch), dtype=np.int64)
        counts = np.bincount(member, minlength=n_groups if apart else 1)
        parts = np.split(np.argsort(member, kind="stable"), np.cumsum(counts)[:-1])
        sizes = []
        for part in parts:
            size = padded(len(part), grain)
            sizes.append(size)
            if size:
                fill = np.full(size - len(part), part[0])
                order += [batch[part], ~batch[fill]]
                scales += [np.full(len(part), 1.0 / len(batch)), np.zeros(len(fill))]
                if plan.draws is not None:
                    draws.append(plan.draws[i][np.concatenate([part, fill])])
        passes.append(tuple(sizes))
    return Schedule(
        passes=tuple(passes),
        rows=np.concatenate(order).astype(np.int64),
        draws=None if plan.draws is None else np.concatenate(draws),
        scales=np.concatenate(scales).astype(np.float32),
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
