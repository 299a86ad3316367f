"""A lane: one client's local run at a time on static device buffers, so that its steps can be recorded and replayed.

On CUDA every shape of a pass is one CUDA graph that reads its rows at a device-side cursor; the host only decides
which graph comes next. Lanes run on streams of their own, without waiting for each other, so clients of different
length need no masks. On the CPU the same functions are simply called.

A recorded pass has fixed sizes, so each group's part of a batch, sorted by group where the network keeps groups apart,
is filled up to the next multiple of ``grain`` with samples of weight zero, which keeps g_h = sum/B exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.data.images.augment import PAD
from fedtail.rounds.plan import LocalPlan, PreparedRun
from fedtail.simulate.graph.network import Layout
from fedtail.simulate.graph.recorder import Recorder
from fedtail.simulate.graph.step import Gradients, Local, PassInput, Resident, Sizes, Update

LANE_PRIORITY = -1
"""A lane's kernels go before those of work aside, whose priority is 0: others wait for them."""


@dataclass
class Slot:
    """One local run: a client and a probe. Tensors are on the device and in its layout."""

    run: PreparedRun
    groups: Tensor
    const: Tensors
    state: Tensors
    schedule: Schedule
    plan: dict[str, Tensor]
    """The arrays of ``schedule``."""
    seeds: list[int] | None = None
    """One for each step, where the model takes random numbers (dropout)."""
    losses: Tensor | None = None
    """(E,) mean loss of each step's batch; filled by the run."""
    final: Tensors = field(default_factory=dict)
    """Step state after the last step, where the method wants it."""

    @property
    def signature(self) -> tuple[Any, ...]:
        """Runs of equal signature can use the same recorded passes."""
        const, state = (
            tuple(sorted((name, tuple(t.shape), str(t.dtype)) for name, t in part.items()))
            for part in (self.const, self.state)
        )
        return const, state, tuple(sorted(self.run.hyper))


@dataclass(frozen=True)
class Shared:
    """The common parts of all lanes."""

    resident: Resident
    layout: Layout
    dtype: torch.dtype
    """The type of the weights that passes read."""
    gradients: Gradients
    update: Update
    capacity: tuple[int, int]
    """Rows and steps of the longest run that fits."""
    draws: int
    """Numbers that an augmentation is drawn as; 0 for none."""
    random: bool
    """Whether the model itself takes random numbers."""
    warm: set[Sizes]
    """Shapes that have run once outside a recording: libraries have made their plans for them."""

    @property
    def start(self) -> Tensor:
        return self.resident.start

    @property
    def device(self) -> torch.device:
        return self.start.device


class Lane:
    """Buffers for one local run, and the recorded passes that work on them."""

    def __init__(self, shared: Shared, example: Slot) -> None:
        self.shared = s = shared
        device, d = s.device, s.layout.n_params
        rows, steps = s.capacity
        self.vector = s.start.clone()
        params = self.vector[:d]
        self.local = Local(
            params=params,
            rest=self.vector[d:],
            shadow=None if s.dtype == torch.float32 else params.to(s.dtype),
            groups=example.groups.clone(),
            const={k: v.clone() for k, v in example.const.items()},
            state={k: v.clone() for k, v in example.state.items()},
            hyper={k: torch.zeros((), device=device) for k in example.run.hyper},
        )
        self.plan = {
            "rows": torch.zeros(rows, dtype=torch.int64, device=device),
            "scales": torch.zeros(rows, device=device),
        }
        if s.draws:
            self.plan["draws"] = torch.zeros(rows, s.draws, dtype=torch.int64, device=device)
            self.plan["draws"][:, :2] = PAD
        self.losses = torch.zeros(steps, device=device)
        self.offsets = torch.arange(rows, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)

        self.recorder = Recorder(device, LANE_PRIORITY, draws=s.random)
        self.graphs: dict[Sizes, torch.cuda.CUDAGraph] = {}

    # -- device work: static buffers only, so that it can be recorded ---------------------------------

    def step(self, sizes: Sizes) -> None:
        """One step on the next rows."""
        s, n = self.shared, sum(sizes)
        here = self.cursor + self.offsets[:n]
        given = PassInput(**{k: v.index_select(0, here) for k, v in self.plan.items()})
        grads, loss, state = s.gradients(s.resident, self.local, given, sizes)
        with torch.no_grad():
            for name, value in state.items():
                if value is not self.local.state[name]:
                    self.local.state[name].copy_(value)
            self.losses.index_copy_(0, self.counter, loss.reshape(1))
            s.update(self.local, s.start[: s.layout.n_params], grads)
            self.cursor.add_(n)
            self.counter.add_(1)

    # -- recording ------------------------------------------------------------------------------------

    def record(self, shapes: set[Sizes]) -> int:
        """Record the steps that are missing, largest first; returns how many were."""
        if self.shared.device.type != "cuda":
            return 0
        missing = sorted(shapes - self.graphs.keys(), key=lambda v: (-sum(v), v))
        for shape in missing:
            rehearsals = 0 if shape in self.shared.warm else 2
            self.graphs[shape] = self.recorder.record(partial(self.step, shape), self._rewind, rehearsals)
            self.shared.warm.add(shape)
        return len(missing)

    def _rewind(self) -> None:
        self.cursor.zero_()
        self.counter.zero_()

    # -- running --------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, slot: Slot) -> None:
        """Set every buffer for a run from the global model."""
        local = self.local
        self.vector.copy_(self.shared.start)
        if local.shadow is not None:
            local.shadow.copy_(local.params)
        local.groups.copy_(slot.groups)
        for place, given in ((local.const, slot.const), (local.state, slot.state)):
            for name, value in given.items():
                place[name].copy_(value)
        for name, number in slot.run.hyper.items():
            local.hyper[name].fill_(number)
        for name, value in slot.plan.items():
            self.plan[name][: len(value)].copy_(value)
        self._rewind()

    def run(self, slots: list[Slot], out: Tensor, keep_state: bool) -> Iterator[None]:
        """Launch the local runs one step per ``next``; deltas go to ``out`` (S, P, n), in the server's layout."""
        layout = self.shared.layout
        for slot in slots:
            with self.recorder.on():
                self.load(slot)
            for i, sizes in enumerate(slot.schedule.passes):
                with self.recorder.on():
                    if slot.seeds is not None:
                        self.recorder.seed(slot.seeds[i])
                    if self.graphs:
                        self.graphs[sizes].replay()
                    else:
                        self.step(sizes)
                yield
            with self.recorder.on(), torch.no_grad():
                delta, target = self.vector - self.shared.start, out[slot.run.row, slot.run.probe]
                target[: layout.n_params].copy_(layout.outward(delta[: layout.n_params]))
                target[layout.n_params :].copy_(delta[layout.n_params :])
                slot.losses = self.losses[: len(slot.schedule.passes)].clone()
                if keep_state:
                    slot.final = {k: layout.outward(v).clone() for k, v in self.local.state.items()}


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
    """(M, 3 or more) augmentation draws."""
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
