"""The site's side of a real federation: one message in, one reply out.

A site holds its data and its policy. Where the server is trusted, its questions are answered here: training itself is
``rounds.local``, the code the reference simulator runs. Where it is not, a site answers by its own agreements alone
(``site.member``). What goes wrong leaves as a fixed code; the words stay in the site's logs.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedtail.core.decisions import Decision, SiteGoal
from fedtail.core.records import Task
from fedtail.errors import FedtailError, one_of
from fedtail.federate.protocol.faults import CODES, CodedError, clean
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.limits import WireError, open_json
from fedtail.federate.protocol.policy import Policy
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
from fedtail.federate.site.config import SiteConfig
from fedtail.federate.site.ledger import Ledger
from fedtail.federate.site.own import open_data
from fedtail.federate.site.prepared import Prepared, SiteData, prepare
from fedtail.federate.site.worker_client import rotate
from fedtail.federate.statistics import tell
from fedtail.models.device import check_device
from fedtail.models.encoders.base import Encoding
from fedtail.models.encoders.opening import default_encoder, named, open_encoder
from fedtail.rounds.evaluation import count_candidates
from fedtail.rounds.local import train_client
from fedtail.runs.build import is_images
from fedtail.runs.encoding import choose_encoding
from fedtail.settings import ModelSettings, checked
from fedtail.version import VERSION

if TYPE_CHECKING:
    from fedtail.federate.site.member import Member


class Site:
    """Answers a server's messages. ``folder`` keeps what must outlive a restart."""

    def __init__(self, name: str, data: SiteData, policy: Policy, folder: Path, device: str = "cpu") -> None:
        self.name, self.data, self.folder, self.device = name, data, folder, torch.device(device)
        self.policy = policy
        self.ledger = Ledger(folder)
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
        note(self.folder / "audit.jsonl", phase, parts, reply, time.perf_counter() - began, words)
        return reply

    def _answer(self, phase: str, parts: Parts) -> Parts:
        self.policy.check_message(size_of(parts))
        if phase not in list(Phase):
            raise CodedError("malformed", str(one_of("phase", phase, list(Phase))))
        parcel = unpack(parts)
        if phase in AGREED:
            return self.member.answer(phase, parcel)
        answer: Callable[[Parcel], Parcel] = getattr(self, phase)
        reply = pack(answer(parcel))
        open_json(reply[META])  # such as an integer of 309 digits, made of a float in the question
        return reply

    @property
    def member(self) -> Member:
        """The site's part in runs by totals."""
        if self._member is None:
            from fedtail.federate.site.member import Member  # needs the extra of a federation that has keys

            self._member = Member(self.name, self.data, self.policy, self.ledger, self.folder, self.device)
        return self._member

    def hello(self, parcel: Parcel) -> Parcel:
        """Who is here, with which software; where the server is trusted, also with which data, and with a job
        whether the site takes part."""
        meta: dict[str, Any] = {"site": self.name, "version": VERSION}
        if rehearses(self.data) or self.policy.trust == "server" or "job" in parcel.meta:
            need_trust(self.policy, self.data)
            encoding = self._encoding(parcel.meta)
            meta["schema"] = self.data.schema() | ({} if encoding is None else {"encoder": encoding.to_dict()})
        if "job" in parcel.meta:
            here = self._prepare(parcel)
            meta |= {"n_train": int(here.counts.sum()), "n_validation": len(here.client.validation)}
        return Parcel(meta)

    def _encoding(self, asked: dict[str, Any]) -> Encoding | None:
        """The encoder of a job as it is here, or the one that a server's settings mean, if the policy has nothing
        against it."""
        if "job" in asked:
            wanted = Job.from_json(asked["job"]).encoding
            return None if wanted is None else encoding_here(wanted, self.policy)
        if "model" not in asked:
            return None
        model, schema = checked(ModelSettings, asked["model"]), self.data.schema()
        images = schema["kind"] == "images" or is_images(schema.get("preprocessing", {}))
        if model.encoder == "auto" and (name := default_encoder()) is not None:
            images = images and (not self.policy.encoders or name in self.policy.encoders)
        elif model.encoder not in ("auto", "none"):
            self.policy.check_encoder(named(model.encoder)[0])
        return choose_encoding(model, tuple(schema.get("input_shape", ())), images=images)

    def statistics(self, parcel: Parcel) -> Parcel:
        """Moments and bin counts for a common preprocessing."""
        need_trust(self.policy, self.data)
        return Parcel({"statistics": tell(self.data, parcel.meta.get("request", {}))})

    def train(self, parcel: Parcel) -> Parcel:
        """Local training: the update, and what the method sends beside it."""
        here, task = self._prepare(parcel), unpack_task(parcel)
        check_vector(here, task.x)
        check_rates(here.counts, task)
        state, committed = here.state.rival(task.rival), parcel.meta.get("commit")
        if committed is not None:
            state.commit(int(committed["round"]), int(committed["probe"]))
        kept = {name: value.to(self.device) for name, value in state.before(task.round).items()}
        update, states = train_client(here.model, here.client, here.method, task, 0, kept, here.job.settings)
        if here.method.client_state != "none":
            state.hold(task.round, states)
        return pack_update(update, {"round": task.round})

    def validate(self, parcel: Parcel) -> Parcel:
        """(N, 3, C) counts of every candidate on the private validation split."""
        here, candidates = self._prepare(parcel), unpack_candidates(parcel)
        check_vector(here, candidates.base)
        return counts_of({"counts": count_candidates(here.model, candidates, here.split("validation"))})

    def confusion(self, parcel: Parcel) -> Parcel:
        """(C, C) confusion matrix on each split asked for."""
        here, x = self._asked(parcel)
        return counts_of({name: here.confusion(x, name) for name in parcel.meta["splits"]})

    def scores(self, parcel: Parcel) -> Parcel:
        """Counts of a model's probabilities on a split."""
        here, x = self._asked(parcel)
        return counts_of(
            vars(here.scores(x, parcel.meta["split"], Decision.from_json(parcel.meta.get("decision", {}))))
        )

    def decide(self, parcel: Parcel) -> Parcel:
        """The site's own decision, found on its private split; also in ``decision.json`` here."""
        here, x = self._asked(parcel)
        found = here.decide(x, SiteGoal.from_json(parcel.meta["goal"]))
        return Parcel({"decision": replace(found, costs=()).to_json()})  # the server knows them, and there may be many

    def _asked(self, parcel: Parcel) -> tuple[Prepared, torch.Tensor]:
        """The site as a message wants it, and the model that the message brings."""
        here, x = self._prepare(parcel), parcel.tensors["x"]
        check_vector(here, x)
        return here, x

    def _prepare(self, parcel: Parcel) -> Prepared:
        job, index = Job.from_json(parcel.meta["job"]), int(parcel.meta["client"])
        now = self._prepared
        if now is not None and now.job == job and now.client.index == index:
            return now
        need_trust(self.policy, self.data)
        self.policy.check_job(job)
        self._prepared = prepare(self.data, job, index, self.folder, self.device)
        return self._prepared


