"""Small models on a GPU: all local runs of a round in one stack, and a step of the whole stack as one recorded graph.

The step is the batched path's (``simulate.batched.step``), in float32; samples, batches and models are on the device
from the first step to the last, so that the host only says "next". A step of a hundred small kernels takes as long for
fifty clients as for one.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.core.records import Refusal, Task, Tensors, Update
from fedtail.data.federation import Federation
from fedtail.errors import FedtailError
from fedtail.methods.base import Method
from fedtail.models.flat import FlatModel
from fedtail.rounds.plan import PreparedRun, draw_width, prepare_runs
from fedtail.settings import Settings
from fedtail.simulate.batched.choice import choose_kernel
from fedtail.simulate.batched.cohort import Cohort, pack_cohort
from fedtail.simulate.batched.network import Network
from fedtail.simulate.batched.step import Kernel, Signature, input_names, make_step
from fedtail.simulate.graph.network import DeviceModel
from fedtail.simulate.graph.recorder import Recorder
from fedtail.simulate.graph.simulator import GraphSimulator, Trained
from fedtail.simulate.graph.step import Resident

MOST, MOST_VALUES = 256, 2**29
"""Runs in one stack, and values of their activations: twice as many are in memory at times, 4 bytes each."""


class StackedSimulator(GraphSimulator):
    """All clients of a round in one step. Draws are those of the reference path; results agree up to rounding."""

    path = "batched"

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        method: Method,
        settings: Settings,
        *,
        kernel: Kernel | None = None,
        reason: str = "asked for",
    ) -> None:
        """``kernel``: of ``choose_kernel``, if it has been asked already."""
        if settings.engine.precision == "bf16":
            raise FedtailError(
                "engine.precision = 'bf16' is not for small models on a GPU, which compute in float32; use 'auto'"
            )
        if kernel is None:
            kernel, why = choose_kernel(FlatModel(copy.deepcopy(module)), federation, method)
            if kernel is None:
                raise FedtailError(f"engine.path = 'batched' cannot handle this run: {why}; set engine.path to 'auto'")
        self.along = isinstance(kernel, Network) and kernel.along_sequences
        if settings.engine.precision == "auto":
            chosen = "tf32" if self.along else "fp32"
        else:
            chosen = settings.engine.precision
        engine = settings.engine.model_copy(update={"precision": chosen})
        super().__init__(federation, module, method, settings.model_copy(update={"engine": engine}), reason=reason)
        self.kernel = kernel
        self._stacks: dict[tuple[Signature, int], Stack] = {}
        self._fallbacks: dict[str, int] = {}

    # -- training -------------------------------------------------------------------------------------

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        runs = []
        for row, k in enumerate(task.clients):
            client, before = self.federation.client(k), self.client_states.get(k, {})
            runs += prepare_runs(self.model, client, self.method, task, row, before, self.settings)
        runs.sort(key=lambda r: -r.local.steps)
        try:
            const, state = _stacked([r.const for r in runs]), _stacked([r.state for r in runs])
        except (RuntimeError, KeyError):
            reason = "clients' method states differ in shape"
            self._fallbacks[reason] = self._fallbacks.get(reason, 0) + 1
            return super().train(task)
        start = task.x.to(self.device)
        out = torch.empty(len(task.clients), task.n_probes, self.model.size, device=self.device)
        done: list[Trained] = []
        steps = max(sum(r.local.steps for r in runs), 1)
        most = self._most(runs)
        for first in range(0, len(runs), most):
            part = slice(first, first + most)
            cohort = pack_cohort(runs[part], self._labels, self.n_groups)
            mine = {k: v[part] for k, v in const.items()}, {k: v[part] for k, v in state.items()}
            ends, final, losses = self._steps(cohort, task, start, *mine, steps)
            for i, run in enumerate(cohort.runs):
                out[run.row, run.probe] = ends[i] - start
                done.append(
                    Trained(
                        run=run,
                        losses=losses[: run.local.steps, i],
                        const={k: v[i] for k, v in mine[0].items()},
                        final={k: v[i] for k, v in final.items()},
                    )
                )
        return self._collect(task, done, out)

    @torch.no_grad()
    def _steps(
        self, cohort: Cohort, task: Task, start: Tensor, const: Tensors, state: Tensors, steps: int
    ) -> tuple[Tensor, Tensors, Any]:
        """Train a cohort: final models (n, d) and method states, and the losses (S, n) on the host."""
        active = cohort.active.tolist()
        stack = self._stack(cohort, task, const, state)
        self.numerics.apply()
        stack.record({_rows(n, len(cohort.runs)) for n in active})
        stack.load(cohort, start, const, state)
        ends = {name: stack.tensors[name][: len(cohort.runs)].clone() for name in stack.moving}
        stack.recorder.follow()
        for s, n in enumerate(active):
            stack.run(_rows(n, len(cohort.runs)))
            task.advance(n / steps)
            left = active[s + 1] if s + 1 < len(active) else 0
            if left < n:
                stack.keep(ends, left, n)
        stack.recorder.lead()
        final = {k: ends[f"state.{k}"] for k in state}
        return ends["x"], final, stack.losses[: len(active)].double().cpu().numpy()

    def _most(self, runs: list[PreparedRun]) -> int:
        """Runs in one stack, by what their activations take; stacks are of equal size."""
        batch = max(int(r.plan.sizes.max(initial=1)) for r in runs)
        values = self.kernel.values * batch if isinstance(self.kernel, Network) else 1
        stacks = -(-len(runs) // max(1, min(MOST, MOST_VALUES // values)))
        return -(-len(runs) // stacks)

    def _stack(self, cohort: Cohort, task: Task, const: Tensors, state: Tensors) -> Stack:
        """Memory for so many runs; made anew when a run is longer than it holds."""
        columns = cohort.index.shape[-1]
        windows = ((0, columns),) * self.n_groups  # of the round's own, every round would need a recording
        signature = Signature.of(self.method, self.settings, task, columns, windows, cohort.runs[0])
        key = (signature, len(cohort.runs))
        if key not in self._stacks or len(cohort) > self._stacks[key].capacity:
            longest = self._capacity(0, len(cohort))[1]
            self._stacks[key] = Stack(
                step=make_step(self.kernel, self.method, signature),
                signature=signature,
                network=self.network,
                resident=self.resident,
                runs=len(cohort.runs),
                capacity=max(longest, len(cohort)),
                draws=draw_width(self.federation, self.method),
                const=const,
                state=state,
            )
        return self._stacks[key]

    def _finish(self, trained: Trained, delta: Tensor, before: Tensors) -> tuple[Tensors, Tensors]:
        return self.method.finish(trained.run.local, delta, trained.const, trained.final, before)

    def info(self) -> dict[str, Any]:
        recorded = [s for s in self._stacks.values() if s.graphs]
        return {
            **super().info(),
            "mode": "stacked",
            "kernel": type(self.kernel).__name__,
            "recorded_passes": sum(len(s.graphs) for s in recorded),
            **({"fallbacks": dict(self._fallbacks)} if self._fallbacks else {}),
        }

    def close(self) -> None:
        self._stacks.clear()
        super().close()


class Stack:
    """Static tensors for some runs side by side, and recorded steps of the first so many of them."""

    def __init__(
        self,
        step: Any,
        signature: Signature,
        network: DeviceModel,
        resident: Resident,
        runs: int,
        capacity: int,
        draws: int,
        const: Tensors,
        state: Tensors,
    ) -> None:
        self.step, self.names, self.network, self.resident = step, input_names(signature), network, resident
        self.signature, self.capacity, self.draws = signature, capacity, draws
        b, d, device = signature.columns, network.layout.n_params, resident.start.device

        def like(t: Tensor) -> Tensor:
            return t[:1].expand(runs, *t.shape[1:]).clone()

        self.tensors = {
            "x": resident.start[:d].repeat(runs, 1),
            "x0": torch.zeros(1, d, device=device),
            "lr": torch.zeros(runs, 1, device=device),
            **{f"hyper.{k}": torch.zeros(runs, device=device) for k in signature.searched},
            **{f"const.{k}": like(v) for k, v in const.items()},
            **{f"state.{k}": like(v) for k, v in state.items()},
        }
        self.moving = ["x", *(f"state.{k}" for k in signature.state)]
        """What a step changes."""
        self.plan = {
            "index": torch.zeros(capacity, runs, b, dtype=torch.int64, device=device),
            "labels": torch.zeros(capacity, runs, 2, b, dtype=torch.int64, device=device),
            "shares": torch.full((capacity, runs, 2, b), 1.0 / b, device=device),
        }
        if draws:
            self.plan["draws"] = torch.zeros(capacity, runs, b, draws, dtype=torch.int64, device=device)
        self.losses = torch.zeros(capacity, runs, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.recorder = Recorder(device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def call(self, rows: int) -> None:
        """One step of the first ``rows`` runs, at the cursor."""
        now = {name: t.index_select(0, self.cursor)[0, :rows] for name, t in self.plan.items()}
        index, draws = now["index"].flatten(), now.get("draws")
        x = self.network.inputs(self.resident.x, index, None if draws is None else draws.flatten(0, 1))
        given = {k: t if k == "x0" else t[:rows] for k, t in self.tensors.items()}
        given |= {
            "inputs": x.view(rows, self.signature.columns, *x.shape[1:]),
            "y": now["labels"][:, 0],
            "member": now["labels"][:, 1],
            "share": now["shares"][:, 0],
            "weight": now["shares"][:, 1],
        }
        loss = self.step(*(given[name] for name in self.names))[0]
        self.losses[:, :rows].index_copy_(0, self.cursor, (loss * given["share"]).sum(-1).unsqueeze(0))
        self.cursor.add_(1)

    def record(self, sizes: set[int]) -> None:
        """Record the steps that are missing. Leaves the tensors changed."""
        if self.recorder.stream is not None:
            for rows in sorted(sizes - self.graphs.keys(), reverse=True):
                self.graphs[rows] = self.recorder.record(partial(self.call, rows), lambda: None)
                self.cursor.zero_()

    @torch.no_grad()
    def load(self, cohort: Cohort, start: Tensor, const: Tensors, state: Tensors) -> None:
        """Set everything for a cohort from the global model."""
        n, held = len(cohort.runs), self.tensors
        held["x"].copy_(start[: held["x"].shape[1]].expand_as(held["x"]))
        held["x0"][0] = start[: held["x"].shape[1]]
        held["lr"][:n, 0] = torch.tensor([r.hyper["lr"] for r in cohort.runs]).to(start.device)
        for k in self.signature.searched:
            held[f"hyper.{k}"][:n] = torch.tensor([r.hyper[k] for r in cohort.runs]).to(start.device)
        for kind, given in (("const", const), ("state", state)):
            for k, v in given.items():
                held[f"{kind}.{k}"].copy_(v)
        for name, t in (("index", cohort.index), ("labels", cohort.labels), ("shares", cohort.shares)):
            self.plan[name][: len(cohort)].copy_(t)
        if cohort.draws is not None:
            self.plan["draws"][: len(cohort)].copy_(cohort.draws)
        self.cursor.zero_()

    def run(self, rows: int) -> None:
        """Launch the next step."""
        with self.recorder.on():
            if self.recorder.stream is None:
                self.call(rows)
            else:
                self.graphs[rows].replay()

    @torch.no_grad()
    def keep(self, ends: Tensors, first: int, last: int) -> None:
        """Copy what the runs ``first:last`` have come to."""
        with self.recorder.on():
            for name in self.moving:
                ends[name][first:last].copy_(self.tensors[name][first:last])


def _stacked(each: list[Tensors]) -> Tensors:
    return {k: torch.stack([e[k] for e in each]) for k in each[0]}


def _rows(n: int, most: int) -> int:
    """Runs in a recorded step when n are still going: few distinct sizes, for some of more than are needed."""
    return min(1 << (n - 1).bit_length(), most)
