"""A step bound to memory: fixed input tensors, and the fastest way to run the step on them that pays for itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from fedtail.simulate.batched.capture import capture

Step = Callable[..., list[Tensor]]

CAPTURE_AFTER = 0.2
"""Seconds of plain calls after which a step is captured; capturing takes about as long, so that the choice costs at
most twice the best one. It never shows in the results: a captured step gives the same bits."""
CALLS_FIRST = 200
"""And plain calls before that. A capture saves the same few milliseconds of every call, so a step that computes for
long passes the seconds long before its capture is worth a second: 50 sites with 1,658 values each have 21 sizes of a
step, and captured them all in a run of five rounds, for half of its time."""


class Runner:
    """Static tensors for some runs, and ``run``, which takes one step on them.

    ``mode`` is ``eager`` (called), ``replay`` (captured) or ``compiled`` (by torch.compile, from the start).
    """

    def __init__(
        self,
        step: Step,
        names: Sequence[str],
        tensors: Sequence[Tensor],
        packed: dict[str, Tensor],
        *,
        compiled: Step | None = None,
        capture_after: float = CAPTURE_AFTER,
    ) -> None:
        self.tensors = list(tensors)
        self.inputs = dict(zip(names, tensors, strict=True))
        self.packed = packed
        """Memory of which some of the inputs are views, to be filled at once."""
        self.rows = self.inputs["x"].shape[0]
        self.note = ""
        """Why the step is not captured or compiled, if something went wrong."""
        self.mode = "eager" if compiled is None else "compiled"
        self.calls = 0
        """Operations in a captured step."""
        self._step, self._call = step, self._eager
        self._spent, self._called, self._capture_after = 0.0, 0, capture_after
        if compiled is not None:
            self._compiled, self._call = compiled, self._first_compiled

    def run(self) -> Tensor:
        """One step; returns (n, B) losses in a tensor that the next step may overwrite."""
        return self._call()

    def _eager(self) -> Tensor:
        if self._spent >= self._capture_after and (self._called >= CALLS_FIRST or not self._capture_after):
            self._capture()
            return self._call()
        began = time.perf_counter()
        out = self._step(*self.tensors)[0]
        self._spent += time.perf_counter() - began
        self._called += 1
        return out

    def _plain(self) -> Tensor:
        return self._step(*self.tensors)[0]

    def _capture(self) -> None:
        try:
            tape = capture(self._step, self.tensors)
        except Exception as error:  # tracing runs foreign code (methods, modules): anything may go wrong in it
            self.note, self._call = f"not captured: {type(error).__name__}: {error}", self._plain
            return
        self.mode, self.calls = "replay", len(tape.calls)
        calls, out = tape.calls, tape.outputs[0]

        def replay() -> Tensor:
            for call in calls:
                call()
            return out

        self._call = replay

    def _first_compiled(self) -> Tensor:
        """Compilation happens here; where it fails (no compiler, say) the step is captured instead."""
        kept = [t.clone() for t in self.tensors]
        try:
            out = self._run_compiled()
        except Exception as error:  # whatever the compiler raises, the run goes on without it
            for t, before in zip(self.tensors, kept, strict=True):
                t.copy_(before)
            self.note = f"not compiled: {type(error).__name__}: {str(error).splitlines()[0]}"
            self.mode, self._call, self._capture_after = "eager", self._eager, 0.0
            return self._call()
        self._call = self._run_compiled
        return out

    def _run_compiled(self) -> Tensor:
        return self._compiled(*self.tensors)[0]
