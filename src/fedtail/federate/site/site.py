"""The site's side of a real federation: one message in, one reply out.

A site holds its data and its policy. Where the server is trusted, its questions are answered here: training itself is
``rounds.local``, the code the reference simulator runs. Where it is not, a site answers by its own agreements alone
(``site.member``). What goes wrong leaves as a fixed code; the words stay in the site's logs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedtail.core.decisions import Decision, SiteGoal
from fedtail.errors import FedtailError, one_of
from fedtail.federate.protocol.faults import CODES, CodedError
from fedtail.federate.protocol.handshake import versions
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.limits import open_json
from fedtail.federate.protocol.policy import Policy, check_rates
from fedtail.federate.protocol.transport import AGREED, Phase
from fedtail.federate.protocol.wire import (
    META,
    Parcel,
    Parts,
    error_parts,
    pack,
    pack_update,
    size_of,
    unpack,
    unpack_candidates,
    unpack_task,
)
from fedtail.federate.site.audit import Audit
from fedtail.federate.site.ledger import Ledger, message_key
from fedtail.federate.site.prepared import Prepared, SiteData, prepare
from fedtail.files import write_atomically
from fedtail.models.encoders import Encoding, default_encoder, named, open_encoder
from fedtail.rounds.evaluation import Split, confusion_on, count_candidates, model_logits, probabilities_of, scores_on
from fedtail.rounds.local import measure_client, train_client
from fedtail.runs.build import is_images
from fedtail.runs.encoding import choose_encoding
from fedtail.settings import ModelSettings, checked

if TYPE_CHECKING:
    from fedtail.federate.site.member import Member


class Site:
    """Answers a server's messages. ``folder`` keeps method state and the policy's ledger over restarts."""

    def __init__(
        self,
        name: str,
        data: SiteData,
        policy: Policy | None = None,
        folder: Path | None = None,
        device: str = "cpu",
    ) -> None:
        self.name, self.data, self.folder, self.device = name, data, folder, torch.device(device)
        self.policy = policy or Policy()
        self.ledger, self.audit = Ledger(folder), Audit(folder)
        self._prepared: Prepared | None = None
        self._member: Member | None = None

    def handle(self, phase: str, parts: Parts) -> Parts:
        """The reply to one message, noted in the audit log; what goes wrong leaves as a code, and its words stay."""
        began, words = time.perf_counter(), ""
        try:
            reply = self._answer(phase, parts)
        except Exception as error:  # a site must answer, whatever happened
            words = str(error) if isinstance(error, FedtailError) else f"{type(error).__name__}: {error}"
            reply = error_parts(code_of(error))
        self.audit.enter(phase, parts, reply, time.perf_counter() - began, words)
        return reply

    def _answer(self, phase: str, parts: Parts) -> Parts:
        self.policy.check_message(size_of(parts))
        if phase not in list(Phase):
            raise CodedError("malformed", str(one_of("phase", phase, list(Phase))))
        if phase in AGREED:
            return self.member.answer(phase, unpack(parts))
        answer: Callable[[Parcel, str], Parcel] = getattr(self, phase)
        reply = pack(answer(unpack(parts), message_key(phase, parts)))
        open_json(reply[META])  # such as an integer of 309 digits, made of a float in the question
        return reply

    @property
    def member(self) -> Member:
        """The site's part in runs that nobody steers."""
        if self._member is None:
            from fedtail.federate.site.member import Member  # needs the extra of a federation that has keys

            self._member = Member(self.name, self.data, self.policy, self.ledger, self.folder, self.device)
        return self._member

    def hello(self, parcel: Parcel, key: str) -> Parcel:
        """Who is here, with which software and clock; where the server is trusted, also with which data, and with a job
        whether the site takes part."""
        meta: dict[str, Any] = {"site": self.name, "versions": versions(), "clock": time.time()}
        if self.rehearses or self.policy.trust == "server" or "job" in parcel.meta:
            self._need_trust()
            meta["schema"] = self._schema(parcel.meta)
        if "job" in parcel.meta:
            here = self._prepare(parcel)
            meta |= {"n_train": int(here.counts.sum()), "n_validation": len(here.client.validation)}
        return Parcel(meta)

    def _schema(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What must agree across sites: what the data says, and the encoder that is here."""
        schema = self.data.schema()
        encoding = None
        if "job" in asked:
            wanted = Job.from_json(asked["job"]).encoding
            if wanted is not None:
                self.policy.check_encoder(wanted.name)
                try:
                    encoding = open_encoder(wanted.name, wanted.weights).use(wanted.views, wanted.unfreeze)
                except FedtailError as error:
                    raise CodedError("encoder", str(error)) from None
        elif "model" in asked:
            encoding = self._choose(checked(ModelSettings, asked["model"]), schema)
        return schema if encoding is None else {**schema, "encoder": encoding.to_dict()}

    def _choose(self, model: ModelSettings, schema: dict[str, Any]) -> Encoding | None:
        """The encoder that a server's settings mean here, if the policy has nothing against it."""
        images = schema["kind"] == "images" or is_images(schema.get("preprocessing", {}))
        if model.encoder == "auto" and (name := default_encoder()) is not None:
            images = images and (not self.policy.encoders or name in self.policy.encoders)
        elif model.encoder not in ("auto", "none"):
            self.policy.check_encoder(named(model.encoder)[0])
        return choose_encoding(model, tuple(schema.get("input_shape", ())), images=images)

    def statistics(self, parcel: Parcel, key: str) -> Parcel:
        """Sums for a common preprocessing."""
        self._need_trust()
        return Parcel({"statistics": self.data.statistics(parcel.meta.get("request", {}))})

    def train(self, parcel: Parcel, key: str) -> Parcel:
        """Local training: the update, and what the method sends beside it."""
        here = self._prepare(parcel)
        task = unpack_task(parcel)
        self._check_vector(here, task.x)
        check_rates(here.counts, task)
        self.ledger.charge("rounds", key, self.policy.max_rounds_per_day)
        state, committed = here.state.rival(task.rival), parcel.meta.get("commit")
        if committed is not None:
            state.commit(int(committed["round"]), int(committed["probe"]))
        kept = {name: value.to(self.device) for name, value in state.before(task.round).items()}
        update, states = train_client(here.model, here.client, here.method, task, 0, kept, here.job.settings)
        if here.method.client_state != "none":
            state.hold(task.round, states)
        return pack_update(update, {"round": task.round})

    def validate(self, parcel: Parcel, key: str) -> Parcel:
        """(N, 3, C) counts of every candidate on the private validation split."""
        here = self._prepare(parcel)
        candidates = unpack_candidates(parcel)
        self._check_vector(here, candidates.base)
        split = Split.of(here.client, here.client.validation)
        return _counted({"counts": count_candidates(here.model, candidates, split)})

    def confusion(self, parcel: Parcel, key: str) -> Parcel:
        """(C, C) confusion matrix on each split asked for."""
        here = self._prepare(parcel)
        x = parcel.tensors["x"]
        self._check_vector(here, x)
        splits = {"test": here.test, "validation": Split.of(here.client, here.client.validation)}
        return _counted({split: confusion_on(here.model, splits[split])(x) for split in parcel.meta["splits"]})

    def scores(self, parcel: Parcel, key: str) -> Parcel:
        """Counts of a model's probabilities on a split."""
        here = self._prepare(parcel)
        self._check_vector(here, parcel.tensors["x"])
        held = here.test if parcel.meta["split"] == "test" else Split.of(here.client, here.client.validation)
        rule = Decision.from_json(parcel.meta.get("decision", {}))
        batches = held.batches(device=self.device)
        return _counted(
            vars(scores_on(model_logits(here.model, parcel.tensors["x"], batches), here.job.n_classes, rule))
        )

    def decide(self, parcel: Parcel, key: str) -> Parcel:
        """The site's own decision, found on its private split; also in ``decision.json`` here."""
        here = self._prepare(parcel)
        self._check_vector(here, parcel.tensors["x"])
        goal = SiteGoal.from_json(parcel.meta["goal"])
        goal.common.check(here.job.n_classes)
        batches = Split.of(here.client, here.client.validation).batches(device=self.device)
        p, y = probabilities_of(model_logits(here.model, parcel.tensors["x"], batches), here.job.n_classes)
        found = goal.decide(p, y, here.counts)
        if self.folder is not None:
            write_atomically(self.folder / "decision.json", json.dumps(found.to_json()))
        return Parcel({"decision": replace(found, costs=()).to_json()})  # the server knows them, and there may be many

    def measure(self, parcel: Parcel, key: str) -> Parcel:
        """What a method measures of a model at single sites."""
        here = self._prepare(parcel)
        self._check_vector(here, parcel.tensors["x"])
        return Parcel({}, {"value": measure_client(here.model, here.client, parcel.tensors["x"], parcel.meta["what"])})

    def count(self, parcel: Parcel, key: str) -> Parcel:
        """This site's part of counts of a model, without training."""
        self._need_trust()
        from fedtail.federate.counted import answer_plainly

        return _counted({"counts": answer_plainly(parcel, self.data, self.name)})

    def _prepare(self, parcel: Parcel) -> Prepared:
        job, index = Job.from_json(parcel.meta["job"]), int(parcel.meta["client"])
        now = self._prepared
        if now is not None and now.job == job and now.client.index == index:
            return now
        self._need_trust()
        self.policy.check_job(job)
        self._prepared = prepare(self.data, job, index, self.folder, self.device)
        return self._prepared

    def _need_trust(self) -> None:
        """Raise unless this site trusts the server with its rows. A rehearsal's rows are nobody's."""
        if not self.rehearses:
            self.policy.check_trust("server")

    @property
    def rehearses(self) -> bool:
        return bool(self.data.schema()["kind"] == "slice")

    @staticmethod
    def _check_vector(here: Prepared, x: torch.Tensor) -> None:
        if tuple(x.shape) != (here.model.size,):
            raise CodedError(
                "malformed", f"the server sent a model of shape {tuple(x.shape)}, expected ({here.model.size},)"
            )


def code_of(error: Exception) -> str:
    """All that a server hears of what went wrong."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError):
        return "disk"
    code = getattr(error, "code", "site")
    return code if code in CODES else "site"


def _counted(counts: Mapping[str, np.ndarray]) -> Parcel:
    return Parcel({}, {name: torch.as_tensor(value) for name, value in counts.items()})
