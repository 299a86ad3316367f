"""Weight gradients beside the backward pass: nothing waits for them until the update.

A recorded pass of few samples is a chain of kernels that do not fill a GPU, and half of the chain's backward part are
weight gradients, one per layer and group. On streams of their own they become branches of the recorded graph, so that
the chain is half as long.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any, TypeVar

import torch
from torch import Tensor

STREAMS = 2
T = TypeVar("T")


class Aside:
    """Calls work on a side stream after what has been launched so far, in turn on each of several; without a GPU,
    plainly."""

    def __init__(self, device: torch.device | None = None) -> None:
        cuda = device is not None and device.type == "cuda"
        self.streams = [torch.cuda.Stream(device) for _ in range(STREAMS)] if cuda else []
        self._next = cycle(self.streams)
        self._begun: set[torch.cuda.Stream] = set()
        self._held: list[Any] = []
        """What the work reads: memory must not go to others before it is done."""
        self.kernels = False
        """Whether our own kernels may take the place of libraries."""
        self.places: list[dict[str, Tensor]] = []
        """Where weight gradients of each group are wanted, by name; empty if anywhere."""

    def __call__(self, work: Callable[..., T], *reads: Tensor) -> T:
        if not self.streams:
            return work(*reads)
        side = next(self._next)
        side.wait_stream(torch.cuda.current_stream(side.device))
        self._begun.add(side)
        self._held.append(reads)
        with torch.cuda.stream(side):
            return work(*reads)

    def join(self) -> None:
        """What is launched from here on comes after all work aside."""
        for side in self._begun:
            torch.cuda.current_stream(side.device).wait_stream(side)
        self._begun.clear()
        self._held.clear()