def open_site(config: SiteConfig) -> Site:
    """The site of a ``site.toml``; a device that is not there is noticed here, before round 0."""
    check_device("worker.device", config.worker.device)
    return Site(config.name, open_data(config), config.policy, config.folder, config.worker.device)


def rehearses(data: SiteData) -> bool:
    """Whether a site's rows are nobody's."""
    return bool(data.schema()["kind"] == "slice")


def need_trust(policy: Policy, data: SiteData) -> None:
    """Raise unless a site trusts the server with its rows."""
    if not rehearses(data):
        policy.check_trust("server")


LONGEST_EPOCH = 16
"""Times the classes times the samples: no epoch is longer."""


def check_rates(counts: np.ndarray, task: Task) -> None:
    """Raise unless an epoch at the rates of a task has a sane length: a rate of 20 would repeat a rare row for ever."""
    rates, there = task.probes["rate"], counts[counts > 0].astype(np.float64)
    with np.errstate(over="ignore"):
        longest = float((there * (there.max(initial=1) / there) ** np.abs(rates).max()).sum())
    if not ((rates >= 0) & np.isfinite(rates)).all() or not longest <= LONGEST_EPOCH * len(there) * there.sum():
        raise CodedError("policy-training", f"the run asks for resampling rates up to {float(np.max(rates)):g}")
    if not all(0 <= lr < math.inf for lr in (task.lr, *np.ravel(task.probes.get("lr", ())).tolist())):
        raise CodedError("policy-training", f"the run asks for a learning rate of {task.lr:g}")


def check_vector(here: Prepared, x: torch.Tensor) -> None:
    """Raise unless a vector is a model of the job."""
    if tuple(x.shape) != (here.model.size,):
        raise CodedError("malformed", f"a model of shape {tuple(x.shape)} was sent, expected ({here.model.size},)")


def encoding_here(told: Encoding, policy: Policy) -> Encoding:
    """An encoder that others name, as it is at this site."""
    policy.check_encoder(told.name)
    try:
        return open_encoder(told.name, told.weights).use(told.unfreeze)
    except FedtailError as error:
        raise CodedError("encoder", str(error)) from None


def code_of(error: Exception) -> str:
    """All that a server hears of what went wrong."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError):
        return "disk"
    code = getattr(error, "code", "site")
    return code if code in CODES else "site"


def counts_of(counts: Mapping[str, np.ndarray]) -> Parcel:
    return Parcel({}, {name: torch.as_tensor(value) for name, value in counts.items()})


AUDIT_BYTES = 25_000_000
"""Of the log, and as many of the one before."""


def note(log: Path, phase: str, asked: Parts, reply: Parts, seconds: float, words: str) -> None:
    """Write a line on one message and its answer: numbers of bytes, never what was in them. On a full disk it goes to
    standard error, and the answer leaves all the same. words: of an error, which the reply does not have."""
    question, error = _meta(asked), _meta(reply).get("error")
    task, job = (found if isinstance(found := question.get(name), dict) else {} for name in ("task", "job"))
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run": job.get("run") or question.get("agreement"),
        "round": task.get("round"),
        "exchange": question.get("number"),
        "phase": phase,
        "verdict": "answered" if error is None else "refused",
        **({} if error is None else {"code": str(error), "reason": clean(words or error, 1000)}),
        "bytes_in": size_of(asked),
        "bytes_out": size_of(reply),
        "seconds": round(seconds, 3),
    }
    try:
        rotate(log, AUDIT_BYTES)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as fault:  # a full disk keeps no site from answering
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{log} cannot be written ({fault.strerror}): {json.dumps(line)}\n")


def _meta(parts: Parts) -> dict[str, Any]:
    try:
        return open_json(parts[META])
    except (KeyError, WireError):
        return {}
