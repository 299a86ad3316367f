"""The batched path: all clients and probes of a round in one step, for models too small to fill a core.

A step of a small model is mostly overhead: Python, autograd, memory. Here one step moves every run of the round
(``network``, or ``functional`` for models it does not know), and the step itself is captured once and replayed
(``capture``). The larger the model, the fewer runs fill a core: then a round is cut into shards of as many, which
workers share (``workers``). What the path does not take goes to the reference path, which it is tested against.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedtail.core.candidates import Candidates
from fedtail.core.metrics import class_counts
from fedtail.core.records import DIVERGED, Refusal, Task, Tensors, Update
from fedtail.data.federation import Client, Federation, Transform
from fedtail.data.images.augment import apply_augment
from fedtail.errors import FedtailError
from fedtail.methods.base import Method
from fedtail.rounds.batches import batch_of
from fedtail.rounds.evaluation import LOSSES, Logits, Split, federation_split, judged, run_reports
from fedtail.rounds.local import PreparedRun, client_update, diverged, draw_width, prepare_runs, unmoved
from fedtail.settings import Settings
from fedtail.simulate.batched.choice import choose_cpu_kernel
from fedtail.simulate.batched.chunks import ChunkedKernel
from fedtail.simulate.batched.cohort import Cohort, aligned, pack_parts
from fedtail.simulate.batched.compiling import compiled, pays
from fedtail.simulate.batched.network import Network
from fedtail.simulate.batched.pooled import Pooled
from fedtail.simulate.batched.runner import CAPTURE_AFTER, Program, Runner, Step
from fedtail.simulate.batched.script import Feed
from fedtail.simulate.batched.step import AnyKernel, Signature, input_names, make_step
from fedtail.simulate.reference import ReferenceSimulator
from fedtail.simulate.workers import Workers, by_caller, one_by_one

T = TypeVar("T")
R = TypeVar("R")
Size = tuple[Signature, int]
"""A step and the runs that it moves."""
Shard = list[Cohort]
"""The steps of some runs, part by part."""

MAX_ROWS = 64
"""Most runs in one step. With more, the overhead per run hardly falls any further, and a step no longer fits the
cache."""
SHARD_FLOPS = 1.1e8
"""Operations of a step that fill a core: some milliseconds, of which overhead is a tenth. A shard has as many runs as
that takes, by the model and the data alone, so that a run's bits are those of any number of workers."""
SHORT_PAYS = 2e7
"""Operations that a step with fewer columns must save: it is captured apart, or called, if it is rare."""
SHARD_VALUES = 2**26
"""Most parameters, and most values of a batch, of the runs of a shard whose chunks workers share."""
KEPT_RUNNERS = 16
"""Most sizes of a step to keep memory for, for each worker; the one unused for longest goes first."""
KEPT_PROGRAMS = 64
STRETCH = 32
"""Most steps that are taken in one call: whoever waits for progress, or for Ctrl-C, waits for them."""


@dataclass(frozen=True)
class End:
    """What a run ends with."""

    delta: Tensor
    loss: np.ndarray
    """Step by step."""
    const: Tensors
    state: Tensors


