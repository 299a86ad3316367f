"""Several runs in one process on one device, taking turns.

A GPU computes long after its host has asked it to, so runs need no processes of their own to share it: one thread each
and one of them at work at a time, which hands over between the steps that it launches and whenever it waits for the
device. Nothing ever happens at the same time on the host, so nothing needs to be safe for threads, and every run
computes what it computes alone, bit for bit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

_MINE = threading.local()


class Turns:
    """A lock that goes round: who has waited longest is next."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False
        self.stopped = False

    @contextmanager
    def joined(self, device: torch.device) -> Iterator[None]:
        """This thread takes turns with the others from now on, with a CUDA stream of its own."""
        self._take()
        _MINE.turns = self
        try:
            self.check()
            with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
                yield
        finally:
            _MINE.turns = None
            self._give()

    def stop(self) -> None:
        """End all threads, each at its next turn."""
        self.stopped = True

    @contextmanager
    def away(self) -> Iterator[None]:
        """Others may go on while this thread waits for something."""
        self._give()
        try:
            yield
        finally:
            self._take()
            self.check()

    def hand_over(self) -> None:
        """Let the others go first, if any is waiting."""
        self.check()
        if self._waiting:
            with self.away():
                pass

    def check(self) -> None:
        """End here if the threads are to end."""
        if self.stopped:
            raise KeyboardInterrupt

    def _take(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()  # until the turn is given to this thread

    def _give(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


def my_turns() -> Turns | None:
    """Those that this thread takes, if it shares the device with others of this process."""
    return getattr(_MINE, "turns", None)


def hand_over() -> None:
    """Between two launches: other runs of this process, if there are any, launch theirs."""
    turns = my_turns()
    if turns is not None:
        turns.hand_over()


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what this thread has asked for, while other runs of this process go on."""
    turns = my_turns()
    with nullcontext() if turns is None else turns.away():
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
