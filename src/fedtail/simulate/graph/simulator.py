"""The graph path: convolutional and recurrent models on a GPU, with everything resident on the device.

Every sampled client and probe is a slot. Slots run on lanes (streams with static buffers), each lane replaying
recorded CUDA graphs of compiled passes; the round's batches go to the device once, before the first step. The same
code runs without recording on the CPU, where it is tested against the reference path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtail.core.candidates import Candidates
from fedtail.core.random import step_seeds
from fedtail.core.records import DIVERGED, Refusal, Task, Tensors, Update
from fedtail.core.resampling import resampled_counts
from fedtail.data.federation import Client, Federation
from fedtail.methods.base import Method, cross_entropy
from fedtail.models.flat import FlatModel, has_batchnorm
from fedtail.rounds.batches import batch_of
from fedtail.rounds.evaluation import FEATURES, Logits, Split, feature_measurement, judged, measurement, run_reports
from fedtail.rounds.local import client_update, diverged, lone_samples_named, unmoved
from fedtail.rounds.plan import PreparedRun, draw_width, prepare_runs
from fedtail.settings import Settings
from fedtail.simulate.client_states import ClientStates
from fedtail.simulate.graph.evaluation import Evaluator
from fedtail.simulate.graph.lane import Lane, Shared, Slot
from fedtail.simulate.graph.network import DeviceModel
from fedtail.simulate.graph.numerics import Numerics
from fedtail.simulate.graph.passes import assign, build_schedule, default_grain
from fedtail.simulate.graph.step import Resident, choose_mode, gradient_function, update_function
from fedtail.simulate.reference import draws_numbers
from fedtail.simulate.scoring import Scoring

MAX_LANES = 10


@dataclass(frozen=True)
class Trained:
    """One local run after its last step."""

    run: PreparedRun
    losses: np.ndarray
    """(E,) mean loss of each step's batch."""
    const: Tensors
    """In the device's layout, unlike ``final``."""
    final: Tensors
    """The step state, where the method wants it."""


