"""Several devices: every process runs the whole round loop and trains its own share of the clients.

Client k belongs to rank k modulo the number of ranks, so client state never moves. After training, one all-reduce of
one flat buffer (zeros where another rank's clients are) gives every rank every update, bit for bit what one process
would have; beside it only a short text goes round. Candidates are validated by all ranks, each on its own clients.

    torchrun --nproc-per-node 4 -m fedtail run config.toml engine.device=cuda
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.core.decisions import Decision, Decisions, SiteGoal
from fedtail.core.records import Refusal, Task, Tensors, Update
from fedtail.core.scores import Scores
from fedtail.errors import FedtailError
from fedtail.models.flat import FlatModel
from fedtail.rounds.engine import Engine


def world_size() -> int:
    """Processes of this run; more than 1 under ``torchrun``."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


def join_ranks(device: str) -> str:
    """Meet the other processes of a ``torchrun``; returns this process's own device."""
    kind = torch.device(device).type
    if kind == "cuda":
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return device


class ShardedSimulator:
    """Any simulator path, on the clients of this rank."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.n_clients, self.sizes = inner.n_clients, inner.sizes
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device, self.takes_rivals = inner.model.vector.device, inner.takes_rivals

    @property
    def model(self) -> FlatModel:
        return self.inner.model

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        rows = [i for i, k in enumerate(task.clients) if self._mine(k)]
        updates: list[Update] = []
        refusals: list[Refusal] = []
        if rows:
            part = replace(
                task,
                clients=tuple(task.clients[i] for i in rows),
                probes={name: values[rows] for name, values in task.probes.items()},
            )
            updates, refusals = self.inner.train(part)
        about = {
            "round": task.round,
            "refusals": [[r.client, r.reason, r.code] for r in refusals],
            "updates": [
                [u.client, u.n_samples, u.steps, u.loss, {n: v.tolist() for n, v in u.reports.items()}] for u in updates
            ],
        }
        everyone = self._gather(about)
        if len({a["round"] for a in everyone}) > 1:
            rounds = sorted({a["round"] for a in everyone})
            raise FedtailError(f"the processes are at different rounds {rounds}; start the run again without --resume")
        shared = self._share({u.client: {"delta": u.delta, **u.extras} for u in updates})
        merged = [
            Update(
                client=client,
                delta=shared[client].pop("delta").to(task.x.device),
                n_samples=n_samples,
                steps=tuple(steps),
                loss=tuple(losses),
                reports={name: np.array(v) for name, v in reports.items()},
                extras=shared[client],
            )
            for a in everyone
            for client, n_samples, steps, losses, reports in a["updates"]
        ]
        refused = [
            Refusal(client, task.round, reason, code) for a in everyone for client, reason, code in a["refusals"]
        ]
        return sorted(merged, key=lambda u: u.client), sorted(refused, key=lambda r: r.client)

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        mine = [k for k in clients if self._mine(k)]
        counts = self.inner.validate(candidates, mine) if mine else np.empty(0, dtype=np.int64)
        shape = max(self._gather(list(counts.shape)), key=len)
        total = torch.as_tensor(counts if mine else np.zeros(shape, dtype=np.int64)).to(self.device)
        dist.all_reduce(total)
        return total.cpu().numpy()

    def confusion(self, x: Tensor, split: str) -> np.ndarray:
        return self.inner.confusion(x, split)

    @property
    def tells_scores(self) -> bool:
        return self.inner.tells_scores

    def confusions(self, x: Tensor) -> dict[int, np.ndarray]:
        return self.inner.confusions(x)

    def scores(self, x: Tensor, split: str, decisions: Decisions | None = None) -> Iterator[tuple[int, Scores]]:
        return self.inner.scores(x, split, decisions)

    def site_decisions(self, x: Tensor, goal: SiteGoal) -> dict[int, Decision]:
        return self.inner.site_decisions(x, goal)

    def validate_scores(self, candidates: Candidates, clients: Sequence[int]) -> Iterator[tuple[int, Scores]]:
        return self.inner.validate_scores(candidates, clients)

    def measure(self, x: Tensor, what: str) -> dict[int, Tensor]:
        return self.inner.measure(x, what)

    def commit(self, choice: dict[int, int]) -> None:
        self.inner.commit({k: probe for k, probe in choice.items() if self._mine(k)})

    def state(self) -> dict[int, Tensors]:
        """All clients' states, on every rank; a collective call, like ``train``."""
        return self._share({k: v for k, v in self.inner.state().items() if self._mine(k)})

    def load_state(self, state: dict[int, Tensors]) -> None:
        self.inner.load_state({k: v for k, v in state.items() if self._mine(k)})

    def info(self) -> dict[str, Any]:
        return {**self.inner.info(), "ranks": self.ranks}

    def close(self) -> None:
        self.inner.close()

    # -- between ranks --------------------------------------------------------------------------------

    def _mine(self, client: int) -> bool:
        return client % self.ranks == self.rank

    def _gather(self, about: Any) -> list[Any]:
        """Every rank's JSON value, in rank order."""
        mine = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8, device=self.device)
        sizes = torch.zeros(self.ranks, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(mine)
        dist.all_reduce(sizes)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=self.device)
        padded[: len(mine)] = mine
        texts = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(texts, padded)
        return [json.loads(bytes(t[:n].tolist())) for t, n in zip(texts, sizes.tolist(), strict=True)]

    def _share(self, own: dict[int, Tensors]) -> dict[int, Tensors]:
        """Tensors of all clients from the ranks that have them: one all-reduce of one buffer."""
        about = [
            [client, name, list(t.shape), str(t.dtype).removeprefix("torch.")]
            for client, tensors in sorted(own.items())
            for name, t in sorted(tensors.items())
        ]
        entries = sorted((tuple(e[:2]), e[2], e[3]) for part in self._gather(about) for e in part)
        sizes = [int(np.prod(shape, dtype=np.int64)) for _, shape, _ in entries]
        double = any(dtype in ("float64", "int64") for *_, dtype in entries)
        buffer = torch.zeros(sum(sizes), dtype=torch.float64 if double else torch.float32, device=self.device)
        pieces = buffer.split(sizes) if entries else ()
        for ((client, name), _, _), piece in zip(entries, pieces, strict=True):
            if client in own:
                piece.copy_(own[client][name].reshape(-1))
        if entries:
            dist.all_reduce(buffer)
        out: dict[int, Tensors] = {}
        for ((client, name), shape, dtype), piece in zip(entries, pieces, strict=True):
            out.setdefault(client, {})[name] = piece.view(shape).to(getattr(torch, dtype))
        return out
