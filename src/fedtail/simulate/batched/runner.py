"""A step bound to memory: fixed input tensors, and the fastest way to run the step on them that pays for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedtail.simulate.batched.capture import Recording, Tape, capture, record, restore, same_bits
from fedtail.simulate.batched.script import CALLS_TO_SETTLE, Call, Feed, Scripts, Stretch, looped, scripted

Step = Callable[..., list[Tensor]]

CAPTURE_AFTER = 200
"""Calls of a step, by all workers and those of the coming round among them, from which on it is captured, if the rounds
left may bring as many. Tracing takes as long as a capture saves in so many calls of a small step, so that the choice
costs at most twice the best one. It never shows in the results: a captured step gives the same bits."""


class Program:
    """How all workers run a step with so many runs: as it is, from a recording, or compiled."""

    def __init__(self) -> None:
        self.calls = 0
        """How often the step was called, the coming round included."""
        self.recording: Recording | None = None
        self.scripts: Scripts = {}
        self.compiled: Step | None = None
        self.settled = False
        """Whether recording or compiling has been tried."""
        self.same: dict[str, bool] = {}
        """Whether a form of the step gave its bits when the first worker tried it: so it does for the others."""
        self.notes: list[str] = []
        """Why the step is not captured or compiled, if something went wrong."""

    def record(self, step: Step, tensors: Sequence[Tensor]) -> None:
        self.settled = True
        try:
            self.recording = record(step, tensors)
        except Exception as error:  # tracing runs foreign code (methods, modules): anything may go wrong in it
            self.notes.append(f"not captured: {type(error).__name__}: {error}")

    def compile(self, step: Step, fast: Step, tensors: Sequence[Tensor]) -> None:
        """Compilation happens here; where it fails (no compiler, say) the step is captured instead."""
        self.settled = True
        try:
            fast(*tensors)  # the round sets all tensors anew before its first step
            self.compiled = fast
        except Exception as error:  # whatever the compiler raises, the run goes on without it
            self.notes.append(f"not compiled: {type(error).__name__}: {str(error).splitlines()[0]}")
            self.record(step, tensors)


class Runner:
    """A worker's static tensors for some runs, and ``run``, which takes one step on them.

    ``mode`` is ``eager`` (called), ``replay`` (captured) or ``compiled`` (by torch.compile, from the start). With
    ``pool``, whose rows are a step's inputs as they are, ``stretch`` takes many steps of a captured step at once.
    """

    def __init__(
        self,
        step: Step,
        names: Sequence[str],
        tensors: Sequence[Tensor],
        packed: dict[str, Tensor],
        program: Program,
        pool: Tensor | None = None,
    ) -> None:
        self.tensors = list(tensors)
        self.inputs = dict(zip(names, tensors, strict=True))
        self.packed, self.pool = packed, pool
        """``packed``: memory of which some of the inputs are views, to be filled at once."""
        self.rows = self.inputs["x"].shape[0]
        self.mode, self.program = "eager", program
        self.calls = 0
        """Operations in a captured step."""
        self.stretch: Stretch | None = None
        self._step, self._call, self._follows = step, self._plain, False

    def follow(self) -> None:
        """Take up what the program has come to since."""
        if self._follows or not self.program.settled:
            return
        self._follows = True
        if self.program.compiled is not None:
            self.mode, self._step = "compiled", self.program.compiled
        elif self.program.recording is not None:
            self._replay(self.program.recording)

    def run(self) -> Tensor:
        """One step; returns (n, B) losses in a tensor that the next step may overwrite."""
        return self._call()

    def _plain(self) -> Tensor:
        return self._step(*self.tensors)[0]

    def _replay(self, recording: Recording) -> None:
        try:
            tape = capture(self._step, self.tensors, recording, check="tape" not in self.program.same)
        except Exception as error:
            self.program.notes.append(f"not captured: {type(error).__name__}: {error}")
            return
        self.mode, self.calls, self.program.same["tape"] = "replay", len(tape.calls), True
        before = [t.clone() for t in self.tensors]
        calls, out = tape.calls, tape.outputs[0]
        try:
            self.stretch = None if self.pool is None else self._all_steps(tape, self.pool, before)
            calls = tape.calls if self.stretch else self._fewer(tape, before)
        except Exception as error:  # torch's compiler refuses in many ways; the tape itself is as right
            self.program.notes.append(f"not scripted: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
        finally:
            restore(self.tensors, before)

        def replay() -> Tensor:
            for call in calls:
                call()
            return out

        self._call = replay

    def _fewer(self, tape: Tape, before: Sequence[Tensor]) -> list[Call]:
        """The tape's calls as few, if these give the very same bits."""

        def once(calls: Sequence[Call]) -> None:
            for call in calls:
                call()

        calls = scripted(tape.calls, self.program.scripts)
        return calls if self._same("fewer", tape, before, lambda: once(tape.calls), lambda: once(calls)) else tape.calls

    def _all_steps(self, tape: Tape, pool: Tensor, before: Sequence[Tensor]) -> Stretch | None:
        """Many steps of the tape, if one gives the very same bits."""
        flat, labels, shares = (
            self.inputs["inputs"].view(-1, *pool.shape[1:]),
            self.packed["labels"],
            self.packed["shares"],
        )
        out = tape.outputs[0]
        stretch = looped(tape.calls, pool, flat, labels, shares, out, self.program.scripts)
        if stretch is None:
            return None
        index = torch.arange(len(flat)).remainder_(len(pool))
        feed = Feed(index[None], labels.clone()[None], shares.clone()[None], torch.empty_like(out)[None])

        def once() -> None:
            torch.index_select(pool, 0, index, out=flat)
            tape.replay()

        return stretch if self._same("stretch", tape, before, once, lambda: stretch(feed, 0, 1)) else None

    def _same(self, form: str, tape: Tape, before: Sequence[Tensor], one: Call, other: Call) -> bool:
        """Whether two ways do the same to all tensors, from the first call on to when TorchScript has settled."""

        def after(way: Call) -> list[Tensor]:
            restore(self.tensors, before)
            way()
            return [t.clone() for t in (*self.tensors, *tape.outputs)]

        if form not in self.program.same:
            expected = after(one)
            found = (all(map(same_bits, after(other), expected)) for _ in range(CALLS_TO_SETTLE + 1))
            self.program.same[form] = all(found)
        return self.program.same[form]
