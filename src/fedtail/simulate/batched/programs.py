"""The steps of a simulator in all their sizes: how each is run (called, captured, compiled), and the memory for it.

A step is a program for all workers and a runner, with memory of its own, for each. What was unused for longest goes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from fedtail.core.records import Task
from fedtail.data.federation import Federation
from fedtail.methods.base import Method
from fedtail.models.flat import FlatModel
from fedtail.rounds.plan import PreparedRun
from fedtail.settings import Settings
from fedtail.simulate.batched.cohort import Cohort
from fedtail.simulate.batched.compiling import compiled
from fedtail.simulate.batched.network import Network
from fedtail.simulate.batched.runner import Program, Runner, Step
from fedtail.simulate.batched.shards import Shard, sizes
from fedtail.simulate.batched.step import AnyKernel, Signature, input_names, make_step

Size = tuple[Signature, int]
"""A step and the runs that it moves."""

KEPT_RUNNERS = 16
"""Most sizes of a step to keep memory for, for each worker; the one unused for longest goes first."""
KEPT_PROGRAMS = 64


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
        compiles: bool,
        pool: Tensor | None,
    ) -> None:
        """``kernels``: one for each worker, growing with them. ``capture_after``: calls of a step from which on it is
        captured, if as many are still to come. ``pool``: samples that are a step's inputs as they are."""
        self.kernels, self.model, self.method, self.settings = kernels, model, method, settings
        self.input_shape, self.pool = federation.input_shape, pool
        self.capture_after, self.compiles = capture_after, compiles
        self._runners: dict[int, OrderedDict[Size, Runner]] = {}
        self._programs: OrderedDict[Size, Program] = OrderedDict()
        self._steps: dict[tuple[Signature, int], tuple[Step, Step | None]] = {}

    def prepare(self, shards: Sequence[Shard], task: Task) -> None:
        """Record or compile the steps of a round that will be called often enough, before anybody is at work."""
        coming: Counter[Size] = Counter()
        for part in (part for shard in shards for part in shard):
            signature, n_runs = self.signature(part, task), len(part.runs)
            coming.update((signature, size) for size in sizes(part.active, n_runs))
        left = max(self.settings.run.rounds - task.round, 1)
        for size, calls in coming.items():
            program = self._program(size)
            program.calls += calls
            step, fast = self._step(size[0], 0)
            if program.settled or (fast is None and min(program.calls, calls * left) < self.capture_after):
                continue
            runner = self.runner(0, size, shards[0][0].runs[0])
            if fast is None:
                program.record(step, runner.tensors)
            else:
                program.compile(step, fast, runner.tensors)
            runner.follow()  # which checks it for all workers

    def _program(self, size: Size) -> Program:
        program = self._programs.setdefault(size, Program())
        self._programs.move_to_end(size)
        while len(self._programs) > KEPT_PROGRAMS:
            self._programs.popitem(last=False)
        return program

    def signature(self, cohort: Cohort, task: Task) -> Signature:
        searched = tuple(k for k in task.probes if k not in ("rate", "lr"))
        fixed = tuple((k, v) for k, v in self.method.hyper().items() if k not in searched)
        return Signature(
            columns=cohort.index.shape[-1],
            windows=cohort.windows,
            scale=self.settings.local.scale,
            hyper=fixed,
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
            "shares": torch.tensor([1.0 / b, 1.0]).view(2, 1).expand(rows, 2, b).clone(),
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
        names = input_names(signature)
        step, fast = self._step(signature, worker)
        given = [tensors[k] for k in names]
        if fast is not None and rows > 1:
            for name, t in zip(names, given, strict=True):
                if name != "x0":
                    torch._dynamo.mark_dynamic(t, 0)
        kept[size] = runner = Runner(step, names, given, packed, self._programs[size], self.pool)
        while len(kept) > KEPT_RUNNERS:
            kept.popitem(last=False)
        return runner

    def _step(self, signature: Signature, worker: int) -> tuple[Step, Step | None]:
        """The step on a worker's kernel, and its compiled form where that pays."""
        key = (signature, 0 if isinstance(self.kernels[0], Network) else worker)
        if key not in self._steps:
            step = make_step(self.kernels[key[1]], self.method, signature)
            self._steps[key] = step, compiled(step) if self.compiles else None
        return self._steps[key]

    def modes(self) -> list[str]:
        """How steps are run so far."""
        return sorted({runner.mode for kept in self._runners.values() for runner in kept.values()})

    def notes(self) -> list[str]:
        """Why steps are not captured or compiled, where something went wrong."""
        return sorted({note for program in self._programs.values() for note in program.notes})
