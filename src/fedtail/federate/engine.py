"""The engine of every real federation: what the round loop asks for, as messages over a transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.core.decisions import Decision, Decisions, SiteGoal
from fedtail.core.masks import CHECKS, Release
from fedtail.core.records import DIVERGED, Refusal, Task, Tensors, Update
from fedtail.core.robust import capped, fair_share
from fedtail.core.scores import ONE, Scores, total
from fedtail.data.federation import Samples
from fedtail.errors import FedtailError, one_of
from fedtail.federate.protocol.compress import BLOCK
from fedtail.federate.protocol.exchange import exchange
from fedtail.federate.protocol.faults import CODES
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.limits import FLOATS, Budget, Kind, WireError
from fedtail.federate.protocol.sums import LEAST, MASKED, ORDER, as_masked, size_of_counts
from fedtail.federate.protocol.transport import Phase, Transport
from fedtail.federate.protocol.wire import Parcel, pack_candidates, pack_task
from fedtail.federate.replies import read_counts, read_decision, read_measurement, read_update, refused
from fedtail.federate.spool import StoredUpdate
from fedtail.federate.sums import Sums, pools, read_masked_counts, sum_of_counts
from fedtail.models.flat import FlatModel
from fedtail.rounds.batches import batch_of
from fedtail.rounds.evaluation import Split, confusion_on, measurement_shape, model_logits, scores_on

CANDIDATES = ("affine", "models")
SLACK_VALUES = 1 << 22
"""Numbers that a method may send or measure which have nothing to do with the model's size: sums per class, say."""
DELTA = {"none": ("F32", "F64"), "bf16": ("BF16",), "int8": ("I8",)}
"""How an update travels, by ``deploy.compress``."""
T = TypeVar("T")


@dataclass
class Traffic:
    """Bytes handed to the transport and got back, and exchanges made; per round, for history and benchmarks."""

    down: int = 0
    up: int = 0
    exchanges: int = 0


