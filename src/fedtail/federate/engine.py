"""The engine of every real federation: what the round loop asks for, as messages over a transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.core.decisions import Decision, Decisions, SiteGoal
from fedtail.core.records import Refusal, Task, Tensors, Update
from fedtail.core.scores import Scores, total
from fedtail.data.federation import Samples
from fedtail.federate.asking import Asking
from fedtail.federate.masked import MaskedCounts, train_masked
from fedtail.federate.open_counts import OpenCounts
from fedtail.federate.protocol.compress import BLOCK
from fedtail.federate.protocol.limits import FLOATS, Budget, Kind
from fedtail.federate.protocol.transport import Phase
from fedtail.federate.protocol.wire import Parcel, pack_task
from fedtail.federate.replies import read_decision, read_measurement, read_update, refused
from fedtail.federate.spool import StoredUpdate
from fedtail.federate.sums import Sums
from fedtail.models.flat import FlatModel
from fedtail.rounds.batches import batch_of
from fedtail.rounds.evaluation import Split, confusion_on, measurement_shape, model_logits, scores_on

SLACK_VALUES = 1 << 22
"""Numbers that a method may send or measure which have nothing to do with the model's size: sums per class, say."""
DELTA = {"none": ("F32", "F64"), "bf16": ("BF16",), "int8": ("I8",)}
"""How an update travels, by ``deploy.compress``."""


