"""A lane: one client's local run at a time on static device buffers, so that its passes can be recorded and replayed.

On CUDA every (track, size) is one CUDA graph that reads its rows at a device-side cursor; the host only decides
which graph comes next. Lanes run on streams of their own, without waiting for each other, so clients of different
length need no masks. On the CPU the same functions are simply called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.engines.simulator.kernels import symbolic_rows
from fedtail.engines.simulator.passes import Schedule
from fedtail.methods.base import LocalRun


@dataclass
class Slot:
    """One local run: a client and a probe."""

    row: int
    probe: int
    run: LocalRun
    hyper: dict[str, float]
    groups: Tensor
    const: Tensors
    state: Tensors
    schedule: Schedule
    tracks: list[dict[str, Tensor]] = field(default_factory=list)
    """``schedule.tracks`` on the device."""
    losses: list[Tensor] = field(default_factory=list)
    """Mean-loss shares of each track's passes, filled by the run."""
    final: Tensors = field(default_factory=dict)
    """Step state after the last step, where the method wants it."""

    @property
    def signature(self) -> tuple[Any, ...]:
        """Runs of equal signature can use the same recorded passes."""
        const, state = (
            tuple(sorted((name, tuple(t.shape), str(t.dtype)) for name, t in part.items()))
            for part in (self.const, self.state)
        )
        return const, state, tuple(sorted(self.hyper))


@dataclass(frozen=True)
class Shared:
    """What all lanes have in common."""

    device: torch.device
    pool_x: Tensor
    pool_y: Tensor
    start: Tensor
    """(n,) the round's global model."""
    n_params: int
    n_groups: int
    split: bool
    n_tracks: int
    stateful: bool
    loss: Callable[..., tuple[Tensor, Tensor, Tensors]]
    update: Callable[..., None]
    capacity: tuple[int, int]
    """Rows and passes of the longest run that fits."""
    augmented: bool
    compiled: bool
    warm: set[Any]
    """Sizes that have run once outside a recording: libraries have made their plans for them."""