@dataclass
class RemoteEngine:
    """A ``rounds.engine.Engine`` whose clients are sites, reached by messages; it holds no client data."""

    transport: Transport
    job: Job
    sizes: np.ndarray
    """(K,) training samples per client, from the handshake."""
    test: Samples | None = None
    """The server's own test set; without one, tests are pooled over the sites' test splits."""
    timeout: float | None = 600.0
    """Seconds to wait for the replies of one exchange."""
    quorum: float = 1.0
    """Least share of the asked clients that must answer a validation or measurement."""
    candidates: str = "affine"
    """How FedHOO's candidates travel: ``affine`` (base and one direction per client) or ``models`` (built by the
    server, in an order only it knows)."""
    models_per_message: int = 8
    """With ``models``: candidates sent at a time, which bounds the size of a message."""
    absent: dict[int, str] = field(default_factory=dict)
    """Clients that were not there when the run began, and why; one that ``meet`` takes trains from the next round."""
    gone: set[int] = field(default_factory=set)
    """Clients that have left for good: not asked, and not counted for a quorum."""
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
    """Needed where the job's ``reveal`` is ``sums``."""
    faults: list[Refusal] = field(default_factory=list)
    """Clients that did not answer outside training, since the last ``drain``."""
    traffic: Traffic = field(default_factory=Traffic)
    seen: dict[int, float] = field(default_factory=dict)
    """When each client last answered."""

    def __post_init__(self) -> None:
        if self.candidates not in CANDIDATES:
            raise one_of("deploy.candidates", self.candidates, CANDIDATES)
        self.n_clients = len(self.sizes)
        self.model = FlatModel(self.job.build_model())
        self._method = self.job.build_method()
        self._sampler, self._sends_more = self._method.sampler, self._method.wire != "nothing"
        self._views = self.job.encoding.views if self.job.encoding else 1
        self._round = 0
        self._test_sizes: dict[int, int] = {}
        self._answered: tuple[Tensor, dict[str, dict[int, np.ndarray]]] | None = None
        self._commits: dict[int, tuple[int, int]] = {}

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        self._round = task.round
        payloads = {}
        late = self._meet_absent(task)
        for row, client in enumerate(task.clients):
            if client in late:
                continue
            meta = self._meta(client)
            if client in self._commits:
                done, probe = self._commits[client]
                meta["commit"] = {"round": done, "probe": probe}
            payloads[client] = pack_task(task, row, meta)
        if self.job.updates == "masked":
            updates, refusals = self._train_masked(task, payloads)
            refusals += [Refusal(k, task.round, reason) for k, reason in late.items()]
            return updates, sorted(refusals, key=lambda r: r.client)
        most = {k: self._most_steps(k, task) for k in payloads}
        one = task.n_probes * task.x.numel() * task.x.element_size()
        spool = self.spool if len(payloads) * one > self.memory_mb * 1e6 else None

        def read(client: int, parcel: Parcel) -> Update:
            update = read_update(client, parcel, task, most[client], int(self.sizes[client]) * self._views)
            task.advance(1.0 / len(payloads))
            return update if spool is None else StoredUpdate(update, spool)

        replies, refusals = self._exchange(Phase.TRAIN, payloads, read, self._update_budget(task))
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

    def _train_masked(self, task: Task, payloads: Mapping[int, Parcel]) -> tuple[list[Update], list[Refusal]]:
        """One update for each axis of a search, or for all clients: their weighted mean, and nothing of each."""
        assert self.sums is not None
        steps = {k: self._most_steps(k, task) for k in payloads}
        sets, refusals = pools(task, payloads, self.sums, self.sizes, self.job, self._method, steps)
        size = task.n_probes * (task.x.numel() + 1 + (DIVERGED in task.reports)) + CHECKS
        mine = {k: pool for pool in sets for k in pool.clients}
        asked = {
            k: Parcel({**payloads[k].meta, ORDER: pool.order.to_json()}, payloads[k].tensors)
            for k, pool in mine.items()
        }

        def add(client: int, parcel: Parcel) -> None:
            mine[client].add(client, as_masked(parcel.tensors, size, np.uint32))

        budget = Budget({MASKED: Kind(("I32",), (size,))})
        _, missing = self._exchange(Phase.TRAIN, asked, add, budget)
        left = [pool for pool in sets if len(pool.there) >= LEAST]
        few = [
            Refusal(k, task.round, CODES["mask-few"], "mask-few")
            for pool in sets
            if pool not in left
            for k in pool.there
        ]
        asked = {k: Parcel({**self._meta(k), ORDER: pool.survivors().to_json()}) for pool in left for k in pool.there}

        def take(client: int, parcel: Parcel) -> Release:
            return mine[client].read_release(client, parcel)

        releases, silent = self._exchange(Phase.UNMASK, asked, take, Budget(meta=1 << 22, items=1 << 16))
        updates = []
        for pool in left:
            found, reason = pool.update({k: releases[k] for k in pool.there if k in releases}, task, self.sizes, steps)
            if found is not None:
                updates.append(found)
            said = {r.client: r.reason for r in silent}
            few += [Refusal(k, task.round, said.get(k, reason)) for k in pool.there if reason]
        return updates, refusals + missing + few

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
        return {k: reasons.get(k, "has joined; it trains from the next round on") for k in wanted}

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        if self.job.reveal == "sums":
            return self._validate_masked(candidates, clients)
        counts = {k: np.zeros((len(candidates), 3, self.job.n_classes), dtype=np.int64) for k in clients}
        for rows, parcel in self._candidate_messages(candidates):
            # Candidates are compared on the same samples: who misses one message counts in none.
            asked = {k: Parcel(self._meta(k), parcel.tensors) for k in counts}
            shape = (len(rows), 3, self._revealed)
            read = partial(self._read_candidate_counts, shape=shape)
            replies = self._ask(Phase.VALIDATE, asked, read, len(clients), {"counts": Kind(("I64",), shape)})
            counts = {k: v for k, v in counts.items() if k in replies}
            for k, found in replies.items():
                counts[k][rows, :, : found.shape[-1]] = found
        return self._fair_sum(counts)

    def _read_candidate_counts(self, client: int, parcel: Parcel, shape: tuple[int, ...]) -> np.ndarray:
        """Every candidate is counted on the same samples, as many as the handshake says."""
        counts = read_counts(client, parcel, "counts", shape)
        self._check_total(client, "validation", counts[:, 1:].sum(axis=-1))
        if (counts[:, 0] > counts[:, 1:].min(axis=1)).any():
            raise WireError("more samples right than there are", "out-of-range")
        return counts

    def _check_total(self, client: int, split: str, totals: np.ndarray) -> None:
        """The samples of a split are as many as agreed in the handshake or, for tests, as many as the first time."""
        if split == "validation" and self.validation_sizes is None:
            return
        first = int(totals.flat[0]) if totals.size else 0
        known = self.validation_sizes if split == "validation" else self._test_sizes
        assert known is not None
        agreed = int(known.setdefault(client, first) if isinstance(known, dict) else known[client])
        if (totals != agreed).any():
            raise WireError(f"counts of {first} samples of its {split} split, which has {agreed}", "changed")

    def _fair_sum(self, counts: Mapping[int, np.ndarray]) -> np.ndarray:
        """The sum, to which nobody adds more than a fair share of the samples: their number is what a site says."""
        held = self.validation_sizes
        if held is not None and self.real:
            sizes = np.array([held[k] for k in counts], dtype=np.float64)
            kept = capped(sizes, fair_share(int((sizes > 0).sum())))
            scale = dict(zip(counts, kept / np.maximum(sizes, 1), strict=True))
            small = {k: np.floor(v * scale[k]).astype(np.int64) for k, v in counts.items() if scale[k] < 1 - 1e-9}
            counts = {**counts, **{k: v for k, v in small.items() if held[k]}}
        return np.asarray(np.sum(list(counts.values()), axis=0))

    def _validate_masked(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        """The same from masked sums. Who misses one message counts in none, so all of them are asked again."""
        counts = np.zeros((len(candidates), 3, self.job.n_classes), dtype=np.int64)
        for rows, parcel in self._candidate_messages(candidates):
            shapes = {"counts": (len(rows), 3, self.job.n_classes)}
            found, there = self._sum(Phase.VALIDATE, parcel, shapes, clients, len(clients))
            if len(there) < len(clients) and len(rows) < len(candidates):
                return self._validate_masked(candidates, there)
            counts[rows] = found["counts"]
        return counts

    def _sum(
        self, phase: Phase, parcel: Parcel, shapes: Mapping[str, tuple[int, ...]], clients: Sequence[int], wanted: int
    ) -> tuple[dict[str, np.ndarray], list[int]]:
        """Named counts added over clients under masks, and the clients. Where some do not answer, the others are asked
        for a new sum; whether they give it is theirs to decide."""
        assert self.sums is not None
        members, read = self.sums.members(clients), partial(read_masked_counts, shapes=shapes)
        wanted = min(wanted, len(members))
        while True:
            order = {ORDER: self.sums.order(members).to_json()}
            asked = {k: Parcel({**self._meta(k), **parcel.meta, **order}, parcel.tensors) for k in members}
            kind = Kind(("I64",), (size_of_counts(shapes) + CHECKS,))
            replies = self._ask(phase, asked, read, wanted, {MASKED: kind})
            if len(replies) == len(members):
                self.sums.last = tuple(members)
                return sum_of_counts(replies, shapes), members
            members = list(replies)

    def confusion(self, x: Tensor, split: str) -> np.ndarray:
        """As the protocol says; (1, 2) correct and all samples where class counts stay at the sites."""
        if split == "test" and self.test is not None:
            return confusion_on(self.model, Split(self.test, self.job.transform, self.job.n_classes))(x)
        found = self._confusions(x, split)
        return self._fair_sum(found) if split == "validation" and -1 not in found else np.asarray(sum(found.values()))

    def confusions(self, x: Tensor) -> dict[int, np.ndarray]:
        return {} if self.job.reveal == "sums" else self._confusions(x, "validation")

    def _confusions(self, x: Tensor, split: str) -> dict[int, np.ndarray]:
        if self._answered is None or self._answered[0] is not x or split not in self._answered[1]:
            # Whoever asks for the test asks for the validation next: one exchange answers both.
            self._answered = (x, self._ask_confusion(x, ["test", "validation"] if split == "test" else [split]))
        return self._answered[1][split]

    def _ask_confusion(self, x: Tensor, splits: list[str]) -> dict[str, dict[int, np.ndarray]]:
        n = self.job.n_classes
        if self.job.reveal == "sums":
            question = Parcel({"splits": splits}, {"x": x})
            shapes = dict.fromkeys(splits, (n, n))
            found, _ = self._sum(Phase.CONFUSION, question, shapes, self._present, self._members)
            return {split: {-1: counts} for split, counts in found.items()}
        shape = (2,) if self.job.reveal == "totals" else (n, n)
        asked = {k: Parcel({**self._meta(k), "splits": splits}, {"x": x}) for k in self._present}

        def read(client: int, parcel: Parcel) -> list[np.ndarray]:
            found = [read_counts(client, parcel, split, shape) for split in splits]
            for split, counts in zip(splits, found, strict=True):
                self._check_total(client, split, counts[1:] if shape == (2,) else counts.sum(keepdims=True))
                if shape == (2,) and counts[0] > counts[1]:
                    raise WireError("more samples right than there are", "out-of-range")
            return found

        kinds = dict.fromkeys(splits, Kind(("I64",), shape))
        replies = self._ask(Phase.CONFUSION, asked, read, self._members, kinds)
        matrix = (1, 2) if shape == (2,) else shape
        return {split: {k: one[i].reshape(matrix) for k, one in replies.items()} for i, split in enumerate(splits)}

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
            yield from self._ask_scores(x, split, rules, self._present, self._members)[0].items()

    def site_decisions(self, x: Tensor, goal: SiteGoal) -> dict[int, Decision]:
        """Found at the sites, where they stay unless counts per class may leave: then nothing comes back."""
        asked = {k: Parcel({**self._meta(k), "goal": goal.to_json()}, {"x": x}) for k in self._present}
        read = partial(read_decision, n_classes=self.job.n_classes)
        replies = self._ask(Phase.DECIDE, asked, read, self._members, {})
        return {k: replace(one, costs=goal.common.costs) for k, one in replies.items() if one is not None}

    def validate_scores(self, candidates: Candidates, clients: Sequence[int]) -> Iterator[tuple[int, Scores]]:
        """One exchange per candidate: counts of all of them at once would be a large message."""
        asked, s = list(clients), 0
        while s < len(candidates):
            parts, there = self._ask_scores(candidates.vector(s), "validation", Decisions(), asked, len(clients))
            if len(there) < len(asked) and s:  # candidates are compared on the same samples: again, without who left
                asked, s = there, 0
                continue
            asked, pooled = there, total(parts.values())
            assert pooled is not None
            yield s, pooled
            s += 1

    def _ask_scores(
        self, x: Tensor, split: str, rules: Decisions, clients: Sequence[int], wanted: int
    ) -> tuple[dict[int, Scores], list[int]]:
        """The counts of each client, or under -1 of all together, and the clients."""
        n = self.job.n_classes
        shapes = {name: value.shape for name, value in vars(Scores.of(np.empty((0, n)), np.empty(0))).items()}
        if self.job.reveal == "sums":
            if rules.sites:
                raise FedtailError("decisions of single sites need their own counts; set deploy.reveal = 'classes'")
            question = Parcel({"split": split, "decision": rules.common.to_json()}, {"x": x})
            found, there = self._sum(Phase.SCORES, question, shapes, clients, wanted)
            return {-1: Scores(**found)}, there
        asked = {
            k: Parcel({**self._meta(k), "split": split, "decision": rules.at(k).to_json()}, {"x": x}) for k in clients
        }

        def read(client: int, parcel: Parcel) -> Scores:
            found = Scores(**{name: read_counts(client, parcel, name, shape) for name, shape in shapes.items()})
            self._check_total(client, split, np.array([found.confusion.sum(), *found.bins.sum(axis=(1, 2)), found.n]))
            most = max(found.sums.max(), found.tempered.max())
            if (found.cells[1] > found.cells[0]).any() or most > 128 * ONE * found.n:
                raise WireError("sums of scores that cannot be", "out-of-range")
            return found

        kinds = {name: Kind(("I64",), shape) for name, shape in shapes.items()}
        replies = self._ask(Phase.SCORES, asked, read, wanted, kinds)
        return replies, list(replies)

    def measure(self, x: Tensor, what: str) -> dict[int, Tensor]:
        asked = {k: Parcel({**self._meta(k), "what": what}, {"x": x}) for k in self._present}
        kinds = {"value": Kind(FLOATS, measurement_shape(what, self.job.n_classes, self.model))}

        def read(client: int, parcel: Parcel) -> Tensor:
            return read_measurement(client, parcel, what, int(self.sizes[client]) * self._views)

        return self._ask(Phase.MEASURE, asked, read, self._members, kinds)

    def commit(self, choice: dict[int, int]) -> None:
        """Travels with the next training message: a message of its own would cost a whole exchange."""
        self._commits |= {client: (self._round, probe) for client, probe in choice.items()}

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

    def _meta(self, client: int) -> dict[str, Any]:
        return {"job": self.job.to_json(), "client": client}

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

    @property
    def _present(self) -> list[int]:
        return [k for k in range(self.n_clients) if k not in self.absent and k not in self.gone]

    @property
    def _members(self) -> int:
        return self.n_clients - len(self.gone)

    @property
    def _revealed(self) -> int:
        return 1 if self.job.reveal == "totals" else self.job.n_classes

    def _exchange(
        self,
        phase: Phase,
        parcels: Mapping[int, Parcel],
        read: Callable[[int, Parcel], T],
        budget: Budget,
    ) -> tuple[dict[int, T], list[Refusal]]:
        """What ``read`` makes of the replies, in ascending order of clients, and why the others are missing."""
        answers = exchange(self.transport, phase, parcels, read, self.timeout, budget)
        self.traffic.down += answers.down
        self.traffic.up += answers.up
        self.traffic.exchanges += 1
        self.seen |= dict.fromkeys(answers.good, time.time())
        return answers.good, [refused(k, self._round, reason) for k, reason in answers.reasons.items()]

    def _ask(
        self,
        phase: Phase,
        parcels: Mapping[int, Parcel],
        read: Callable[[int, Parcel], T],
        wanted: int,
        kinds: Mapping[str, Kind],
    ) -> dict[int, T]:
        """Replies of a quorum of ``wanted`` clients; who is missing goes into ``faults``.

        ``kinds``: what a reply holds.
        """
        replies, refusals = self._exchange(phase, parcels, read, Budget(kinds))
        self.faults += [replace(r, reason=f"{phase}: {r.reason}") for r in refusals]
        if not replies or len(replies) < self.quorum * wanted - 1e-9:
            first = "; ".join(f"client {r.client}: {r.reason}" for r in refusals[:3]) or "no replies"
            raise FedtailError(
                f"round {self._round}: {len(replies)} of {wanted} clients answered {phase.value!r}, fewer than the "
                f"quorum of {self.quorum:g} ({first})"
            )
        return replies

    def _candidate_messages(self, candidates: Candidates) -> Iterator[tuple[np.ndarray, Parcel]]:
        """(which candidates the reply's rows are, message) for one exchange after another."""
        if self.candidates == "affine":
            yield np.arange(len(candidates)), pack_candidates(candidates, {})
            return
        # The system's entropy, not the run's seed: sites know the seed, and the order is what they must not know.
        order = np.random.default_rng().permutation(len(candidates))
        for i in range(0, len(order), self.models_per_message):
            piece = order[i : i + self.models_per_message]
            yield piece, Parcel({}, {"models": torch.stack([candidates.vector(int(s)) for s in piece])})