@dataclass
class RemoteEngine(Asking):
    """A ``rounds.engine.Engine`` whose clients are sites, reached by messages; it holds no client data."""

    test: Samples | None = None
    """The server's own test set; without one, tests are pooled over the sites' test splits."""
    meet: Callable[[list[int]], tuple[dict[int, int], dict[int, str]]] | None = None
    """Clients -> training samples of those that can join now, and why the others cannot."""
    spool: Path | None = None
    """Folder where the updates of a round wait that are larger, all together, than ``memory_mb``; None for memory."""
    memory_mb: float = 0.0
    validation_sizes: Sequence[int] | None = None
    """(K,) validation samples per client, from the handshake; None if not known."""
    real: bool = False
    """Whether sites may be hostile, and so count for no more than a fair share of the validation samples they claim."""
    sums: Sums | None = None
    """Needed where the job's ``reveal`` is ``sums``, or its updates are masked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model = FlatModel(self.job.build_model())
        self._method = self.job.build_method()
        self._sampler, self._sends_more = self._method.sampler, self._method.wire != "nothing"
        self._views = self.job.encoding.views if self.job.encoding else 1
        self._open = OpenCounts(self, self.validation_sizes, self.real)
        self._answered: tuple[Tensor, dict[str, dict[int, np.ndarray]]] | None = None
        self._commits: dict[int, tuple[int, int]] = {}

    @property
    def _counts(self) -> OpenCounts | MaskedCounts:
        """How sites tell what they count."""
        if self.job.reveal != "sums":
            return self._open
        assert self.sums is not None
        return MaskedCounts(self, self.sums)

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        self.round = task.round
        payloads = {}
        late = self._meet_absent(task)
        for row, client in enumerate(task.clients):
            if client in late:
                continue
            meta = self.about(client)
            if client in self._commits:
                done, probe = self._commits[client]
                meta["commit"] = {"round": done, "probe": probe}
            payloads[client] = pack_task(task, row, meta)
        most = {k: self._most_steps(k, task) for k in payloads}
        if self.job.updates == "masked":
            assert self.sums is not None
            updates, refusals = train_masked(self, self.sums, self._method, task, payloads, most)
            refusals += [Refusal(k, task.round, reason) for k, reason in late.items()]
            return updates, sorted(refusals, key=lambda r: r.client)
        one = task.n_probes * task.x.numel() * task.x.element_size()
        spool = self.spool if len(payloads) * one > self.memory_mb * 1e6 else None

        def read(client: int, parcel: Parcel) -> Update:
            update = read_update(client, parcel, task, most[client], int(self.sizes[client]) * self._views)
            task.advance(1.0 / len(payloads))
            return update if spool is None else StoredUpdate(update, spool)

        replies, refusals = self.exchange(Phase.TRAIN, payloads, read, self._update_budget(task))
        refusals += [refused(k, task.round, reason) for k, reason in late.items()]
        return list(replies.values()), sorted(refusals, key=lambda r: r.client)

    def _update_budget(self, task: Task) -> Budget:
        """The update, the numbers that were asked for, and what the method may send beside it."""
        probes, n = task.n_probes, task.x.numel()
        kinds = {
            "delta": Kind(DELTA[self.job.compress], (probes, n)),
            "report/": Kind(("F64", "F32", "I64", "BOOL"), (probes,), times=8),
        }
        if self.job.compress == "int8":
            kinds["scale"] = Kind(("F32",), (probes, -(-n // BLOCK)))
        if self._sends_more:
            kinds["extra/"] = Kind(FLOATS, None, 2 * probes * n + SLACK_VALUES, times=8)
        return Budget(kinds)

    def _meet_absent(self, task: Task) -> dict[int, str]:
        """Sites that have not joined, and why; one that can join does, and trains from the next round on, when its
        weight is known."""
        wanted = [k for k in task.clients if k in self.absent]
        if not wanted or self.meet is None:
            return {k: self.absent[k] for k in wanted}
        sizes, reasons = self.meet(wanted)
        for client, size in sizes.items():
            self.sizes[client] = size
            del self.absent[client]
        self.absent |= reasons
        return {k: reasons.get(k, "has joined and trains from the next round") for k in wanted}

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        return self._counts.validate(candidates, clients)

    def confusion(self, x: Tensor, split: str) -> np.ndarray:
        """As the protocol says; (1, 2) correct and all samples where class counts stay at the sites."""
        if split == "test" and self.test is not None:
            return confusion_on(self.model, Split(self.test, self.job.transform, self.job.n_classes))(x)
        found = self._confusions(x, split)
        fair = split == "validation" and -1 not in found
        return self._open.fair_sum(found) if fair else np.asarray(sum(found.values()))

    def confusions(self, x: Tensor) -> dict[int, np.ndarray]:
        return {} if self.job.reveal == "sums" else self._confusions(x, "validation")

    def _confusions(self, x: Tensor, split: str) -> dict[int, np.ndarray]:
        if self._answered is None or self._answered[0] is not x or split not in self._answered[1]:
            # Whoever asks for the test asks for the validation next: one exchange answers both.
            splits = ["test", "validation"] if split == "test" else [split]
            self._answered = (x, self._counts.confusions(x, splits, self.present, self.members))
        return self._answered[1][split]

    @property
    def takes_rivals(self) -> bool:
        """Under masks a model is asked about once: sums of the same model at several learning rates would tell more of
        a site that misses some of them."""
        return self.job.updates != "masked"

    @property
    def tells_scores(self) -> bool:
        return self.job.reveal != "totals"

    def scores(self, x: Tensor, split: str, decisions: Decisions | None = None) -> Iterator[tuple[int, Scores]]:
        """As the protocol says; nothing where class counts stay at the sites, since these counts would tell them."""
        n, rules = self.job.n_classes, decisions or Decisions()
        if split == "test" and self.test is not None:
            batches = Split(self.test, self.job.transform, n).batches()
            yield -1, scores_on(model_logits(self.model, x, batches), n, rules.common)
        elif self.tells_scores:
            yield from self._counts.scores(x, split, rules, self.present, self.members)[0].items()

    def site_decisions(self, x: Tensor, goal: SiteGoal) -> dict[int, Decision]:
        """Found at the sites, where they stay unless counts per class may leave: then nothing comes back."""
        asked = {k: Parcel({**self.about(k), "goal": goal.to_json()}, {"x": x}) for k in self.present}
        read = partial(read_decision, n_classes=self.job.n_classes)
        replies = self.ask(Phase.DECIDE, asked, read, self.members, {})
        return {k: replace(one, costs=goal.common.costs) for k, one in replies.items() if one is not None}

    def validate_scores(self, candidates: Candidates, clients: Sequence[int]) -> Iterator[tuple[int, Scores]]:
        """One exchange per candidate: counts of all of them at once would be a large message."""
        asked, s = list(clients), 0
        while s < len(candidates):
            parts, there = self._counts.scores(candidates.vector(s), "validation", Decisions(), asked, len(clients))
            if len(there) < len(asked) and s:  # candidates are compared on the same samples: again, without who left
                asked, s = there, 0
                continue
            asked, pooled = there, total(parts.values())
            assert pooled is not None
            yield s, pooled
            s += 1

    def measure(self, x: Tensor, what: str) -> dict[int, Tensor]:
        asked = {k: Parcel({**self.about(k), "what": what}, {"x": x}) for k in self.present}
        kinds = {"value": Kind(FLOATS, measurement_shape(what, self.job.n_classes, self.model))}

        def read(client: int, parcel: Parcel) -> Tensor:
            return read_measurement(client, parcel, what, int(self.sizes[client]) * self._views)

        return self.ask(Phase.MEASURE, asked, read, self.members, kinds)

    def commit(self, choice: dict[int, int]) -> None:
        """Travels with the next training message: a message of its own would cost a whole exchange."""
        self._commits |= {client: (self.round, probe) for client, probe in choice.items()}

    def state(self) -> dict[int, Tensors]:
        """Which probe each client is to keep; what it keeps stays at the site."""
        return {k: {"commit": torch.tensor(v)} for k, v in self._commits.items()}

    def load_state(self, state: dict[int, Tensors]) -> None:
        self._commits = {k: (int(v["commit"][0]), int(v["commit"][1])) for k, v in state.items()}

    def info(self) -> dict[str, Any]:
        return {
            "engine": self.transport.name,
            "path": "remote",
            "device": "sites",
            "candidates": self.candidates,
            "reveal": self.job.reveal,
            "updates": self.job.updates,
        }

    def close(self) -> None:
        self.transport.close()

    def drain(self) -> list[Refusal]:
        """Faults since the last call, for the round's history."""
        out, self.faults = self.faults, []
        return out

    def _most_steps(self, client: int, task: Task) -> float:
        """Steps a client can possibly take; it says how many it took, and its norm bound grows with them.

        Up to rate 1 an epoch is at most C times as long as the data; beyond, a class of one sample is repeated up to
        n^rate times, and rounding up adds the data once more. Balanced batches hold B // C samples of the largest
        class, whatever the rate.
        """
        local, row = self.job.local, task.clients.index(client)
        size = float(self.sizes[client]) * self._views
        if self._sampler == "balanced":
            return local.epochs * np.ceil(size / max(batch_of(local) // self.job.n_classes, 1))
        rate = float(task.probes["rate"][row].max())
        longest = self.job.n_classes * size if rate <= 1 else self.job.n_classes * size**rate + size
        return local.epochs * (np.ceil(longest / batch_of(local)) + 1)
