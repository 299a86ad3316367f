"""The batched path: all clients and probes of a round in one step, for models too small to fill a core.

A step of a small model is mostly overhead: Python, autograd, memory. Here one step moves every run of the round
(``network``, or ``functional`` for models it does not know), and the step itself is captured once and replayed
(``capture``). What the path does not take goes to the reference path, which it is tested against.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtail.core.candidates import Candidates
from fedtail.core.metrics import class_counts
from fedtail.core.records import Refusal, Task, Tensors, Update
from fedtail.data.federation import Client, Federation, Transform
from fedtail.data.images.augment import apply_augment
from fedtail.errors import FedtailError
from fedtail.methods.base import Method
from fedtail.rounds.evaluation import LOSSES, Logits, Split, federation_split, judged, run_reports
from fedtail.rounds.local import PreparedRun, client_update, diverged, draw_width, prepare_runs, unmoved
from fedtail.settings import Settings
from fedtail.simulate.batched.choice import choose_kernel
from fedtail.simulate.batched.cohort import Cohort, pack_cohort
from fedtail.simulate.batched.compiling import compiled, pays
from fedtail.simulate.batched.pooled import candidate_confusions, confusions, logits_each, losses
from fedtail.simulate.batched.runner import CAPTURE_AFTER, Runner, Step
from fedtail.simulate.batched.step import Signature, input_names, make_step
from fedtail.simulate.reference import ReferenceSimulator

MAX_ROWS = 64
"""Most runs in one step. With more, the overhead per run hardly falls any further, and a step no longer fits the
cache."""
KEPT_RUNNERS = 16
"""Most sizes of a step to keep memory for; the one unused for longest goes first."""


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
        """``capture_after``: seconds of plain calls before a step is captured."""
        super().__init__(federation, module, method, settings, reason=reason)
        self.threads, self.capture_after = settings.engine.threads, capture_after
        kernel, why = choose_kernel(self.model, federation, method)
        if kernel is None:
            raise FedtailError(f"engine.path = 'batched' does not take this run: {why}; set engine.path to 'auto'")
        self.kernel = kernel
        self.n_groups = method.group_count(federation.n_classes)
        self._labels = federation.pool.y.numpy()
        self._runners: OrderedDict[tuple[Signature, int], Runner] = OrderedDict()
        self._steps_made: dict[Signature, tuple[Step, Step | None]] = {}
        # From the data alone: clients and rates of the first round seen differ in a resumed run, and so would the bits.
        longest, batch = int(federation.sizes.max()), settings.local.batch_size
        flops = 6.0 * self.model.n_params * min(batch, longest) * min(federation.n_clients, MAX_ROWS)
        steps = settings.local.epochs * -(-longest // batch)
        self._compiles = pays(settings.engine.compiles, method, settings.run.rounds, steps, flops)
        self._splits: dict[str, Split] = {}
        self._fallbacks: dict[str, int] = {}
        plain = federation.pool.x.dtype == torch.float32 and federation.transform == Transform()
        self._pool_plain = plain and not draw_width(federation, method)

    # -- training -------------------------------------------------------------------------------------

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        with _threads(self.threads), torch.no_grad():
            runs = self._runs(task)
            try:
                const, state = _stack([r.const for r in runs]), _stack([r.state for r in runs])
            except (RuntimeError, KeyError):
                reason = "clients' method states differ in shape"
                self._fallbacks[reason] = self._fallbacks.get(reason, 0) + 1
                with torch.enable_grad():
                    return super().train(task)
            x, ends, loss = torch.empty(len(runs), self.model.n_params), state, []
            steps = max(sum(r.local.steps for r in runs), 1)
            counted = replace(task, advance=lambda n: task.advance(n / steps))
            for part in _parts(len(runs), MAX_ROWS):
                cohort = pack_cohort(runs[part], self._labels, self.n_groups)
                mine = {k: v[part] for k, v in const.items()}, {k: v[part] for k, v in state.items()}
                loss += self._steps(cohort, counted, *mine, x[part], {k: v[part] for k, v in ends.items()})
            return self._collect(task, runs, x, loss, const, ends)

    def _runs(self, task: Task) -> list[PreparedRun]:
        """All local runs of the task, longest first."""
        runs: list[PreparedRun] = []
        for row, k in enumerate(task.clients):
            client, before = self.federation.client(k), self.client_states.get(k, {})
            runs += prepare_runs(self.model, client, self.method, task, row, before, self.settings)
        return sorted(runs, key=lambda r: -r.local.steps)

    def _steps(
        self, cohort: Cohort, task: Task, const: Tensors, state: Tensors, x: Tensor, ends: Tensors
    ) -> list[np.ndarray]:
        """Train a cohort: writes final models (n, d) and method states, returns each run's losses step by step."""
        n_runs, start = len(cohort.runs), task.x[: self.model.n_params]
        signature = self._signature(cohort, task, const, state)
        rows = {
            "x0": start.unsqueeze(0),
            "lr": torch.tensor([r.hyper["lr"] for r in cohort.runs]).unsqueeze(1),
            **{f"hyper.{k}": torch.tensor([r.hyper[k] for r in cohort.runs]) for k in signature.searched},
            **{f"const.{k}": v for k, v in const.items()},
        }
        carried = {"x": start.expand(n_runs, -1), **{f"state.{k}": v for k, v in state.items()}}
        places = {"x": x, **{f"state.{k}": v for k, v in ends.items()}}
        loss = torch.zeros(len(cohort), n_runs, signature.columns)
        runner: Runner | None = None
        feed: Iterator[Tensor] = iter(())
        for s, n in enumerate(cohort.active.tolist()):
            size = _ladder(n, n_runs)
            if runner is None or size < runner.rows:
                runner = self._runner(signature, size, const, state)
                _set(runner.inputs, {**rows, **carried})
                carried = {k: runner.inputs[k] for k in carried}
                feed = self._feed(runner, cohort, s, loss)
            place = next(feed)
            place.copy_(runner.run())
            task.advance(n)
            left = int(cohort.active[s + 1]) if s + 1 < len(cohort) else 0
            if left < n:
                for k, final in places.items():
                    final[left:n] = carried[k][left:n]
        means = loss.mul_(cohort.shares[:, :, 0]).sum(-1)
        return [means[: r.local.steps, i].numpy() for i, r in enumerate(cohort.runs)]

    def _feed(self, runner: Runner, cohort: Cohort, start: int, loss: Tensor) -> Iterator[Tensor]:
        """Before each step from ``start`` on, its batches go into the runner's tensors; yields where losses go."""
        rows, pool, transform = runner.rows, self.federation.pool.x, self.federation.transform
        inputs, labels, shares = runner.inputs["inputs"], runner.packed["labels"], runner.packed["shares"]
        flat = inputs.view(-1, *pool.shape[1:])
        steps = zip(
            cohort.index[start:, :rows].flatten(1).unbind(),
            cohort.labels[start:, :rows].unbind(),
            cohort.shares[start:, :rows].unbind(),
            loss[start:, :rows].unbind(),
            strict=True,
        )
        for s, (index, label, share, place) in enumerate(steps, start):
            if self._pool_plain:
                torch.index_select(pool, 0, index, out=flat)
            else:
                x = transform(pool.index_select(0, index))
                if cohort.draws is not None:
                    x = apply_augment(x, cohort.draws[s, :rows].flatten(0, 1))
                inputs.copy_(x.reshape(inputs.shape))
            labels.copy_(label)
            shares.copy_(share)
            yield place

    def _signature(self, cohort: Cohort, task: Task, const: Tensors, state: Tensors) -> Signature:
        searched = tuple(k for k in task.probes if k not in ("rate", "lr"))
        fixed = tuple((k, v) for k, v in self.method.hyper().items() if k not in searched)
        return Signature(
            columns=cohort.index.shape[-1],
            windows=cohort.windows,
            scale=self.settings.local.scale,
            hyper=fixed,
            searched=searched,
            const=tuple(const),
            state=tuple(state),
        )

    def _runner(self, signature: Signature, rows: int, const: Tensors, state: Tensors) -> Runner:
        key = (signature, rows)
        if key in self._runners:
            self._runners.move_to_end(key)
            return self._runners[key]
        b, d = signature.columns, self.model.n_params
        packed = {
            "labels": torch.zeros(rows, 2, b, dtype=torch.int64),
            "shares": torch.tensor([1.0 / b, 1.0]).view(2, 1).expand(rows, 2, b).clone(),
        }
        tensors = {
            "x": self.model.vector[:d].repeat(rows, 1),
            "x0": torch.zeros(1, d),
            "lr": torch.zeros(rows, 1),
            "inputs": torch.zeros(rows, b, *self.federation.input_shape),
            "y": packed["labels"][:, 0],
            "member": packed["labels"][:, 1],
            "share": packed["shares"][:, 0],
            "weight": packed["shares"][:, 1],
            **{f"hyper.{k}": torch.zeros(rows) for k in signature.searched},
            **{f"const.{k}": v[:1].expand(rows, *v.shape[1:]).clone() for k, v in const.items()},
            **{f"state.{k}": v[:1].expand(rows, *v.shape[1:]).clone() for k, v in state.items()},
        }
        names = input_names(signature)
        step, fast = self._step(signature)
        given = [tensors[k] for k in names]
        if fast is not None and rows > 1:
            for name, t in zip(names, given, strict=True):
                if name != "x0":
                    torch._dynamo.mark_dynamic(t, 0)
        runner = Runner(step, names, given, packed, compiled=fast, capture_after=self.capture_after)
        self._runners[key] = runner
        while len(self._runners) > KEPT_RUNNERS:
            self._runners.popitem(last=False)
        return runner

    def _step(self, signature: Signature) -> tuple[Step, Step | None]:
        """The step, and its compiled form where that pays."""
        if signature not in self._steps_made:
            step = make_step(self.kernel, self.method, signature)
            self._steps_made[signature] = step, compiled(step) if self._compiles else None
        return self._steps_made[signature]

    def _collect(
        self, task: Task, runs: list[PreparedRun], x: Tensor, loss: list[np.ndarray], const: Tensors, state: Tensors
    ) -> tuple[list[Update], list[Refusal]]:
        place = {(r.row, r.probe): i for i, r in enumerate(runs)}
        order = [place[row, p] for row in range(len(task.clients)) for p in range(task.n_probes)]
        delta = (x - task.x)[order].view(len(task.clients), task.n_probes, -1)
        updates: list[Update] = []
        refusals: list[Refusal] = []
        for row, k in enumerate(task.clients):
            mine = [place[row, p] for p in range(task.n_probes)]
            reason, failed = diverged([loss[i] for i in mine], task, delta[row])
            if reason is not None:
                refusals.append(Refusal(k, task.round, reason))
                continue
            client, before = self.federation.client(k), self.client_states.get(k, {})
            kept, extras = zip(
                *(
                    self.method.finish(runs[i].local, delta[row, p], _row(const, i), _row(state, i), before)
                    for p, i in enumerate(mine)
                ),
                strict=True,
            )
            if failed:
                delta[row, failed] = 0.0
            self._pending[k] = list(kept)
            steps, means = zip(*((len(loss[i]), float(loss[i].mean(dtype=np.float64))) for i in mine), strict=True)
            reports = self._reports(task, client, delta[row], failed)
            updates.append(client_update(client, delta[row], steps, means, reports, unmoved(extras, failed)))
        return updates, refusals

    def _reports(self, task: Task, client: Client, delta: Tensor, failed: Sequence[int]) -> dict[str, np.ndarray]:
        trained, held = Split.of(client, client.train), Split.of(client, client.validation)
        return run_reports(
            task,
            delta,
            judged(self.settings.run.metric, client.n_classes, client.background),
            lambda models: losses(self.kernel, models, trained).mean(1).numpy().astype(np.float64),
            lambda models: logits_each(self.kernel, models, held),
            failed,
        )

    # -- evaluation -----------------------------------------------------------------------------------

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        rows = np.concatenate([self.federation.validation[k] for k in clients])
        with _threads(self.threads):
            return class_counts(candidate_confusions(self.kernel, candidates, Split.of(self.federation, rows)))

    def _logits(self, x: Tensor, split: Split) -> Logits:
        with _threads(self.threads):
            return logits_each(self.kernel, x.unsqueeze(0), split)[0]

    def confusion(self, x: Tensor, split: str) -> np.ndarray:
        if split not in self._splits:
            self._splits[split] = federation_split(self.federation, split)
        with _threads(self.threads):
            return confusions(self.kernel, x.unsqueeze(0), self._splits[split])[0]

    def measure(self, x: Tensor, what: str) -> dict[int, Tensor]:
        f = self.federation
        if what not in LOSSES:
            return super().measure(x, what)
        rows = np.concatenate(f.train)
        with _threads(self.threads):
            each = losses(self.kernel, x.unsqueeze(0), Split.of(f, rows))[0].double().numpy()
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
        runners = self._runners.values()
        notes = sorted({r.note for r in runners if r.note})
        return {
            "engine": "simulator",
            "path": self.path,
            "reason": self.reason,
            "device": "cpu",
            "threads": self.threads,
            "kernel": type(self.kernel).__name__,
            "steps": "+".join(sorted({r.mode for r in runners})) or "none yet",
            **({"notes": notes} if notes else {}),
            **({"fallbacks": dict(self._fallbacks)} if self._fallbacks else {}),
        }


def _stack(each: list[Tensors]) -> Tensors:
    return {k: torch.stack([e[k] for e in each]) for k in each[0]} if each else {}


def _row(tensors: Tensors, i: int) -> Tensors:
    return {k: v[i] for k, v in tensors.items()}


def _set(place: Tensors, values: Tensors) -> None:
    """Copy the rows that fit."""
    for name, value in values.items():
        place[name].copy_(value[: len(place[name])])


def _parts(n: int, most: int) -> list[slice]:
    """0..n in equal slices of at most ``most``."""
    count = -(-n // most)
    return [slice(n * i // count, n * (i + 1) // count) for i in range(count)]


def _ladder(n: int, most: int) -> int:
    """The rows a step is run with when n are needed: few distinct sizes, at most a third more than needed."""
    size = 1
    while size < n:
        size = size + max(1, size // 3)
    return min(size, most)


@contextmanager
def _threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == n:
        yield
        return
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