class TrackBuffers:
    """Static inputs of the passes of one track, its stream and its recorded graphs."""

    def __init__(self, shared: Shared) -> None:
        rows, passes = shared.capacity
        device = shared.device
        width = 1 if shared.split else shared.n_groups
        self.rows = torch.zeros(rows, dtype=torch.int64, device=device)
        self.draws = torch.full((rows, 3), 4, dtype=torch.int64, device=device) if shared.augmented else None
        self.scales = torch.zeros(passes, width, device=device)
        self.shares = torch.zeros(passes, device=device)
        self.groups = torch.zeros(passes, dtype=torch.int64, device=device)
        self.losses = torch.zeros(passes, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.offsets = torch.arange(rows, device=device)
        cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if cuda else None
        self.memory = torch.cuda.graph_pool_handle() if cuda else None
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.done = torch.cuda.Event() if cuda else None

    def load(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            getattr(self, name)[: len(value)].copy_(value)
        self.cursor.zero_()
        self.counter.zero_()


class Lane:
    """Buffers for one local run, and the recorded passes that work on them."""

    def __init__(self, shared: Shared, example: Slot) -> None:
        self.shared = shared
        d = shared.n_params
        self.vector = shared.start.clone()
        self.params = self.vector[:d]
        self.leaf = self.params.detach().requires_grad_()
        self.rest = self.vector[d:]
        self.grads = torch.zeros(shared.n_groups, d, device=shared.device)
        self.groups = example.groups.clone()
        self.const = {k: v.clone() for k, v in example.const.items()}
        self.state = {k: v.clone() for k, v in example.state.items()}
        self.hyper = {k: torch.zeros((), device=shared.device) for k in example.hyper}
        self.tracks = [TrackBuffers(shared) for _ in range(shared.n_tracks)]
        self.step_graph: torch.cuda.CUDAGraph | None = None

    # -- device work: everything below touches static buffers only, so that it can be recorded --------

    def run_pass(self, t: int, size: int) -> None:
        """Forward and backward over the next ``size`` rows of a track; the gradient goes to ``grads``."""
        s, track = self.shared, self.tracks[t]
        here = track.cursor + track.offsets[:size]
        rows = track.rows.index_select(0, here)
        draws = None if track.draws is None else track.draws.index_select(0, here)
        scale = track.scales.index_select(0, track.counter).squeeze(0)
        if s.compiled:
            symbolic_rows(rows, draws)
        sums, total, state = s.loss(
            self.leaf, self.rest, s.start, s.pool_x, s.pool_y, rows, draws, scale, self.groups, self.const,
            self.state if s.stateful else {},
        )  # fmt: skip
        parts = sums.unbind()
        with torch.no_grad():
            if s.split:
                (flat,) = torch.autograd.grad(parts[0], self.leaf)
                if s.n_groups <= s.n_tracks:
                    self.grads[t].copy_(flat)
                else:
                    self.grads.index_copy_(0, track.groups.index_select(0, track.counter), flat.unsqueeze(0))
            else:
                for h in range(s.n_groups):
                    (flat,) = torch.autograd.grad(parts[h], self.leaf, retain_graph=h < s.n_groups - 1)
                    self.grads[h].copy_(flat)
            for name, value in state.items():
                if value is not self.state[name]:
                    self.state[name].copy_(value)
            track.losses.index_copy_(0, track.counter, total.reshape(1) * track.shares.index_select(0, track.counter))
            track.cursor.add_(size)
            track.counter.add_(1)

    @torch.no_grad()
    def run_update(self) -> None:
        s = self.shared
        self.shared.update(self.params, s.start[: s.n_params], self.grads, self.const, self.state, self.hyper)

    # -- recording -----------------------------------------------------------------------------------

    def record(self, sizes: set[tuple[int, int]]) -> int:
        """Record the passes that are missing; returns how many were."""
        if self.shared.device.type != "cuda":
            return 0
        missing = [(t, n) for t, n in sorted(sizes, key=lambda p: (-p[1], p[0])) if n not in self.tracks[t].graphs]
        for t, n in missing:
            track = self.tracks[t]
            track.graphs[n] = self._record(track, partial(self.run_pass, t, n), ("pass", n))
            track.cursor.zero_()
            track.counter.zero_()
        if self.step_graph is None:
            self.step_graph = self._record(self.tracks[0], self.run_update, "update")
        return len(missing)

    def _record(self, track: TrackBuffers, work: Callable[[], None], key: Any) -> torch.cuda.CUDAGraph:
        warm = self.shared.warm
        stream = track.stream
        assert stream is not None
        torch.cuda.synchronize(self.shared.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            if key not in warm:
                for _ in range(2):
                    track.cursor.zero_()
                    track.counter.zero_()
                    work()
                warm.add(key)
                stream.synchronize()
            track.cursor.zero_()
            track.counter.zero_()
            stream.synchronize()
            graph.capture_begin(pool=track.memory)
            work()
            graph.capture_end()
        torch.cuda.synchronize(self.shared.device)
        return graph

    # -- running -------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, slot: Slot) -> None:
        """Set every buffer for a run from the global model."""
        self.vector.copy_(self.shared.start)
        self.groups.copy_(slot.groups)
        for mine, given in ((self.const, slot.const), (self.state, slot.state)):
            for name, value in given.items():
                mine[name].copy_(value)
        for name, number in slot.hyper.items():
            self.hyper[name].fill_(number)
        for buffers, values in zip(self.tracks, slot.tracks, strict=True):
            buffers.load(values)

    def run(self, slots: list[Slot], out: Tensor, keep_state: bool) -> Iterator[None]:
        """Launch the local runs one step per ``next``; deltas go to ``out`` (S, P, n)."""
        for slot in slots:
            with self._main():
                self.load(slot)
            for passes, absent in slot.schedule.steps:
                self._step(passes, absent)
                yield
            with self._main(), torch.no_grad():
                torch.sub(self.vector, self.shared.start, out=out[slot.row, slot.probe])
                slot.losses = [
                    b.losses[: len(t.steps)].clone() for b, t in zip(self.tracks, slot.schedule.tracks, strict=True)
                ]
                if keep_state:
                    slot.final = {k: v.clone() for k, v in self.state.items()}

    def _main(self) -> Any:
        return torch.cuda.stream(self.tracks[0].stream)

    def _step(self, passes: tuple[Any, ...], absent: tuple[int, ...]) -> None:
        if self.shared.device.type != "cuda":
            for h in absent:
                self.grads[h].zero_()
            for p in passes:
                self.run_pass(p.track, p.size)
            self.run_update()
            return
        main = self.tracks[0]
        assert main.stream is not None and main.done is not None and self.step_graph is not None
        used = {p.track for p in passes} - {0}
        if used:
            main.done.record(main.stream)
            for t in used:
                stream = self.tracks[t].stream
                assert stream is not None
                stream.wait_event(main.done)
        for p in passes:
            track = self.tracks[p.track]
            with torch.cuda.stream(track.stream):
                track.graphs[p.size].replay()
        with torch.cuda.stream(main.stream):
            for h in absent:
                self.grads[h].zero_()
            for t in used:
                other = self.tracks[t]
                assert other.done is not None and other.stream is not None
                other.done.record(other.stream)
                main.stream.wait_event(other.done)
            self.step_graph.replay()
