"""The engine of a federation whose server is trusted: what the round loop asks for, as messages to sites.

Sites send updates and counts of their own. What they send is checked against what was agreed, and none counts for more
than a fair share of the samples that it claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.core.decisions import Decision, Decisions, SiteGoal
from fedtail.core.records import DIVERGED, Measurement, Refusal, Task, Tensors, Update
from fedtail.core.robust import fairly
from fedtail.core.scores import ONE, Scores
from fedtail.core.totals import total
from fedtail.data.federation import Samples
from fedtail.errors import FedtailError
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.limits import FLOATS, Budget, Kind, WireError, whole
from fedtail.federate.protocol.transport import Phase, Traffic, Transport, exchange
from fedtail.federate.protocol.wire import MOST, Parcel, pack_candidates, pack_task, unpack_update
from fedtail.models.flat import FlatModel
from fedtail.rounds.acceptance import least
from fedtail.rounds.evaluation import Split, confusion_on, model_logits, scores_on
from fedtail.rounds.plan import batch_of

SLACK_VALUES = 1 << 22
"""Numbers that a method may send or measure which have nothing to do with the model's size: sums per class, say."""
T = TypeVar("T")


class Unmeasured(FedtailError):
    """A method wants to know of single sites what none of them tells."""

    def __init__(self, method: str, what: str) -> None:
        super().__init__(f"method {method!r} measures single sites ({what}), which only the simulator does")


