"""The steps of a simulator in all their sizes: whether each is called or replayed, and each worker's memory for it.

A step is a program for all workers and a runner, with memory of its own, for each. What was unused for longest goes.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtail.core.records import Task, Tensors
from fedtail.data.federation import Federation
from fedtail.methods.base import Method
from fedtail.models.flat import FlatModel
from fedtail.rounds.plan import PreparedRun
from fedtail.settings import Settings
from fedtail.simulate.batched.capture import Recording, Tape, capture, check, record, restore, same_bits
from fedtail.simulate.batched.cohort import Cohort, Shard, ladder
from fedtail.simulate.batched.network import Network
from fedtail.simulate.batched.step import AnyKernel, Signature, input_names, make_step

Step = Callable[..., list[Tensor]]
Size = tuple[Signature, int]
"""A step and the runs that it moves."""

CAPTURE_AFTER = 200
"""Calls of a step, by all workers and those of the coming round among them, from which on it is captured, if the rounds
left may bring as many. Tracing takes as long as a capture saves in so many calls of a small step, so that the choice
costs at most twice the best one. It never shows in the results: a captured step gives the same bits."""
KEPT_RUNNERS = 16
"""Most sizes of a step to keep memory for, for each worker; the one unused for longest goes first."""
KEPT_PROGRAMS = 64
TRIED = {"lr": 0.1, "hyper": 0.3}
"""Learning rate and searched quantities with which a captured step is compared with the step itself."""


Call = Callable[[], Any]
Scripts = dict[str, Callable[..., None]]
"""Functions by their source: workers' tapes of one recording share them."""
CALLS_TO_SETTLE = 3
"""TorchScript watches the first calls of a function and settles how to run it after them."""


class Feed(NamedTuple):
    """Inputs and losses, step by step."""

    rows: Tensor
    """(S, n B) of the pool."""
    labels: Tensor
    """(S, n, 2, B) see ``Cohort``."""
    shares: Tensor
    loss: Tensor
    """(S, n, B) where losses go."""


Stretch = Callable[[Feed, int, int], None]
"""Takes the steps from one to another."""


class Unwritten(Exception):
    """A call that is better left to Python."""


