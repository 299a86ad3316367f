"""A stream with memory of its own, on which work is recorded once and replayed; the CPU has nothing to record.

A recorded pass of few samples is a chain of kernels that do not fill a GPU, and half of the chain's backward part are
weight gradients, one per layer and group, for which nothing waits until the update. On streams of their own (``Aside``)
they become branches of the recorded graph, so that the chain is half as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any, TypeVar

import torch
from torch import Tensor


class Recorder:
    """``stream`` is None without a GPU, where work is called instead."""

    def __init__(self, device: torch.device, priority: int = 0, *, draws: bool = False) -> None:
        """``draws``: whether the work takes random numbers, which ``seed`` settles."""
        self.device, cuda = device, device.type == "cuda"
        self.stream = torch.cuda.Stream(device, priority=priority) if cuda else None
        self._memory = torch.cuda.graph_pool_handle() if cuda else None
        self._generator = self._default().clone_state() if cuda and draws else None
        """Recorded draws read a generator's state at its place on the device, and streams that share one would change
        it under each other's feet."""

    def on(self) -> Any:
        """Send work launched inside to the stream."""
        return torch.cuda.stream(self.stream)

    def follow(self) -> None:
        """Have the stream's further work wait for what the caller has launched."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def lead(self) -> None:
        """Have the caller's further work wait for the stream's."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def seed(self, seed: int) -> None:
        """Make further draws follow from the seed, whatever was drawn or recorded before."""
        if self._generator is None:
            torch.manual_seed(seed)
        else:
            self._generator.manual_seed(seed)

    def _default(self) -> torch.Generator:
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        return torch.cuda.default_generators[index]

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Have calls and recordings inside draw from this recorder's generator."""
        if self._generator is None:
            yield
            return
        default = self._default()
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(self._generator)
        try:
            yield
        finally:
            default.graphsafe_set_state(before)

    def record(self, work: Callable[[], Any], rewind: Callable[[], None], rehearsals: int = 2) -> torch.cuda.CUDAGraph:
        """``work`` as a graph, rehearsed so that libraries have made their plans. It must not make memory of its own
        that is read later. ``rewind`` undoes what a call has moved."""
        assert self.stream is not None
        self.follow()
        graph = torch.cuda.CUDAGraph()
        with self.on(), self._own_draws():
            for _ in range(rehearsals):
                rewind()
                work()
            rewind()
            self.stream.synchronize()
            graph.capture_begin(pool=self._memory)
            work()
            graph.capture_end()
        self.lead()
        return graph


STREAMS = 2
T = TypeVar("T")


class SideStreams:
    """Calls work on a side stream after what has been launched so far, in turn on each of several; without a GPU,
    plainly.

    Every stream has side streams of its own: libraries keep scratch memory for each stream, which recordings of two
    lanes would share when they are replayed at the same time.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._beside: dict[torch.cuda.Stream, cycle[torch.cuda.Stream]] = {}
        self._begun: set[torch.cuda.Stream] = set()
        self._held: list[Any] = []
        """What the work reads: memory must not go to others before it is done."""
        self.kernels = False
        """Whether our own kernels may take the place of libraries."""
        self.places: list[dict[str, Tensor]] = []
        """Where weight gradients of each group are wanted, by name; empty if anywhere."""

    def __call__(self, work: Callable[..., T], *reads: Tensor) -> T:
        if self._device is None:
            return work(*reads)
        current = torch.cuda.current_stream(self._device)
        if current not in self._beside:
            self._beside[current] = cycle([torch.cuda.Stream(self._device) for _ in range(STREAMS)])
        side = next(self._beside[current])
        side.wait_stream(current)
        self._begun.add(side)
        self._held.append(reads)
        with torch.cuda.stream(side):
            return work(*reads)

    def join(self) -> None:
        """Have further work wait for all work on side streams."""
        for side in self._begun:
            torch.cuda.current_stream(side.device).wait_stream(side)
        self._begun.clear()
        self._held.clear()