@dataclass
class RemoteEngine:
    """A ``rounds.state.Engine`` whose clients are sites, reached by messages; it holds no client data."""

    transport: Transport
    job: Job
    sizes: np.ndarray
    """(K,) training samples per client, from the handshake ..."""
    validation_sizes: Sequence[int]
    """... and validation samples."""
    timeout: float | None = 600.0
    """Seconds to wait for the replies of one exchange."""
    quorum: float = 1.0
    """Least share of the asked clients that must answer a validation."""
    test: Samples | None = None
    """The server's own test set; without one, tests are pooled over the sites' test splits."""
    real: bool = False
    """Whether sites may be hostile, and so count for no more than a fair share of the validation samples they claim."""
    takes_rivals = True
    faults: list[Refusal] = field(default_factory=list)
    """Clients that did not answer outside training, since the last round."""
    traffic: Traffic = field(default_factory=Traffic)
    _test_sizes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.n_clients, self.round, self._all = len(self.sizes), 0, range(len(self.sizes))
        self.model, self._method = FlatModel(self.job.build_model()), self.job.build_method()
        self._confusion: tuple[Tensor, dict[str, dict[int, np.ndarray]]] | None = None
        self._commits: dict[int, tuple[int, int]] = {}

    def _about(self, client: int) -> dict[str, Any]:
        """What every message says."""
        return {"job": self.job.to_json(), "client": client}

    def _exchange(
        self, phase: Phase, parcels: Mapping[int, Parcel], read: Callable[[int, Parcel], T], budget: Budget
    ) -> tuple[dict[int, T], list[Refusal]]:
        """What ``read`` makes of the replies, in ascending order of clients, and why the others are missing."""
        answers = exchange(self.transport, phase, parcels, read, self.timeout, budget)
        self.traffic += answers.traffic
        return answers.good, [Refusal(k, self.round, str(why), why.code) for k, why in answers.reasons.items()]

    def _ask(
        self,
        phase: Phase,
        clients: Sequence[int],
        told: Parcel | Callable[[int], Parcel],
        read: Callable[[int, Parcel], T],
        kinds: Mapping[str, Kind],
        wanted: int = 0,
    ) -> dict[int, T]:
        """Replies of a quorum of ``wanted`` clients, by default of those that are asked, to what all are told, or each;
        who is missing goes into ``faults``. ``kinds``: what a reply holds."""
        each = {k: told(k) if callable(told) else told for k in clients}
        parcels = {k: Parcel({**self._about(k), **one.meta}, one.tensors) for k, one in each.items()}
        replies, refusals = self._exchange(phase, parcels, read, Budget(kinds))
        self.faults += [replace(r, reason=f"{phase}: {r.reason}") for r in refusals]
        if len(replies) < (needed := least(self.quorum, wanted or len(clients))):
            first = "; ".join(f"client {r.client}: {r.reason}" for r in refusals[:3]) or "no replies"
            raise FedtailError(
                f"round {self.round}: {len(replies)} of {wanted or len(clients)} clients answered {phase.value!r}, but "
                f"{needed} are needed (run.quorum = {self.quorum:g}; {first})"
            )
        return replies

    # -- training ------------------------------------------------------------------------------------------------

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        self.round = task.round
        parcels = {}
        for row, client in enumerate(task.clients):
            meta = self._about(client)
            if client in self._commits:
                done, probe = self._commits[client]
                meta["commit"] = {"round": done, "probe": probe}
            parcels[client] = pack_task(task, row, meta)

        def read(client: int, parcel: Parcel) -> Update:
            size = int(self.sizes[client])
            update = read_update(client, parcel, task, self._most_steps(client, task), size)
            task.advance(1.0 / len(parcels))
            return update

        replies, refusals = self._exchange(Phase.TRAIN, parcels, read, self._update_budget(task))
        return list(replies.values()), refusals

    def _update_budget(self, task: Task) -> Budget:
        """The update, the numbers that were asked for, and what the method may send beside it."""
        probes, n = task.n_probes, task.x.numel()
        kinds = {
            "delta": Kind(FLOATS, (probes, n)),
            "report/": Kind(("F64", "F32", "I64", "BOOL"), (probes,), times=8),
        }
        if self._method.wire != "nothing":
            kinds["extra/"] = Kind(FLOATS, None, 2 * probes * n + SLACK_VALUES, times=8)
        return Budget(kinds)

    def _most_steps(self, client: int, task: Task) -> float:
        """Steps a client can possibly take; it says how many it took, and its norm bound grows with them.

        Up to rate 1 an epoch is at most C times as long as the data; beyond, a class of one sample is repeated up to
        n^rate times, and rounding up adds the data once more. Balanced batches hold B // C samples of the largest
        class, whatever the rate.
        """
        local, row = self.job.local, task.clients.index(client)
        size = float(self.sizes[client])
        if self._method.sampler == "balanced":
            return local.epochs * np.ceil(size / max(batch_of(local) // self.job.n_classes, 1))
        rate = float(task.probes["rate"][row].max())
        longest = self.job.n_classes * size if rate <= 1 else self.job.n_classes * size**rate + size
        return local.epochs * (np.ceil(longest / batch_of(local)) + 1)

    def commit(self, choice: dict[int, int]) -> None:
        """Travels with the next training message: a message of its own would cost a whole exchange."""
        self._commits |= {client: (self.round, probe) for client, probe in choice.items()}

    def state(self) -> dict[int, Tensors]:
        """Which probe each client is to keep; what it keeps stays at the site."""
        return {k: {"commit": torch.tensor(v)} for k, v in self._commits.items()}

    def load_state(self, state: dict[int, Tensors]) -> None:
        self._commits = {k: (int(v["commit"][0]), int(v["commit"][1])) for k, v in state.items()}

    # -- counting ------------------------------------------------------------------------------------------------

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        shape = (len(candidates), 3, self.job.n_classes)

        def read(client: int, parcel: Parcel) -> np.ndarray:
            """Every candidate is counted on the same samples, as many as the handshake says."""
            counts = read_counts(parcel, "counts")
            self._check_total(client, "validation", counts[:, 1:].sum(axis=-1))
            if (counts[:, 0] > counts[:, 1:].min(axis=1)).any():
                raise WireError("more samples right than there are", "out-of-range")
            return counts

        kinds = {"counts": Kind(("I64",), shape)}
        return self._fair_sum(self._ask(Phase.VALIDATE, clients, pack_candidates(candidates), read, kinds))

    def confusion(self, x: Tensor, split: str) -> np.ndarray:
        if split == "test" and self.test is not None:
            return confusion_on(self.model, Split(self.test, self.job.transform, self.job.n_classes))(x)
        found = self._confusions(x, split)
        return self._fair_sum(found) if split == "validation" else np.asarray(sum(found.values()))

    def confusions(self, x: Tensor) -> dict[int, np.ndarray]:
        return self._confusions(x, "validation")

    def _confusions(self, x: Tensor, split: str) -> dict[int, np.ndarray]:
        """Client -> its confusion matrix. Whoever asks for the test asks for the validation next: one exchange answers
        both."""
        if self._confusion is None or self._confusion[0] is not x or split not in self._confusion[1]:
            splits, n = ["test", "validation"] if split == "test" else [split], self.job.n_classes

            def read(client: int, parcel: Parcel) -> list[np.ndarray]:
                found = [read_counts(parcel, name) for name in splits]
                for name, counts in zip(splits, found, strict=True):
                    self._check_total(client, name, counts.sum(keepdims=True))
                return found

            asked, kinds = Parcel({"splits": splits}, {"x": x}), dict.fromkeys(splits, Kind(("I64",), (n, n)))
            replies = self._ask(Phase.CONFUSION, self._all, asked, read, kinds)
            self._confusion = (x, {s: {k: one[i] for k, one in replies.items()} for i, s in enumerate(splits)})
        return self._confusion[1][split]

    def scores(self, x: Tensor, split: str, decisions: Decisions | None = None) -> Iterator[tuple[int, Scores]]:
        n, rules = self.job.n_classes, decisions or Decisions()
        if split == "test" and self.test is not None:
            batches = Split(self.test, self.job.transform, n).batches()
            yield -1, scores_on(model_logits(self.model, x, batches), n, rules.common)
        else:
            yield from self._scores(x, split, rules, self._all, self.n_clients).items()

    def _scores(
        self, x: Tensor, split: str, rules: Decisions, clients: Sequence[int], wanted: int
    ) -> dict[int, Scores]:
        none = vars(Scores.of(np.empty((0, self.job.n_classes)), np.empty(0)))

        def asked(client: int) -> Parcel:
            return Parcel({"split": split, "decision": rules.at(client).to_json()}, {"x": x})

        def read(client: int, parcel: Parcel) -> Scores:
            found = Scores(**{name: read_counts(parcel, name) for name in none})
            self._check_total(client, split, np.array([found.confusion.sum(), *found.bins.sum(axis=(1, 2)), found.n]))
            most = max(found.sums.max(), found.tempered.max())
            if (found.cells[1] > found.cells[0]).any() or most > 128 * ONE * found.n:
                raise WireError("sums of scores that cannot be", "out-of-range")
            return found

        kinds = {name: Kind(("I64",), part.shape) for name, part in none.items()}
        return self._ask(Phase.SCORES, clients, asked, read, kinds, wanted)

    def validate_scores(self, candidates: Candidates, clients: Sequence[int]) -> Iterator[tuple[int, Scores]]:
        """One exchange per candidate: counts of all of them at once would be a large message."""
        asked, s = list(clients), 0
        while s < len(candidates):
            parts = self._scores(candidates.vector(s), "validation", Decisions(), asked, len(clients))
            if len(parts) < len(asked) and s:  # candidates are compared on the same samples: again, without who left
                asked, s = list(parts), 0
                continue
            asked, pooled = list(parts), total(parts.values())
            assert pooled is not None
            yield s, pooled
            s += 1

    def _check_total(self, client: int, split: str, totals: np.ndarray) -> None:
        """The samples of a split are as many as agreed in the handshake or, for tests, as many as the first time."""
        first = int(totals.flat[0]) if totals.size else 0
        held = split == "validation"
        agreed = int(self.validation_sizes[client]) if held else self._test_sizes.setdefault(client, first)
        if (totals != agreed).any():
            raise WireError(f"counts of {first} samples of its {split} split, which has {agreed}", "changed")

    def _fair_sum(self, counts: Mapping[int, np.ndarray]) -> np.ndarray:
        """The sum, to which nobody adds more than a fair share of the samples: their number is what a site says."""
        if self.real:
            sizes = np.array([self.validation_sizes[k] for k in counts], dtype=np.float64)
            kept = fairly(sizes)
            scale = dict(zip(counts, kept / np.maximum(sizes, 1), strict=True))
            small = {k: np.floor(v * scale[k]).astype(np.int64) for k, v in counts.items() if scale[k] < 1 - 1e-9}
            counts = {**counts, **{k: v for k, v in small.items() if self.validation_sizes[k]}}
        return np.asarray(np.sum(list(counts.values()), axis=0))

    # -- the rest ------------------------------------------------------------------------------------------------

    def site_decisions(self, x: Tensor, goal: SiteGoal) -> dict[int, Decision]:
        def read(client: int, parcel: Parcel) -> Decision:
            try:
                found = Decision.from_json(parcel.meta.get("decision") or {})
                found.check(self.job.n_classes)
            except (TypeError, ValueError, AttributeError) as error:
                raise WireError(f"malformed decision: {error}") from None
            return found

        replies = self._ask(Phase.DECIDE, self._all, Parcel({"goal": goal.to_json()}, {"x": x}), read, {})
        return {k: replace(one, costs=goal.common.costs) for k, one in replies.items()}

    def measure(self, x: Tensor, what: Measurement) -> dict[int, Tensor]:
        raise Unmeasured(self._method.name, what.name)

    def info(self) -> dict[str, Any]:
        return {"engine": self.transport.name, "path": "remote", "device": "sites", "trust": "server"}

    def close(self) -> None:
        """The transport belongs to whoever made it."""


def read_update(client: int, parcel: Parcel, task: Task, most: float, size: int) -> Update:
    """The update of a reply that belongs to this client and round; ``WireError`` otherwise. ``most``: local steps that
    are possible; ``size``: training samples, as the handshake has it."""
    update, answered = unpack_update(parcel, most), parcel.meta.get("round")
    if update.client != client or answered != task.round:
        raise WireError(
            f"reply is for client {update.client} in round {whole(answered, 0, MOST, 'round')}, expected client "
            f"{client} in round {task.round}"
        )
    if update.n_samples != size:
        raise WireError(f"it says it has {update.n_samples} training samples, in the handshake {size}", "changed")
    runs = len(update.delta) if update.delta.ndim else 0
    if not runs == len(update.steps) == len(update.loss):
        raise WireError(f"malformed update: {runs} runs, {len(update.steps)} step counts, {len(update.loss)} losses")
    if extra := set(update.reports) - {*task.reports, DIVERGED}:
        raise WireError(f"{len(extra)} reports that were not asked for", "unexpected")
    return update


def read_counts(parcel: Parcel, name: str) -> np.ndarray:
    """Counts, whose shape their budget has checked, and none of which is negative; ``WireError`` otherwise."""
    counts = parcel.tensors.get(name)
    if counts is None or bool((counts < 0).any()):
        raise WireError(f"malformed counts: no {name!r}, or negative ones")
    return counts.numpy()