class _Script:
    """Calls of a tape as lines of TorchScript, and the tensors that they work on.

    Called from Python, every operation takes and leaves the interpreter's lock, and workers stand in each other's way:
    two threads were 1.3 times as fast as one where two processes were 1.9 times. Written out as one function, a whole
    step computes without the lock. The operations are the very same ones, on the same memory.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.tensors: list[Tensor] = []
        self.names: dict[int, str] = {}
        self.lines = [self._line(call) for call in calls]

    def compiled(self, scripts: Scripts, lines: Sequence[str], *more: str) -> Callable[..., None]:
        """A function of ``lines`` whose arguments are ``more``, beside the tensors."""
        arguments = [*(f"t{i}: Tensor" for i in range(len(self.tensors))), *more]
        source = "\n    ".join([f"def replay({', '.join(arguments)}):", *lines]) + "\n"
        if source not in scripts:
            scripts[source] = torch.jit.CompilationUnit(source).replay
        return partial(scripts[source], *self.tensors)

    def value(self, value: Any) -> str:
        if isinstance(value, Tensor):
            if id(value) not in self.names:
                self.names[id(value)] = f"t{len(self.tensors)}"
                self.tensors.append(value)
            return self.names[id(value)]
        if isinstance(value, bool | int | None) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        if isinstance(value, list | tuple) and value:
            return f"[{', '.join(map(self.value, value))}]"
        raise Unwritten

    def _line(self, call: Any) -> str:
        """A ``functools.partial`` of an operation."""
        if not hasattr(call, "func"):
            raise Unwritten
        words = [*map(self.value, call.args), *(f"{k}={self.value(v)}" for k, v in call.keywords.items())]
        schema, name = getattr(call.func, "_schema", None), getattr(call.func, "__name__", "")
        if schema is not None:
            return f"torch.ops.{schema.name.replace('::', '.')}({', '.join(words)})"
        if getattr(Tensor, name, None) is call.func:
            return f"{words[0]}.{name}({', '.join(words[1:])})"
        if getattr(torch, name, None) is call.func:
            return f"torch.{name}({', '.join(words)})"
        raise Unwritten


def scripted(calls: Sequence[Call], scripts: Scripts) -> Call:
    """One call that does what ``calls`` do; raises ``Unwritten`` if one of them cannot be written."""
    script = _Script(calls)
    return script.compiled(scripts, script.lines)


def looped(
    calls: Sequence[Call], pool: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor, out: Tensor, scripts: Scripts
) -> Stretch:
    """One call that takes a whole stretch of steps, each with its rows of the pool.

    inputs: (n B, ...), labels, shares: where a step finds them; out: where it leaves its losses.
    """
    script = _Script(calls)
    there, x, y, weights, losses = map(script.value, (pool, inputs, labels, shares, out))
    lines = [
        f"torch.index_select({there}, 0, rows[s], out={x})",
        f"{y}.copy_(labels[s])",
        f"{weights}.copy_(shares[s])",
        *script.lines,
        f"loss[s].copy_({losses})",
    ]
    feed = [f"{name}: Tensor" for name in ("rows", "labels", "shares", "loss")]
    lines = ["for s in range(first, last):", *(f"    {line}" for line in lines)]
    function = script.compiled(scripts, lines, *feed, "first: int", "last: int")
    return lambda feed, first, last: function(*feed, first, last)


class Program:
    """How all workers run a step with so many runs: as it is, or from a recording."""

    def __init__(self) -> None:
        self.calls = 0
        """How often the step was called, the coming round included."""
        self.recording: Recording | None = None
        self.scripts: Scripts = {}
        self.tried = False
        """Whether recording has been tried."""
        self.same: dict[str, bool] = {}
        """Whether a form of the step gave its bits when the first worker tried it: so it does for the others."""
        self.notes: list[str] = []
        """Why the step is not captured, if something went wrong."""

    def record(self, step: Step, tensors: Sequence[Tensor]) -> None:
        self.tried = True
        try:
            self.recording = record(step, tensors)
        except Exception as error:  # tracing runs foreign code (methods, modules): anything may go wrong in it
            self.notes.append(f"not captured: {type(error).__name__}: {error}")


class Runner:
    """A worker's static tensors for some runs, and ``run``, which takes one step on them.

    ``mode`` is ``eager`` (called) or ``replay`` (captured). With ``pool``, whose rows are a step's inputs as they are,
    ``stretch`` takes many steps of a captured step at once.
    """

    def __init__(
        self,
        step: Step,
        inputs: dict[str, Tensor],
        packed: dict[str, Tensor],
        program: Program,
        pool: Tensor | None = None,
    ) -> None:
        """``packed``: memory of which some of the inputs are views, to be filled at once."""
        self.inputs, self.packed, self.pool, self.program = inputs, packed, pool, program
        self.tensors = list(inputs.values())
        self.rows = inputs["x"].shape[0]
        self.mode = "eager"
        self.calls = 0
        """Operations in a captured step."""
        self.stretch: Stretch | None = None
        self._step, self._follows = step, False
        self._call: Callable[[], Tensor] = lambda: step(*self.tensors)[0]

    def follow(self, batch: Tensors | None = None) -> None:
        """Replay the program's recording from now on, if there is one. ``batch``: real ``labels`` and ``shares`` with
        which the first worker compares it with the step."""
        if not self._follows and self.program.recording is not None:
            self._follows = True
            self._replay(self.program.recording, batch or {})

    def run(self) -> Tensor:
        """One step; returns (n, B) losses in a tensor that the next step may overwrite."""
        return self._call()

    def _replay(self, recording: Recording, batch: Tensors) -> None:
        before = [t.clone() for t in self.tensors]
        try:
            tape = capture(self._step, self.tensors, recording)
            for name, value in batch.items():  # after the capture, from which memory still holds what it computed
                self.packed[name].copy_(value)
            values = self._values()
            if "tape" not in self.program.same:
                check(self._step, tape, values)
        except Exception as error:
            self.program.notes.append(f"not captured: {type(error).__name__}: {error}")
            return
        self.mode, self.calls, self.program.same["tape"] = "replay", len(tape.calls), True
        calls, out = tape.calls, tape.outputs[0]
        try:
            self.stretch = None if self.pool is None else self._all_steps(tape, self.pool, values)
            one = None if self.stretch else scripted(calls, self.program.scripts)
            if one and self._same("script", tape, values, tape.replay, one):
                calls = [one]
        except Unwritten:
            pass
        except Exception as error:  # torch's compiler refuses in many ways; the tape itself is as right
            self.program.notes.append(f"not scripted: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
        finally:
            restore(self.tensors, before)

        def replay() -> Tensor:
            for call in calls:
                call()
            return out

        self._call = replay

    def _values(self) -> list[Tensor]:
        """Tensors with which the forms of a step are compared: a batch of a run, and nothing else that is 0.

        In a first round momenta are 0, with a warm-up the learning rate is, and what a tape does with them would not
        show."""
        draws = torch.Generator().manual_seed(0)
        out = []
        for name, t in self.inputs.items():
            kind = name.split(".")[0]
            if kind in TRIED:
                out.append(torch.full_like(t, TRIED[kind]))
            elif kind in ("x", "x0", "inputs", "const", "state") and t.is_floating_point():
                out.append(t + torch.rand(t.shape, generator=draws).mul_(0.1))
            else:
                out.append(t.clone())
        return out

    def _all_steps(self, tape: Tape, pool: Tensor, values: Sequence[Tensor]) -> Stretch | None:
        """Many steps of the tape, if one gives the very same bits."""
        flat, out = self.inputs["inputs"].view(-1, *pool.shape[1:]), tape.outputs[0]
        labels, shares = self.packed["labels"], self.packed["shares"]
        stretch = looped(tape.calls, pool, flat, labels, shares, out, self.program.scripts)
        index = torch.arange(len(flat)).remainder_(len(pool))
        feed = Feed(index[None], labels.clone()[None], shares.clone()[None], torch.empty_like(out)[None])

        def once() -> None:
            torch.index_select(pool, 0, index, out=flat)
            tape.replay()

        return stretch if self._same("stretch", tape, values, once, lambda: stretch(feed, 0, 1)) else None

    def _same(self, form: str, tape: Tape, values: Sequence[Tensor], first: Call, second: Call) -> bool:
        """Whether two ways do the same to all tensors, from the first call on to when TorchScript has settled."""

        def after(way: Call) -> list[Tensor]:
            restore(self.tensors, values)
            way()
            return [t.clone() for t in (*self.tensors, *tape.outputs)]

        if form not in self.program.same:
            expected = after(first)
            self.program.same[form] = all(
                all(map(same_bits, after(second), expected)) for _ in range(CALLS_TO_SETTLE + 1)
            )
        return self.program.same[form]


class Programs:
    """Every step that the rounds of one simulator take."""

    def __init__(
        self,
        kernels: Sequence[AnyKernel],
        model: FlatModel,
        federation: Federation,
        method: Method,
        settings: Settings,
        *,
        capture_after: float,
        pool: Tensor | None,
    ) -> None:
        """``kernels``: one for each worker, growing with them. ``capture_after``: calls of a step from which on it is
        captured, if as many are still to come. ``pool``: samples that are a step's inputs as they are."""
        self.kernels, self.model, self.method, self.settings = kernels, model, method, settings
        self.input_shape, self.pool, self.capture_after = federation.input_shape, pool, capture_after
        self._runners: dict[int, OrderedDict[Size, Runner]] = {}
        self._programs: OrderedDict[Size, Program] = OrderedDict()
        self._steps: dict[tuple[Signature, int], Step] = {}

    def prepare(self, shards: Sequence[Shard], task: Task) -> None:
        """Record the steps of a round that will be called often enough, before anybody is at work."""
        coming: Counter[Size] = Counter()
        first: dict[Size, tuple[Cohort, int]] = {}
        for part in (part for shard in shards for part in shard):
            signature = self.signature(part, task)
            rows = [ladder(n, len(part.runs)) for n in part.active.tolist()]
            coming.update((signature, n) for n in rows)
            for n in set(rows):
                first.setdefault((signature, n), (part, rows.index(n)))
        left = max(self.settings.run.rounds - task.round, 1)
        for size, calls in coming.items():
            program = self._program(size)
            program.calls += calls
            if program.tried or min(program.calls, calls * left) < self.capture_after:
                continue
            runner = self.runner(0, size, shards[0][0].runs[0])
            program.record(self._step(size[0], 0), runner.tensors)
            part, step = first[size]
            runner.follow({"labels": part.labels[step, : size[1]], "shares": part.shares[step, : size[1]]})

    def _program(self, size: Size) -> Program:
        program = self._programs.setdefault(size, Program())
        self._programs.move_to_end(size)
        while len(self._programs) > KEPT_PROGRAMS:
            self._programs.popitem(last=False)
        return program

    def signature(self, cohort: Cohort, task: Task) -> Signature:
        searched = tuple(k for k in task.probes if k not in ("rate", "lr"))
        return Signature(
            columns=cohort.index.shape[-1],
            windows=cohort.windows,
            hyper=tuple((k, v) for k, v in self.method.hyper().items() if k not in searched),
            searched=searched,
            const=tuple(cohort.runs[0].const),
            state=tuple(cohort.runs[0].state),
        )

    def runner(self, worker: int, size: Size, run: PreparedRun) -> Runner:
        """A worker's memory for a step; ``run``: one like those it will move."""
        kept = self._runners.setdefault(worker, OrderedDict())
        if size in kept:
            kept.move_to_end(size)
            return kept[size]
        signature, rows = size
        b, d = signature.columns, self.model.n_params
        packed = {
            "labels": torch.zeros(rows, 2, b, dtype=torch.int64),
            "shares": torch.tensor([0.5 / b, 0.5]).view(2, 1).expand(rows, 2, b).clone(),
        }
        tensors = {
            "inputs": torch.zeros(rows, b, *self.input_shape),
            "y": packed["labels"][:, 0],
            "member": packed["labels"][:, 1],
            "share": packed["shares"][:, 0],
            "weight": packed["shares"][:, 1],
        }
        alike = next((r for (other, n), r in kept.items() if n == rows and other.same_runs(signature)), None)
        if alike is not None:  # runs go on in the same memory when their batches change in size
            tensors |= {k: v for k, v in alike.inputs.items() if k not in tensors}
        else:
            tensors |= {
                "x": self.model.vector[:d].repeat(rows, 1),
                "x0": torch.zeros(1, d),
                "lr": torch.zeros(rows, 1),
                **{f"hyper.{k}": torch.zeros(rows) for k in signature.searched},
                **{f"const.{k}": v.expand(rows, *v.shape).clone() for k, v in run.const.items()},
                **{f"state.{k}": v.expand(rows, *v.shape).clone() for k, v in run.state.items()},
            }
        inputs = {name: tensors[name] for name in input_names(signature)}
        kept[size] = Runner(self._step(signature, worker), inputs, packed, self._programs[size], self.pool)
        while len(kept) > KEPT_RUNNERS:
            kept.popitem(last=False)
        return kept[size]

    def _step(self, signature: Signature, worker: int) -> Step:
        """The step on a worker's kernel."""
        key = (signature, 0 if isinstance(self.kernels[0], Network) else worker)
        if key not in self._steps:
            self._steps[key] = make_step(self.kernels[key[1]], self.method, signature)
        return self._steps[key]

    def modes(self) -> list[str]:
        """How steps are run so far."""
        return sorted({runner.mode for kept in self._runners.values() for runner in kept.values()})

    def notes(self) -> list[str]:
        """Why steps are not captured, where something went wrong."""
        return sorted({note for program in self._programs.values() for note in program.notes})
