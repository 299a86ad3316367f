"""The graph path: models on a GPU, with everything resident on the device.

Every sampled client and probe is a slot. Slots run on lanes (streams with static buffers), each lane replaying
recorded CUDA graphs of its steps; the round's batches go to the device once, before the first step. The same code runs
without recording on the CPU, where it is tested against the reference path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtail.core.candidates import Candidates
from fedtail.core.random import step_seeds
from fedtail.core.records import Refusal, Task, Tensors, Update
from fedtail.core.resampling import resampled_counts
from fedtail.data.federation import Federation
from fedtail.methods import METHODS
from fedtail.methods.base import Method
from fedtail.models.flat import FlatModel, has_batchnorm
from fedtail.rounds.evaluation import Logits, Split
from fedtail.rounds.local import End, lone_samples_named
from fedtail.rounds.plan import PreparedRun, batch_of, draw_width
from fedtail.settings import Settings
from fedtail.simulate.base import Simulator
from fedtail.simulate.graph.lane import GROUPS_APART, Lane, Shared, Slot, assign, build_schedule, default_grain
from fedtail.simulate.graph.network import DeviceModel, Numerics
from fedtail.simulate.graph.recorder import Recorder
from fedtail.simulate.graph.step import (
    Local,
    PassInput,
    Resident,
    agree,
    gradient_function,
    normalizes_momentum,
    update_function,
)
from fedtail.simulate.reference import draws_numbers

MAX_LANES = 10


class GraphSimulator(Simulator):
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
        reason: str = "on a GPU",
    ) -> None:
        """``lanes``: slots that run at the same time (default: all, at most 10); ``fused``: see ``Numerics``;
        ``grain``: what sizes of passes are multiples of (default: see ``default_grain``); ``kernels``: whether kernels
        of our own may take the place of the libraries'; ``compile``: see ``Numerics``."""
        super().__init__(federation, method, settings, reason)
        self._random = draws_numbers(module, federation.input_shape)
        self.numerics = Numerics.choose(module, self.device, settings.engine.precision, fused, compile)
        self.numerics.apply()
        self.network = DeviceModel(module, federation.transform, self.numerics)
        self.layout = self.network.layout
        self.models = [FlatModel(module.to(self.device))]
        self.n_groups = method.group_count(federation.n_classes)
        self.apart = self.numerics.fused and self.n_groups <= GROUPS_APART
        """Whether rows are sorted by group, for one backward pass."""
        self.grain = 1 if has_batchnorm(module) else grain or default_grain(batch_of(settings.local))
        self.max_lanes = lanes or MAX_LANES

        self._labels = federation.pool.y.numpy()
        pool, test = federation.pool, federation.test
        self.resident = Resident(
            x=torch.cat([self.network.stored(pool.x), self.network.stored(test.x)]),
            y=torch.cat([pool.y, test.y]).to(self.device),
            start=self.model.vector.clone(),
        )
        self._test_rows = np.arange(len(federation.pool), len(self.resident.y))
        self.network.side.kernels = (
            kernels and self.numerics.fused and self.device.type == "cuda" and agree(self._trial_step)
        )
        self._gradients = gradient_function(self.network, method, self.n_groups)
        self._update = update_function(method, self.numerics.compile, self.network.side.kernels)
        self.evaluator = Evaluator(self.network, self.resident, federation.n_classes)
        self._lanes: dict[Any, list[Lane]] = {}
        self._shared: Shared | None = None
        self.recorded, self.recording_seconds = 0, 0.0

    def _trial_step(self, kernels: bool) -> Tensor:
        """Return the outcome of a step of FedCGNM on the first samples: gradients and momentum of each group, and the
        move."""
        self.network.side.kernels = kernels
        method = self.method if normalizes_momentum(self.method) else METHODS.build("fedcgnm")
        device, d = self.device, self.layout.n_params
        params = self.layout.inward(self.resident.start[:d])
        local = Local(
            params=params,
            rest=self.resident.start[d:],
            shadow=None if self.numerics.weights == torch.float32 else params.to(self.numerics.weights),
            groups=torch.zeros(1, dtype=torch.int64, device=device),
            const={},
            state={"momentum": torch.zeros(2, d, device=device)},
            hyper={k: torch.tensor(v, device=device) for k, v in {**method.hyper(), "lr": 0.1}.items()},
        )
        n, before = min(64, len(self.resident.y)), params.clone()
        given = PassInput(torch.arange(n, device=device), torch.full((n,), 1.0 / n, device=device))
        with torch.random.fork_rng(devices=self._own_generators()):  # both draw the same masks
            torch.manual_seed(0)
            gradients = gradient_function(self.network, METHODS.build("fedavg"), 2)
            grads, _, _ = gradients(self.resident, local, given, (n - n // 3, n // 3))
        update_function(method, False, kernels)(local, before, grads)
        return torch.cat([grads.float(), local.state["momentum"], (local.params - before).unsqueeze(0)])

    # -- training -------------------------------------------------------------------------------------

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        d, start = self.layout.n_params, self.resident.start
        start[:d] = self.layout.inward(task.x.to(self.device)[:d])
        start[d:] = task.x[d:]
        rows = [
            [self._slot(run, task) for run in self._prepared(self.model, task, row)] for row in range(len(task.clients))
        ]
        out = torch.empty(len(task.clients), task.n_probes, self.model.size, device=self.device)
        with torch.random.fork_rng(devices=self._own_generators()), lone_samples_named():
            self._run([slot for slots in rows for slot in slots], out, task.advance)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

        def end(slot: Slot) -> End:
            assert slot.losses is not None
            const = {k: self.layout.outward(v) for k, v in slot.const.items()}
            delta, losses = out[slot.run.row, slot.run.probe], slot.losses.double().cpu().numpy()
            return End(delta, losses, const, slot.final, slot.run.local)

        return self._settle([self._outcome(task, row, [end(s) for s in slots]) for row, slots in enumerate(rows)])

    def _own_generators(self) -> list[torch.device]:
        """Whose state a run may change, beside the CPU's generator."""
        return [self.device] if self.device.type == "cuda" else []

    def _slot(self, run: PreparedRun, task: Task) -> Slot:
        schedule = build_schedule(run.plan, self._labels, run.groups, self.n_groups, apart=self.apart, grain=self.grain)

        def inward(tensors: Tensors) -> Tensors:
            return {k: self.layout.inward(v.to(self.device)) for k, v in tensors.items()}

        keys = (self.settings.run.seed, "dropout", run.local.client, task.round)
        return Slot(
            run=run,
            groups=torch.as_tensor(run.groups).to(self.device),
            const=inward(run.const),
            state=inward(run.state),
            schedule=schedule,
            plan={name: torch.as_tensor(a).to(self.device) for name, a in schedule.arrays.items()},
            seeds=step_seeds(len(schedule.passes), *keys) if self._random else None,
        )

    def _run(self, slots: list[Slot], out: Tensor, advance: Callable[[float], None]) -> None:
        """Give slots to lanes, record what is missing, then launch step after step, lane after lane."""
        keep = self.method.traits.own_finish
        launches, used = [], list[Lane]()
        for kind in dict.fromkeys(s.signature for s in slots):
            alike = [s for s in slots if s.signature == kind]
            lanes = self._ready(kind, alike)
            for lane, share in zip(lanes, assign([s.run.local.steps for s in alike], len(lanes)), strict=True):
                todo = [alike[i] for i in share]
                self._record(lane, todo)
                used.append(lane)
                launches.append(lane.run(todo, out, keep))
        steps_in_all = max(sum(s.run.local.steps for s in slots), 1)
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
        steps = max(s.run.local.steps for s in slots)
        shared = self._shared
        if shared is None or rows > shared.capacity[0] or steps > shared.capacity[1]:
            self._lanes.clear()
            self._shared = shared = Shared(
                resident=self.resident,
                layout=self.layout,
                dtype=self.numerics.weights,
                gradients=self._gradients,
                update=self._update,
                capacity=self._capacity(rows, steps),
                draws=draw_width(self.federation, self.method),
                random=self._random,
                warm=set() if shared is None else shared.warm,
            )
        lanes = self._lanes.setdefault(kind, [])
        while len(lanes) < min(len(slots), self.max_lanes):
            lanes.append(Lane(shared, slots[0]))
        return lanes[: len(slots)]

    def _capacity(self, rows: int, steps: int) -> tuple[int, int]:
        """Room for every client at rate 1, filling included, so that buffers stay where graphs expect them."""
        s = self.settings.local
        longest = max(int(resampled_counts(self.federation.client(k).counts, 1.0).sum()) for k in range(self.n_clients))
        usual = s.epochs * (-(-longest // batch_of(s)))
        filling = usual * (self.n_groups if self.apart else 1) * self.grain
        return max(rows, s.epochs * longest + filling), max(steps, usual)

    def _record(self, lane: Lane, slots: list[Slot]) -> None:
        began = time.perf_counter()
        self.numerics.apply()
        count = lane.record({sizes for s in slots for sizes in s.schedule.passes})
        self.recorded += count
        if count:
            self.recording_seconds += time.perf_counter() - began

    # -- evaluation -----------------------------------------------------------------------------------

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        held = Candidates(candidates.base.to(self.device), candidates.directions.to(self.device), candidates.patterns)
        return self.evaluator.counts(held, self._rows(self._held(clients)))

    def _rows(self, split: Split) -> np.ndarray:
        """Where a split's samples lie on the device: those of the test set are behind the pool."""
        rows = np.arange(len(split)) if split.rows is None else split.rows
        return self._test_rows[rows] if split.samples is self.federation.test else rows

    def _logits(self, x: Tensor, split: Split) -> Logits:
        rows = self._rows(split)
        return [(self.evaluator.logits(x, rows), self.resident.y[torch.as_tensor(rows).to(self.device)])]

    # -- state ----------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        return {
            **super().info(),
            "precision": self.numerics.precision,
            "fused": self.numerics.fused,
            "kernels": self.network.side.kernels,
            "groups apart": self.apart,
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


LARGEST, GRAIN = 1024, 64
"""A recorded evaluation takes at most LARGEST samples; sizes are multiples of GRAIN."""


class Evaluator:
    """Logits of any model vector on any rows of the resident pool, as recorded graphs on CUDA."""

    def __init__(self, model: DeviceModel, resident: Resident, n_classes: int) -> None:
        self.model, self.resident, self.n_classes = model, resident, n_classes
        self.network = model.network(training=False)
        self.layout, self.device = model.layout, model.numerics.device
        self.params = resident.start[: self.layout.n_params].to(model.numerics.weights, copy=True)
        self.rest = resident.start[self.layout.n_params :].clone()
        self.rows = torch.zeros(LARGEST, dtype=torch.int64, device=self.device)
        self.cuda = self.device.type == "cuda"
        self.recorder = Recorder(self.device)
        self.recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def load(self, x: Tensor) -> None:
        """Evaluate model ``x`` (n,) from now on."""
        d = self.layout.n_params
        self.params.copy_(self.layout.inward(x[:d]))
        self.rest.copy_(x[d:])

    @torch.no_grad()
    def logits(self, x: Tensor, index: np.ndarray) -> Tensor:
        """(len(index), C) float32 logits of model ``x``."""
        self.load(x.to(self.device))
        parts = [self._run(rows)[:real].clone() for rows, real in self._chunks(index)]
        return torch.cat(parts) if parts else torch.empty(0, self.n_classes, device=self.device)

    @torch.no_grad()
    def counts(self, candidates: Candidates, index: np.ndarray) -> np.ndarray:
        """(N, 3, C) correct, true and predicted samples per class of every candidate; one copy to the host."""
        c, chunks = self.n_classes, self._chunks(index)
        total = torch.zeros(len(candidates), c * c, dtype=torch.int64, device=self.device)
        for s, vector in candidates.walk():
            self.load(vector)
            for rows, real in chunks:
                guess = self._run(rows)[:real].argmax(-1)
                total[s].index_add_(0, self.resident.y[rows[:real]] * c + guess, torch.ones_like(guess))
        m = total.view(-1, c, c)
        return torch.stack([m.diagonal(dim1=1, dim2=2), m.sum(2), m.sum(1)], dim=1).cpu().numpy()

    def _chunks(self, index: np.ndarray) -> list[tuple[Tensor, int]]:
        """Rows on the device in even pieces, filled up to the recorded sizes."""
        n = len(index)
        if n == 0:
            return []
        pieces = np.array_split(np.asarray(index, dtype=np.int64), -(-n // LARGEST))
        out = []
        for piece in pieces:
            size = -(-len(piece) // GRAIN) * GRAIN if self.cuda else len(piece)
            filled = np.concatenate([piece, np.full(size - len(piece), piece[0])])
            out.append((torch.as_tensor(filled).to(self.device), len(piece)))
        return out

    def _run(self, rows: Tensor) -> Tensor:
        if not self.cuda:
            return self._call(rows)
        n = len(rows)
        self.rows[:n].copy_(rows)
        if n not in self.recorded:
            self.recorded[n] = self._record(n)
        graph, out = self.recorded[n]
        graph.replay()
        return out

    def _call(self, rows: Tensor) -> Tensor:
        x = self.model.inputs(self.resident.x, rows)
        return self.network([self.layout.named(self.params)], self.rest, x, (len(rows),))

    def _record(self, n: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self.model.numerics.apply()
        out = torch.empty(n, self.n_classes, device=self.device)
        return self.recorder.record(lambda: out.copy_(self._call(self.rows[:n].clone())), lambda: None), out
