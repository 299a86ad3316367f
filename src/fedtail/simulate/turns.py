"""Several runs in one process on one device, taking turns.

A GPU computes long after its host has asked it to, so runs need no processes of their own to share it: one thread each
and one of them at work at a time, which hands over between the steps that it launches and whenever it waits for the
device. While one run's round is computed, another plans its own, aggregates, writes or evaluates. Nothing ever happens
at the same time on the host, so nothing needs to be safe for threads, and every run computes what it computes alone,
bit for bit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_MINE = threading.local()


class _Line:
    """A lock that goes to who has waited longest."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self.waiting: deque[threading.Lock] = deque()
        self._taken = False

    def take(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self.waiting.append(mine)
        mine.acquire()  # until it is given to this thread

    def give(self) -> None:
        with self._guard:
            if self.waiting:
                self.waiting.popleft().release()
            else:
                self._taken = False


class Turns:
    """The threads of a process that share a device."""

    def __init__(self) -> None:
        self._host, self._launches = _Line(), _Line()
        self._end: torch.cuda.Event | None = None
        """Of the round that was launched last."""
        self.stopped = False

    @contextmanager
    def joined(self, device: torch.device) -> Iterator[None]:
        """This thread takes turns with the others from now on, with a CUDA stream of its own."""
        self._host.take()
        _MINE.turns = self
        try:
            self.check()
            with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
                yield
        finally:
            _MINE.turns = None
            self._host.give()

    def stop(self) -> None:
        """End all threads, each at its next turn."""
        self.stopped = True

    @contextmanager
    def away(self) -> Iterator[None]:
        """Others may go on while this thread waits for something."""
        self._host.give()
        try:
            yield
        finally:
            self._host.take()
            self.check()

    def hand_over(self) -> None:
        """Let the others go first, if any is waiting."""
        self.check()
        if self._host.waiting:
            with self.away():
                pass

    def check(self) -> None:
        """End here if the threads are to end."""
        if self.stopped:
            raise KeyboardInterrupt

    @contextmanager
    def launching(self, device: torch.device) -> Iterator[None]:
        """What is launched inside, a round of local training, comes after the rounds that others have launched.

        One round's clients fill a GPU; those of several runs at once would only take the cache from each other. But
        the next round is launched before the last one ends, so that the device does not wait for the host.
        """
        self._host.give()
        self._launches.take()
        self._host.take()
        try:
            self.check()
            if self._end is not None:
                torch.cuda.current_stream(device).wait_event(self._end)
            yield
            if device.type == "cuda":
                self._end = torch.cuda.current_stream(device).record_event()
        finally:
            self._launches.give()


def my_turns() -> Turns | None:
    """Those that this thread takes, if it shares the device with others of this process."""
    return getattr(_MINE, "turns", None)


def hand_over() -> None:
    """Between two launches: other runs of this process, if there are any, launch theirs."""
    turns = my_turns()
    if turns is not None:
        turns.hand_over()


def launching(device: torch.device) -> AbstractContextManager[None]:
    """Around the launches of a round, in turn with other runs of this process, if there are any."""
    turns = my_turns()
    return nullcontext() if turns is None else turns.launching(device)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what this thread has asked for, while other runs of this process go on."""
    turns = my_turns()
    with nullcontext() if turns is None else turns.away():
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