class GraphSimulator(ClientStates, Scoring):
    """Clients on lanes of one device. Draws are those of the reference path; results agree with it up to rounding."""

    path = "graph"

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        method: Method,
        settings: Settings,
        *,
        fused: bool | None = None,
        lanes: int | None = None,
        grain: int | None = None,
        kernels: bool = True,
        compile: bool | None = None,
        reason: str = "convolutional or recurrent",
    ) -> None:
        """``lanes``: slots that run at the same time (default: all, at most 10); ``fused``: see ``Numerics``;
        ``grain``: what sizes of passes are multiples of (default: see ``default_grain``); ``kernels``: whether kernels
        of our own may take the place of the libraries'; ``compile``: see ``Numerics``."""
        super().__init__()
        self.federation, self.method, self.settings = federation, method, settings
        engine = settings.engine
        self.device = torch.device(engine.device)
        self._random = draws_numbers(module, federation.input_shape)
        self.n_clients, self.sizes = federation.n_clients, federation.sizes
        self.numerics = Numerics.choose(module, self.device, engine.precision, fused, compile)
        self.numerics.apply()
        self.network = DeviceModel(module, federation.transform, len(federation.input_shape), self.numerics)
        self.layout = self.network.layout
        self.model = FlatModel(module.to(self.device))
        self.n_groups = method.group_count(federation.n_classes)
        self.mode = choose_mode(module, method, self.n_groups)
        self.grain = 1 if has_batchnorm(module) else grain or default_grain(batch_of(settings.local))
        self.reason = reason
        self.max_lanes = lanes or MAX_LANES

        self._labels = federation.pool.y.numpy()
        pool, test = federation.pool, federation.test
        self.resident = Resident(
            x=torch.cat([pool.x, test.x.to(pool.x.dtype)]).to(self.device),
            y=torch.cat([pool.y, test.y]).to(self.device),
            start=self.model.vector.clone(),
        )
        self._test_rows = np.arange(len(federation.pool), len(self.resident.y))
        if self.numerics.compile and self.mode == "masked":
            torch._functorch.config.donated_buffer = False  # one forward pass, H backward passes
        kernels = kernels and self.device.type == "cuda"
        self._gradients = gradient_function(self.network, method, self.mode, self.n_groups)
        self._update = update_function(method, self.numerics.compile, kernels)
        aside = self.network.aside
        aside.kernels = kernels and self.numerics.fused and self.mode != "masked"
        aside.checked = not aside.kernels
        self.evaluator = Evaluator(self.network, self.resident, federation.n_classes)
        self._lanes: dict[Any, list[Lane]] = {}
        self._shared: Shared | None = None
        self.recorded, self.recording_seconds = 0, 0.0

    # -- training -------------------------------------------------------------------------------------

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        d, start = self.layout.n_params, self.resident.start
        start[:d] = self.layout.inward(task.x.to(self.device)[:d])
        start[d:] = task.x[d:]
        slots: list[Slot] = []
        for row in range(len(task.clients)):
            slots += self._slots(task, row)
        out = torch.empty(len(task.clients), task.n_probes, self.model.size, device=self.device)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), lone_samples_named():
            self._run(slots, out, task.advance)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        done = [Trained(run=s.run, losses=self._step_losses(s), const=s.const, final=s.final) for s in slots]
        return self._collect(task, done, out)

    def _slots(self, task: Task, row: int) -> list[Slot]:
        client = self.federation.client(task.clients[row])
        before = self.client_states.get(client.index, {})
        runs = prepare_runs(self.model, client, self.method, task, row, before, self.settings)
        return [self._slot(run, client.index, task.round) for run in runs]

    def _slot(self, run: PreparedRun, client: int, round: int) -> Slot:
        schedule = build_schedule(
            run.plan,
            self._labels,
            run.groups,
            self.n_groups,
            mode=self.mode,
            grain=self.grain,
        )

        def inward(tensors: Tensors) -> Tensors:
            return {k: self.layout.inward(v.to(self.device)) for k, v in tensors.items()}

        return Slot(
            run=run,
            groups=torch.as_tensor(run.groups).to(self.device),
            const=inward(run.const),
            state=inward(run.state),
            schedule=schedule,
            plan={name: torch.as_tensor(a).to(self.device) for name, a in schedule.arrays.items()},
            seeds=step_seeds(len(schedule.steps), self.settings.run.seed, "dropout", client, round)
            if self._random
            else None,
        )

    def _run(self, slots: list[Slot], out: Tensor, advance: Callable[[float], None]) -> None:
        """Give slots to lanes, record what is missing, then launch step after step, lane after lane."""
        keep = self.method.traits.own_finish
        launches, used = [], list[Lane]()
        for kind in dict.fromkeys(s.signature for s in slots):
            mine = [s for s in slots if s.signature == kind]
            lanes = self._ready(kind, mine)
            for lane, share in zip(lanes, assign([len(s.schedule.steps) for s in mine], len(lanes)), strict=True):
                todo = [mine[i] for i in share]
                self._record(lane, todo)
                used.append(lane)
                launches.append(lane.run(todo, out, keep))
        steps_in_all = max(sum(len(s.schedule.steps) for s in slots), 1)
        for lane in used:
            lane.recorder.follow()
        while launches:
            launches = [steps for steps in launches if next(steps, True) is None]
            advance(len(launches) / steps_in_all)
        for lane in used:
            lane.recorder.lead()

    def _ready(self, kind: Any, slots: list[Slot]) -> list[Lane]:
        """Lanes for slots of one signature; all are made anew when a run does not fit their buffers."""
        rows = max(len(s.schedule.rows) for s in slots)
        passes = max(len(s.schedule.at) for s in slots)
        shared = self._shared
        if shared is None or rows > shared.capacity[0] or passes > shared.capacity[1]:
            self._lanes.clear()
            self._shared = shared = Shared(
                resident=self.resident,
                layout=self.layout,
                dtype=self.numerics.weights,
                n_groups=self.n_groups,
                mode=self.mode,
                gradients=self._gradients,
                update=self._update,
                capacity=self._capacity(rows, passes),
                draws=draw_width(self.federation, self.method),
                random=self._random,
                warm=set() if shared is None else shared.warm,
            )
        lanes = self._lanes.setdefault(kind, [])
        while len(lanes) < min(len(slots), self.max_lanes):
            lanes.append(Lane(shared, slots[0]))
        return lanes[: len(slots)]

    def _capacity(self, rows: int, passes: int) -> tuple[int, int]:
        """Room for every client at rate 1, filling included, so that buffers stay where graphs expect them."""
        s = self.settings.local
        longest = max(int(resampled_counts(self.federation.client(k).counts, 1.0).sum()) for k in range(self.n_clients))
        batch = batch_of(s)
        steps = s.epochs * (-(-longest // batch))
        parts = 1 if self.mode == "masked" else min(self.n_groups, batch)
        per_step = parts if self.mode == "single" else 1
        return max(rows, s.epochs * longest + steps * parts * self.grain), max(passes, steps * per_step)

    def _record(self, lane: Lane, slots: list[Slot]) -> None:
        began = time.perf_counter()
        self.numerics.apply()
        count = lane.record(set().union(*(s.schedule.shapes for s in slots)))
        self.recorded += count
        if count:
            self.recording_seconds += time.perf_counter() - began

    def _collect(self, task: Task, done: list[Trained], out: Tensor) -> tuple[list[Update], list[Refusal]]:
        """What clients upload. out: (clients, P, n) deltas."""
        updates: list[Update] = []
        refusals: list[Refusal] = []
        for row, k in enumerate(task.clients):
            mine = sorted((t for t in done if t.run.row == row), key=lambda t: t.run.probe)
            losses, delta = [t.losses for t in mine], out[row]
            reason, failed = diverged(losses, task, delta)
            if reason is not None:
                refusals.append(Refusal(k, task.round, reason, DIVERGED))
                continue
            client, before = self.federation.client(k), self.client_states.get(k, {})
            kept, extras = zip(*(self._finish(t, delta[t.run.probe], before) for t in mine), strict=True)
            if failed:
                delta[failed] = 0.0
            self._pending[k] = list(kept)
            steps, means = [len(v) for v in losses], [float(v.mean()) for v in losses]
            reports = self._reports(task, client, delta, failed)
            extras = tuple(unmoved(extras, failed))
            updates.append(client_update(client, delta.to(task.x.device), steps, means, reports, extras))
        return updates, refusals

    def _finish(self, trained: Trained, delta: Tensor, before: Tensors) -> tuple[Tensors, Tensors]:
        const = {k: self.layout.outward(v) for k, v in trained.const.items()}
        return self.method.finish(trained.run.local, delta[: self.layout.n_params], const, trained.final, before)

    def _step_losses(self, slot: Slot) -> np.ndarray:
        """(E,) mean loss of each step's batch."""
        total = np.zeros(len(slot.schedule.steps))
        assert slot.losses is not None
        np.add.at(total, slot.schedule.at, slot.losses.double().cpu().numpy())
        return total

    def _reports(self, task: Task, client: Client, delta: Tensor, failed: Sequence[int]) -> dict[str, np.ndarray]:
        return run_reports(
            task,
            delta,
            judged(self.settings.run.metric, client.n_classes, client.background),
            lambda models: [float(self._losses(x, client).mean()) for x in models],
            lambda models: [self._logits(x, Split.of(client, client.validation)) for x in models],
            failed,
        )

    # -- evaluation -----------------------------------------------------------------------------------

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        rows = np.concatenate([self.federation.validation[k] for k in clients])
        held = Candidates(candidates.base.to(self.device), candidates.directions.to(self.device), candidates.patterns)
        return self.evaluator.counts(held, rows)

    def confusion(self, x: Tensor, split: str) -> np.ndarray:
        rows = self.federation.validation_rows() if split == "validation" else self._test_rows
        return self.evaluator.confusion(x, rows)

    def _logits(self, x: Tensor, split: Split) -> Logits:
        rows = np.arange(len(split)) if split.rows is None else split.rows
        if split.samples is self.federation.test:  # it lies behind the pool on the device
            rows = self._test_rows[rows]
        return [(self.evaluator.logits(x, rows), self.resident.y[torch.as_tensor(rows).to(self.device)])]

    def measure(self, x: Tensor, what: str) -> dict[int, Tensor]:
        clients = map(self.federation.client, range(self.n_clients))
        if what in FEATURES:
            return {c.index: feature_measurement(self.model, c, x, what) for c in clients}
        return {c.index: measurement(c, self._losses(x, c), what) for c in clients}

    def _losses(self, x: Tensor, client: Client) -> Tensor:
        """(n_k,) cross-entropy of each un-resampled training sample."""
        labels = self.resident.y[torch.as_tensor(client.train).to(self.device)]
        return cross_entropy(self.evaluator.logits(x, client.train), labels)

    # -- state ----------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        return {
            "engine": "simulator",
            "path": self.path,
            "reason": self.reason,
            "device": str(self.device),
            "precision": self.numerics.precision,
            "fused": self.numerics.fused,
            "kernels": self.network.aside.kernels,
            "mode": self.mode,
            "lanes": max((len(v) for v in self._lanes.values()), default=0),
            "recorded_passes": self.recorded,
            "recording_seconds": round(self.recording_seconds, 3),
        }

    def close(self) -> None:
        """Let go of the device's memory."""
        self._pending.clear()
        self._lanes.clear()
        self._shared = None
        self.evaluator.recorded.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