class BatchedSimulator(ReferenceSimulator):
    """Results agree with the reference path up to rounding, and with themselves bit for bit."""

    path = "batched"

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        method: Method,
        settings: Settings,
        *,
        capture_after: float = CAPTURE_AFTER,
        reason: str = "asked for",
    ) -> None:
        """``capture_after``: calls of a step from which on it is captured."""
        super().__init__(federation, module, method, settings, reason=reason)
        self.threads, self.capture_after = settings.engine.threads, capture_after
        kernel, why = choose_cpu_kernel(self.model, federation, method)
        if kernel is None:
            raise FedtailError(f"engine.path = 'batched' does not take this run: {why}; set engine.path to 'auto'")
        self.kernels: list[AnyKernel] = [kernel]
        """One for each worker that has been at work: a module cannot answer for two models at once."""
        self.n_groups = method.group_count(federation.n_classes)
        self._labels = federation.pool.y.numpy()
        self._runners: dict[int, OrderedDict[Size, Runner]] = {}
        self._programs: OrderedDict[Size, Program] = OrderedDict()
        self._steps_made: dict[tuple[Signature, int], tuple[Step, Step | None]] = {}
        # From the data alone: clients and rates of the first round seen differ in a resumed run, and so would the bits.
        longest, batch = int(federation.sizes.max()), batch_of(settings.local)
        flops = 6.0 * self.model.n_params * min(batch, longest) * min(federation.n_clients, MAX_ROWS)
        steps = settings.local.epochs * -(-longest // batch)
        self._compiles = pays(settings.engine.compiles, method, settings.run.rounds, steps, flops)
        self.shard = max(1, min(MAX_ROWS, int(SHARD_FLOPS / max(3.0 * min(batch, longest) * self.sample_flops, 1.0))))
        """Most runs in one step of this model."""
        if isinstance(
            kernel, ChunkedKernel
        ):  # workers share chunks, so all runs go side by side, as far as memory goes
            values = max(self.model.n_params, min(batch, longest) * math.prod(federation.input_shape))
            self._compiles, self.shard = False, max(1, min(MAX_ROWS, SHARD_VALUES // values))
            self.capture_after, kernel.spread = math.inf, self.pool.map
        if self._compiles and not isinstance(kernel, Network):
            self.pool = Workers(1, self.threads)  # a module that is being compiled is not to be called
        self.pooled = Pooled(self._spread, self.sample_flops)
        self.padding: dict[str, float] = {}
        """Of the last round, see ``_padding``."""
        self._splits: dict[str, Split] = {}
        self._fallbacks: dict[str, int] = {}
        plain = federation.pool.x.dtype == torch.float32 and federation.transform == Transform()
        self._plain_pool = federation.pool.x if plain and not draw_width(federation, method) else None
        """Samples that are a step's inputs as they are."""

    def _workers(self, module: nn.Module) -> Workers:
        return Workers(self.settings.engine.workers, self.settings.engine.threads)

    @property
    def kernel(self) -> AnyKernel:
        return self.kernels[0]

    def _work(self, work: Callable[[int, T], R], pieces: Sequence[T], operations: float) -> list[R]:
        """``Workers.map`` for workers that have kernels."""
        while len(self.kernels) < self.pool.used(len(pieces), operations):
            self.kernels.append(self.kernel if isinstance(self.kernel, Network) else copy.deepcopy(self.kernel))
        return self.pool.map(work, pieces, operations)

    def _spread(self, work: Callable[[AnyKernel, T], R], pieces: Sequence[T], operations: float) -> list[R]:
        return self._work(lambda worker, piece: work(self.kernels[worker], piece), pieces, operations)

    def _each(self, work: Callable[[T], R], pieces: Sequence[T], samples: int) -> list[R]:
        return self._work(lambda worker, piece: work(piece), pieces, float(samples * self.sample_flops))

    # -- training -------------------------------------------------------------------------------------

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        with one_by_one(self.threads), torch.no_grad():
            operations = 3.0 * task.n_probes * float(sum(self.sizes[k] for k in task.clients)) * self.sample_flops
            if len(task.clients) * task.n_probes <= self.shard:
                operations = 0.0  # one shard for one worker, and what is around it is as small
            runs = self._runs(task, operations)
            if not _alike(runs):
                reason = "clients' method states differ in shape"
                self._fallbacks[reason] = self._fallbacks.get(reason, 0) + 1
                with torch.enable_grad():
                    return super().train(task)
            steps, advance = max(sum(r.local.steps for r in runs), 1), by_caller(task.advance)
            counted = replace(task, advance=lambda n: advance(n / steps))
            shards = self._shards(runs)
            self._prepare(shards, task)
            self.padding = {} if isinstance(self.kernel, ChunkedKernel) else _padding(shards)
            ends = self._work(lambda worker, shard: self._steps(worker, shard, counted), shards, operations)
            return self._collect(task, runs, [end for shard in ends for end in shard], operations)

    def _runs(self, task: Task, operations: float) -> list[PreparedRun]:
        """All local runs of the task, longest first."""

        def one(worker: int, row: int) -> list[PreparedRun]:
            client = self.federation.client(task.clients[row])
            before = self.client_states.get(client.index, {})
            return prepare_runs(self.model, client, self.method, task, row, before, self.settings)

        runs = self._work(one, range(len(task.clients)), operations)
        return sorted((run for mine in runs for run in mine), key=lambda r: -r.local.steps)

    def _shards(self, runs: Sequence[PreparedRun]) -> list[Shard]:
        """The round's shards, the longest runs first. Chunks have no padding to save."""
        chunked = isinstance(self.kernel, ChunkedKernel)
        least = math.inf if chunked or self._compiles else SHORT_PAYS / max(3.0 * self.sample_flops, 1.0)
        cuts = _parts(len(runs), self.shard)
        shards = [pack_parts(runs[cut], self._labels, self.n_groups, least) for cut in cuts]  # short calls of numpy
        if len(shards) > 1:
            wide = iter(aligned([part for shard in shards for part in shard]))
            shards = [[next(wide) for _ in shard] for shard in shards]
        return shards

    def _prepare(self, shards: Sequence[Shard], task: Task) -> None:
        """Record or compile the steps of a round that will be called often enough, before anybody is at work."""
        coming: Counter[Size] = Counter()
        for part in (part for shard in shards for part in shard):
            signature, n_runs = self._signature(part, task), len(part.runs)
            coming.update((signature, size) for size in _sizes(part.active, n_runs))
        for size, calls in coming.items():
            program = self._program(size)
            program.calls += calls
            step, fast = self._step(size[0], 0)
            if program.settled or (fast is None and program.calls < self.capture_after):
                continue
            runner = self._runner(0, size, shards[0][0].runs[0])
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

    def _steps(self, worker: int, shard: Shard, task: Task) -> list[End]:
        """Train a shard."""
        runs = shard[0].runs
        n_runs, start = len(runs), task.x[: self.model.n_params]
        const, state = _stack([r.const for r in runs]), _stack([r.state for r in runs])
        searched = self._signature(shard[0], task).searched
        rows = {
            "x0": start.unsqueeze(0),
            "lr": torch.tensor([r.hyper["lr"] for r in runs]).unsqueeze(1),
            **{f"hyper.{k}": torch.tensor([r.hyper[k] for r in runs]) for k in searched},
            **{f"const.{k}": v for k, v in const.items()},
        }
        carried = {"x": start.expand(n_runs, -1), **{f"state.{k}": v for k, v in state.items()}}
        delta = torch.empty(n_runs, self.model.n_params)
        delta[int(shard[0].active[0]) if len(shard[0]) else 0 :] = 0.0  # runs without a step
        means, coming = [], [int(part.active[0]) if len(part) else 0 for part in shard[1:]] + [0]
        for part, after in zip(shard, coming, strict=True):
            signature, runner = self._signature(part, task), None
            loss = torch.zeros(len(part), n_runs, signature.columns)
            for first, last, n in _stretches(part.active):
                size = _ladder(n, n_runs)
                if runner is None or size < runner.rows:
                    runner = self._runner(worker, (signature, size), runs[0])
                    runner.follow()
                    _set(runner.inputs, {**rows, **carried})
                    rows |= {k: runner.inputs[k] for k in rows}
                    carried = {k: runner.inputs[k] for k in carried}
                    feed = Feed(
                        part.index[:, :size].flatten(1), part.labels[:, :size], part.shares[:, :size], loss[:, :size]
                    )
                if runner.stretch is not None:
                    runner.stretch(feed, first, last)
                else:
                    self._one_by_one(runner, feed, part, first, last)
                task.advance(n * (last - first))
                left = int(part.active[last]) if last < len(part) else after
                if left < n:
                    torch.sub(carried["x"][left:n], start, out=delta[left:n])
                    for k, final in state.items():
                        final[left:n] = carried[f"state.{k}"][left:n]
            means.append(loss.mul_(part.shares[:, :, 0]).sum(-1))
        each = torch.cat(means).T.contiguous().numpy()
        return [End(delta[i], each[i, : r.local.steps], _row(const, i), _row(state, i)) for i, r in enumerate(runs)]

    def _one_by_one(self, runner: Runner, feed: Feed, cohort: Cohort, first: int, last: int) -> None:
        """The steps from one to another: their batches go into the runner's tensors, their losses where they belong."""
        rows, pool, transform = runner.rows, self.federation.pool.x, self.federation.transform
        inputs, labels, shares = runner.inputs["inputs"], runner.packed["labels"], runner.packed["shares"]
        flat = inputs.view(-1, *pool.shape[1:])
        for s in range(first, last):
            if self._plain_pool is not None:
                torch.index_select(pool, 0, feed.rows[s], out=flat)
            else:
                x = transform(pool.index_select(0, feed.rows[s]))
                if cohort.draws is not None:
                    x = apply_augment(x, cohort.draws[s, :rows].flatten(0, 1))
                inputs.copy_(x.reshape(inputs.shape))
            labels.copy_(feed.labels[s])
            shares.copy_(feed.shares[s])
            feed.loss[s].copy_(runner.run())

    def _signature(self, cohort: Cohort, task: Task) -> Signature:
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

    def _runner(self, worker: int, size: Size, run: PreparedRun) -> Runner:
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
            "inputs": torch.zeros(rows, b, *self.federation.input_shape),
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
        kept[size] = runner = Runner(step, names, given, packed, self._programs[size], self._plain_pool)
        while len(kept) > KEPT_RUNNERS:
            kept.popitem(last=False)
        return runner

    def _step(self, signature: Signature, worker: int) -> tuple[Step, Step | None]:
        """The step on a worker's kernel, and its compiled form where that pays."""
        key = (signature, 0 if isinstance(self.kernel, Network) else worker)
        if key not in self._steps_made:
            step = make_step(self.kernels[key[1]], self.method, signature)
            self._steps_made[key] = step, compiled(step) if self._compiles else None
        return self._steps_made[key]

    def _collect(
        self, task: Task, runs: Sequence[PreparedRun], ends: Sequence[End], operations: float
    ) -> tuple[list[Update], list[Refusal]]:
        place = {(r.row, r.probe): i for i, r in enumerate(runs)}

        def one(worker: int, row: int) -> tuple[Update, list[Tensors]] | Refusal:
            k, mine = task.clients[row], [place[row, p] for p in range(task.n_probes)]
            delta = ends[mine[0]].delta.unsqueeze(0) if len(mine) == 1 else torch.stack([ends[i].delta for i in mine])
            reason, failed = diverged([ends[i].loss for i in mine], task, delta)
            if reason is not None:
                return Refusal(k, task.round, reason, DIVERGED)
            client, before = self.federation.client(k), self.client_states.get(k, {})
            kept, extras = zip(
                *(
                    self.method.finish(runs[i].local, delta[p], ends[i].const, ends[i].state, before)
                    for p, i in enumerate(mine)
                ),
                strict=True,
            )
            if failed:
                delta[failed] = 0.0
            losses = [ends[i].loss for i in mine]
            steps = [len(loss) for loss in losses]
            means = [float(loss.sum(dtype=np.float64)) / len(loss) if len(loss) else math.nan for loss in losses]
            reports = self._reports(task, client, delta, failed) if task.reports else {}
            return client_update(client, delta, steps, means, reports, unmoved(extras, failed)), list(kept)

        return self._settle(self._work(one, range(len(task.clients)), operations))

    def _reports(self, task: Task, client: Client, delta: Tensor, failed: Sequence[int]) -> dict[str, np.ndarray]:
        trained, held = Split.of(client, client.train), Split.of(client, client.validation)
        return run_reports(
            task,
            delta,
            judged(self.settings.run.metric, client.n_classes, client.background),
            lambda models: self.pooled.losses(models, trained).mean(1).numpy().astype(np.float64),
            lambda models: self.pooled.logits_each(models, held),
            failed,
        )

    # -- evaluation -----------------------------------------------------------------------------------

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        rows = np.concatenate([self.federation.validation[k] for k in clients])
        return class_counts(self.pooled.candidate_confusions(candidates, Split.of(self.federation, rows)))

    def _logits(self, x: Tensor, split: Split) -> Logits:
        return self.pooled.logits_each(x.unsqueeze(0), split)[0]

    def confusion(self, x: Tensor, split: str) -> np.ndarray:
        if split not in self._splits:
            self._splits[split] = federation_split(self.federation, split)
        return self.pooled.confusions(x.unsqueeze(0), self._splits[split])[0]

    def measure(self, x: Tensor, what: str) -> dict[int, Tensor]:
        f = self.federation
        if what not in LOSSES:
            return super().measure(x, what)
        rows = np.concatenate(f.train)
        each = self.pooled.losses(x.unsqueeze(0), Split.of(f, rows))[0].double().numpy()
        owner = np.repeat(np.arange(self.n_clients), self.sizes)
        if what == "train_loss":
            means = np.bincount(owner, each, minlength=self.n_clients) / self.sizes
            return dict(enumerate(torch.from_numpy(means)))
        cells = owner * f.n_classes + f.pool.y.numpy()[rows]
        with np.errstate(invalid="ignore"):
            table = np.bincount(cells, each, self.n_clients * f.n_classes) / np.bincount(
                cells, minlength=self.n_clients * f.n_classes
            )
        return dict(enumerate(torch.from_numpy(table.reshape(self.n_clients, f.n_classes))))

    def info(self) -> dict[str, Any]:
        runners = [runner for kept in self._runners.values() for runner in kept.values()]
        notes = sorted({note for program in self._programs.values() for note in program.notes})
        return {
            "engine": "simulator",
            "path": self.path,
            "reason": self.reason,
            "device": "cpu",
            **self.pool.info(),
            "threads": self.threads,
            "kernel": type(self.kernel).__name__,
            "shard": self.shard,
            **({"padding": round(self.padding["samples"], 4)} if self.padding else {}),
            "steps": "+".join(sorted({r.mode for r in runners})) or "none yet",
            **({"notes": notes} if notes else {}),
            **({"fallbacks": dict(self._fallbacks)} if self._fallbacks else {}),
        }


def _alike(runs: Sequence[PreparedRun]) -> bool:
    """Whether the method's tensors are of the same shapes in all runs, so that they can be stacked."""

    def shapes(run: PreparedRun) -> list[dict[str, torch.Size]]:
        return [{k: v.shape for k, v in tensors.items()} for tensors in (run.const, run.state)]

    return all(shapes(run) == shapes(runs[0]) for run in runs)


def _stack(each: list[Tensors]) -> Tensors:
    return {k: torch.stack([e[k] for e in each]) for k in each[0]} if each else {}


def _row(tensors: Tensors, i: int) -> Tensors:
    return {k: v[i] for k, v in tensors.items()}


def _set(place: Tensors, values: Tensors) -> None:
    """Copy the rows that fit, where they are not there already."""
    for name, value in values.items():
        if value is not place[name]:
            place[name].copy_(value[: len(place[name])])


def _parts(n: int, most: int) -> list[slice]:
    """0..n in equal slices of at most ``most``."""
    count = -(-n // most)
    return [slice(n * i // count, n * (i + 1) // count) for i in range(count)]


def _stretches(active: np.ndarray) -> list[tuple[int, int, int]]:
    """(first, last, runs) of steps in which as many runs go on, at most ``STRETCH`` of them."""
    edges = [0, *(np.flatnonzero(np.diff(active)) + 1).tolist(), len(active)]
    return [
        (first, min(first + STRETCH, end), int(active[begin]))
        for begin, end in pairwise(edges)
        for first in range(begin, end, STRETCH)
    ]


def _sizes(active: np.ndarray, n_runs: int) -> list[int]:
    """The rows that each step is run with."""
    return [_ladder(n, n_runs) for n in active.tolist()]


def _padding(shards: Sequence[Shard]) -> dict[str, float]:
    """What is computed for nothing, in units of what is not: samples in steps (those of runs that are over, and of
    short batches), and samples in the products of groups, whose windows hold more than the group."""
    real = max(sum(len(run.plan.index) for shard in shards for run in shard[0].runs), 1)
    slots = products = 0
    for part in (part for shard in shards for part in shard):
        rows = sum(_sizes(part.active, len(part.runs)))
        slots += rows * part.index.shape[-1]
        products += rows * sum(high - low for low, high in part.windows)
    return {"samples": slots / real - 1.0, "products": products / real - 1.0}


@cache
def _ladder(n: int, most: int) -> int:
    """The rows a step is run with when n are needed: few distinct sizes, at most a third more than needed."""
    size = 1
    while size < n:
        size = size + max(1, size // 3)
    return min(size, most)
