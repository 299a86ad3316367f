"""Every core: threads that share the pieces of a round.

Threads and not processes: a captured step is one call that computes without the interpreter's lock (``programs``), so
threads lose nothing to processes, and data, methods and models of the user's own, client states and updates stay where
they are. What a piece of work computes depends on the piece alone, never on the worker, and results come in the order
of the pieces. That makes the bits of a run those of any number of workers.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedtail.cores import usable_cores
from fedtail.models.flat import copy_module

T = TypeVar("T")
R = TypeVar("R")

PAYS, PIECE_PAYS = 2e8, 3e7
"""Operations of all pieces, and of one, below which other threads cost more than they gain: some milliseconds of a
core, and pieces that are mostly Python, which one thread runs at a time."""

MOST = 8
"""Workers that ``auto`` takes at most. Measured on eight cores with two threads each: 1.85 times with two, 3.2 with
four, 4.2 with eight, 4.1 with sixteen (``benchmarks/workers.py``)."""
PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d)
CHEAP = (nn.GroupNorm, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.Embedding)
"""Layers with weights that multiply matrices, and that do not."""


def forward_flops(module: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Multiplications and additions of the products in the forward pass of one sample.

    By the sizes of layers where all that have weights are known; torch's counter, which loads a compiler for it, takes
    others."""
    trial = copy_module(module).eval()  # nothing is drawn, and no statistics are taken
    weighty = [m for m in trial.modules() if next(m.parameters(recurse=False), None) is not None]
    x = torch.zeros(1, *input_shape).to(next(trial.parameters()).device)
    if not all(isinstance(m, (*PRODUCTS, *CHEAP)) for m in weighty):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            trial(x)
        return int(counter.get_total_flops())
    counts: list[int] = []
    for layer in weighty:
        if isinstance(layer, PRODUCTS):
            layer.register_forward_hook(lambda m, _, out: counts.append(2 * out.numel() * m.weight[0].numel()))
    with torch.no_grad():
        trial(x)
    return sum(counts)


class Workers:
    """So many threads, the caller's among them, that take pieces of work as they become free.

    ``auto`` has one for every core, up to ``most``, used them where work is worth it; a number is taken as it is.
    """

    def __init__(self, asked: int | Literal["auto"], most: float = MOST) -> None:
        self.n = int(max(1, min(usable_cores(), most, MOST))) if asked == "auto" else asked
        self.most = 1
        """Workers that were at work at once, so far."""
        self._auto = asked == "auto"
        self._pool: ThreadPoolExecutor | None = None
        self._here = threading.local()

    def used(self, pieces: int, operations: float = math.inf) -> int:
        """Workers that so many pieces of so many operations in all are given to."""
        too_small = self._auto and operations < max(PAYS, pieces * PIECE_PAYS)
        if too_small or getattr(self._here, "worker", None) is not None:
            return 1
        return max(1, min(self.n, pieces))

    def map(self, work: Callable[[int, T], R], pieces: Iterable[T], operations: float = math.inf) -> list[R]:
        """``work(worker, piece)`` of every piece, in order. ``worker`` says whose models and memory to use.

        Where pieces fail, the error is that of the first of them, whoever met it. Inside of a piece, a further ``map``
        stays with its worker.
        """
        waiting = list(pieces)
        own = getattr(self._here, "worker", None)
        n = self.used(len(waiting), operations)
        if n == 1:
            with one_thread():
                return [work(own or 0, piece) for piece in waiting]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.n - 1, "fedtail", torch.set_num_threads, (1,))
        self.most = max(self.most, n)
        todo, done, errors = deque(enumerate(waiting)), dict[int, R](), dict[int, BaseException]()
        grad = torch.is_grad_enabled()

        def go(worker: int) -> None:
            self._here.worker = worker
            try:
                with torch.set_grad_enabled(grad):
                    while todo:
                        try:
                            i, piece = todo.popleft()
                        except IndexError:  # somebody was faster
                            return
                        try:
                            done[i] = work(worker, piece)
                        except BaseException as error:  # of the user's own code, or Ctrl-C: the caller's to deal with
                            errors[i] = error
                            todo.clear()
            finally:
                self._here.worker = None

        with one_thread():
            others = [self._pool.submit(go, worker) for worker in range(1, n)]
            try:
                go(0)
                wait(others)
            finally:  # nobody is at work any more when an error leaves
                todo.clear()
                wait(others)
        if errors:
            raise errors[min(errors)]
        return [done[i] for i in range(len(waiting))]

    def info(self) -> dict[str, Any]:
        return {"workers": self.most, **({"cores": self.n} if self.most < self.n else {})}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def by_caller(tell: Callable[[float], None]) -> Callable[[float], None]:
    """``tell`` for any worker: what the others have to add is told by the caller's thread, when it next tells its own.
    Whoever watches a run need not expect other threads."""
    caller, others = threading.get_ident(), deque[float]()

    def add(part: float) -> None:
        if threading.get_ident() != caller:
            others.append(part)
            return
        while others:
            part += others.popleft()
        tell(part)

    return add


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes with one thread: more change the bits of sums, and seldom pay off for small models."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
