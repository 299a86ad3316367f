"""The site's side of a real federation: one message in, one reply out.

A site holds its data and its policy. What leaves it: updates, sample counts, validation counts and the scalars
a rate strategy asks for, each entered in its ledger first. Training itself is ``rounds.local``, the code the reference
simulator runs. What goes wrong leaves as a fixed code; the words stay in the site's logs.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.decisions import Decision, SiteGoal
from fedtail.core.evidence import class_counts
from fedtail.core.masks import share_of_noise
from fedtail.core.records import DIVERGED, Task, Tensors, Update
from fedtail.errors import FedtailError, one_of
from fedtail.federate.protocol.compress import compress
from fedtail.federate.protocol.faults import CODES, CodedError
from fedtail.federate.protocol.handshake import versions
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.sums import (
    MASKED,
    ORDER,
    RELEASE,
    Order,
    SumError,
    as_tensor,
    content,
    enough,
    flat_counts,
    flat_update,
    question,
    release_to_json,
    sum_deviation,
)
from fedtail.federate.protocol.transport import AGREED, Phase
from fedtail.federate.protocol.wire import (
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
from fedtail.federate.site.guard import Guard, check_rates
from fedtail.federate.site.ledger import Ledger, message_key
from fedtail.federate.site.prepared import Prepared, SiteData, prepare
from fedtail.federate.site.rows import keep_back
from fedtail.files import write_atomically
from fedtail.methods.base import run_bound
from fedtail.models.encoders import Encoding, default_encoder, open_encoder
from fedtail.rounds.evaluation import Split, confusion_on, model_logits, probabilities_of, scores_on
from fedtail.rounds.local import measure_client, train_client
from fedtail.rounds.privacy import add_noise, row_digest
from fedtail.runs.build import is_images
from fedtail.runs.encoding import choose_encoding
from fedtail.settings import Model, checked

if TYPE_CHECKING:
    from fedtail.federate.site.member import Member
    from fedtail.federate.site.sums import SiteSums

LEFT = "compression/left"
"""What compression left of the last update, in the site's state."""


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
        self.sums = open_sums(name, self.policy, folder)
        self.guard = Guard(self.policy, self.ledger, own=data.schema()["kind"] != "slice")
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
        return pack(answer(unpack(parts), message_key(phase, parts)))

    @property
    def member(self) -> Member:
        """The site's part in runs that nobody steers."""
        if self._member is None:
            from fedtail.federate.site.member import Member  # needs the extra of a federation that has keys

            self._member = Member(self.name, self.data, self.policy, self.ledger, self.folder, self.device)
        return self._member

    def hello(self, parcel: Parcel, key: str) -> Parcel:
        """Who is here, with which software, clock and data schema; the job is checked against the policy."""
        meta: dict[str, Any] = {"site": self.name, "schema": self._schema(parcel.meta), "versions": versions()}
        meta["clock"] = time.time()
        if self.sums is not None:
            meta["masks"] = {**self.sums.about(), "reveal": self.policy.reveal}
        if "job" in parcel.meta:
            here = self._prepare(parcel)
            if self.sums is not None:
                meta["masks"] |= self.sums.advert(here.job.run)
            self.policy.check_size(here.model.size)
            self.policy.check_data(here.counts)
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
            encoding = self._choose(checked(Model, asked["model"]), schema)
        return schema if encoding is None else {**schema, "encoder": encoding.to_dict()}

    def _choose(self, model: Model, schema: dict[str, Any]) -> Encoding | None:
        """The encoder that a server's settings mean here, if the policy has nothing against it."""
        images = schema["kind"] == "images" or is_images(schema.get("preprocessing", {}))
        if model.encoder == "auto" and (name := default_encoder()) is not None:
            images = images and (not self.policy.encoders or name in self.policy.encoders)
        elif model.encoder not in ("auto", "none"):
            self.policy.check_encoder(model.encoder)
        return choose_encoding(model, tuple(schema.get("input_shape", ())), images=images)

    def statistics(self, parcel: Parcel, key: str) -> Parcel:
        """Federated sums for a common preprocessing."""
        request = parcel.meta.get("request", {})
        self.guard.charge_split(int(request.get("seed", 0)), int(request.get("client", 0)))
        self.ledger.charge("statistics", key, self.policy.max_statistics_per_day)
        return Parcel({"statistics": self.data.statistics(request)})

    def train(self, parcel: Parcel, key: str) -> Parcel:
        """Local training: the update, and nothing else."""
        here = self._prepare(parcel)
        task = unpack_task(parcel)
        self._check_vector(here, task.x)
        self.policy.check_size(task.x.numel() * task.n_probes)
        self.policy.check_data(here.counts)
        self.policy.check_task(task)
        check_rates(here.counts, task)
        self.ledger.charge(
            "rounds",
            key,
            self.policy.max_rounds_per_day,
            about=self.guard.check_model(here.job, here.client, here.method, task),
        )
        state, committed = here.state.rival(task.rival), parcel.meta.get("commit")
        if committed is not None:
            state.commit(int(committed["round"]), int(committed["probe"]))
        kept = {name: value.to(self.device) for name, value in state.before(task.round).items()}
        left = kept.pop(LEFT, None)
        update, states = train_client(here.model, here.client, here.method, task, 0, kept, here.job.settings)
        self.policy.check_steps(max(update.steps))
        self.ledger.note(key, moved=float(torch.linalg.vector_norm(update.delta, dim=-1).max()))
        least = self.policy.min_row_samples if self.guard.own else 1
        update = replace(update, delta=keep_back(here.model, here.client, task.x, update.delta, least))
        if here.job.compress != "none":
            return self._compressed(here, task, update, states, left)
        if here.method.client_state != "none":
            state.hold(task.round, states)
        if here.job.updates == "masked":
            return self._masked(here, parcel, task, update)
        if here.job.noise:
            update = self._with_noise(here, task, update)
        return pack_update(update, {"round": task.round})

    def _masked(self, here: Prepared, parcel: Parcel, task: Task, update: Update) -> Parcel:
        """The weighted update under masks, with a share of the sum's noise: nothing that can be told from random."""
        sums, order = self._need_sums(), Order.from_json(parcel.meta.get(ORDER))
        self._check_order(here, order, task)
        if update.extras:
            raise SumError(
                "policy-method", f"method {here.job.method!r} sends more than updates, which masks do not cover"
            )
        values = order.fixed.encode(flat_update(order, self.name, update, diverged=DIVERGED in task.reports))
        least = enough(len(order.members), here.job.dropouts) if here.job.shares else 0
        if here.job.shares:
            deviation = sum_deviation(order, here.job.shares) * order.fixed.scale / math.sqrt(least)
            secret = self.guard.charge_releases(update, here.job.shares, [deviation] * len(update.delta))
            for i, row in enumerate(update.delta):
                purpose = f"share/{deviation!r}/{self.ledger.sign('share', row_digest(row))}"
                drawn = share_of_noise(here.model.n_params, deviation, secret, purpose)
                values[i * row.numel() :][: here.model.n_params] += drawn.astype(np.uint32)
        scopes = [f"model/{row_digest(task.x)}", f"round/{here.job.run}/{task.round}"]
        asked = content(parcel), question(parcel)
        masked = sums.mask_update(here.job.run, order, *asked, scopes, least, values)
        return Parcel({"round": task.round}, {MASKED: as_tensor(masked)})

    def _check_order(self, here: Prepared, order: Order, task: Task) -> None:
        """Raise if the server says of this site what is not so: a member that seems small leaves the others alone."""
        mine = {name: [float(v) for v in values[0]] for name, values in task.probes.items()}
        told = {name: rows.get(self.name) for name, rows in order.probes.items()}
        good = set(order.sizes) == set(order.members) and min(order.sizes.values()) > 0 and order.limit > 0
        if not good or order.sizes.get(self.name) != int(here.counts.sum()) or told != mine or not order.cap > 0:
            raise SumError("changed", "the request for a sum of updates does not match what this site agreed to")
        if bool(here.job.shares) != bool(order.clip):
            raise SumError("policy-noise", "a sum with shares of noise needs a clipping norm")

    def unmask(self, parcel: Parcel, key: str) -> Parcel:
        """What takes the masks off the sum over the members that are left; once for each sum."""
        here, order = self._prepare(parcel), Order.from_json(parcel.meta.get(ORDER))
        return Parcel({RELEASE: release_to_json(self._need_sums().release(here.job.run, order))})

    def _need_sums(self) -> SiteSums:
        if self.sums is None:
            raise SumError("mask-keys", "this site has no list of sites (sites.pub) for masked sums")
        return self.sums

    def _with_noise(self, here: Prepared, task: Task, update: Update) -> Update:
        """The update as it may leave. Its noise is drawn from the site's secret and what it covers: the same update
        gets the same noise, so that asking again averages nothing, and a release that is entered once costs once."""
        noise = here.job.noise
        bounds = [
            run_bound(here.method, task, update.client, i, n, here.job.n_classes) for i, n in enumerate(update.steps)
        ]
        secret = self.guard.charge_releases(update, noise, bounds)
        n_classes, n_params = here.job.n_classes, here.model.n_params
        return add_noise(update, task, here.method, noise, secret, n_classes, n_params)

    @staticmethod
    def _compressed(here: Prepared, task: Task, update: Update, states: list[Tensors], left: Tensor | None) -> Parcel:
        """The update in fewer bytes; what is left of each probe's waits, as the method's state does, until it is known
        which probe was kept."""
        n = here.job.n_classes
        bounds = [run_bound(here.method, task, update.client, i, steps, n) for i, steps in enumerate(update.steps)]
        sent, rest = compress(update.delta, left, bounds, here.job.compress)
        kept = [{**state, LEFT: row} for state, row in zip(states, rest, strict=True)]
        here.state.rival(task.rival).hold(task.round, kept)
        parcel = pack_update(update, {"round": task.round})
        return Parcel(parcel.meta, {**parcel.tensors, **sent})

    def validate(self, parcel: Parcel, key: str) -> Parcel:
        """(N, 3, C) counts of every candidate on the private validation split, or (N, 3, 1) totals."""
        here = self._prepare(parcel)
        if "models" in parcel.tensors:
            vectors = enumerate(parcel.tensors["models"])
            n = len(parcel.tensors["models"])
        else:
            candidates = unpack_candidates(parcel)
            vectors, n = candidates.walk(), len(candidates)  # type: ignore[assignment]
        self.ledger.charge("validations", key, self.policy.max_validations_per_day, n)
        counts = np.zeros((n, 3, here.job.n_classes), dtype=np.int64)
        confusion = confusion_on(here.model, Split.of(here.client, here.client.validation))
        for s, vector in vectors:
            self._check_vector(here, vector)
            matrix = confusion(vector)
            counts[s] = class_counts(matrix)
            if here.job.reveal == "totals":
                counts[s, 0, 0] += self.guard.blur(matrix, "validation")
        if here.job.reveal == "totals":
            counts = counts.sum(-1, keepdims=True)
        return self._counted(here, parcel, {"counts": counts})

    def _counted(self, here: Prepared, parcel: Parcel, counts: dict[str, np.ndarray]) -> Parcel:
        """Counts as they leave: each as it is, or all of them as one vector under masks."""
        if here.job.reveal != "sums":
            return Parcel({}, {name: torch.as_tensor(value) for name, value in counts.items()})
        order = Order.from_json(parcel.meta.get(ORDER))
        masked = self._need_sums().mask_counts(here.job.run, order, content(parcel), flat_counts(counts))
        return Parcel({}, {MASKED: as_tensor(masked)})

    def confusion(self, parcel: Parcel, key: str) -> Parcel:
        """(C, C) confusion matrix on each split asked for; (2,) correct and all samples where totals must do."""
        here = self._prepare(parcel)
        x = parcel.tensors["x"]
        self._check_vector(here, x)
        splits = {"test": here.test, "validation": Split.of(here.client, here.client.validation)}
        self.ledger.charge("validations", key, self.policy.max_validations_per_day, len(parcel.meta["splits"]))
        out = {}
        for split in parcel.meta["splits"]:
            matrix = confusion_on(here.model, splits[split])(x)
            if here.job.reveal == "totals":
                matrix = np.array([np.diag(matrix).sum() + self.guard.blur(matrix, split), matrix.sum()])
            out[split] = matrix
        return self._counted(here, parcel, out)

    def scores(self, parcel: Parcel, key: str) -> Parcel:
        """Counts of a model's probabilities on a split; only where counts per class may leave."""
        here = self._prepare(parcel)
        if here.job.reveal == "totals":
            raise CodedError(
                "policy-reveal",
                "probability counts reveal how many samples each class has; set deploy.reveal = 'sums'",
            )
        self._check_vector(here, parcel.tensors["x"])
        self.ledger.charge("validations", key, self.policy.max_validations_per_day)
        held = here.test if parcel.meta["split"] == "test" else Split.of(here.client, here.client.validation)
        batches = held.batches(device=self.device)
        rule = Decision.from_json(parcel.meta.get("decision", {}))
        found = scores_on(model_logits(here.model, parcel.tensors["x"], batches), here.job.n_classes, rule)
        return self._counted(here, parcel, vars(found))

    def decide(self, parcel: Parcel, key: str) -> Parcel:
        """The site's own decision, found on its private split. It is kept in ``decision.json`` here, for this site's
        own use of the model, and leaves only where counts per class may."""
        here = self._prepare(parcel)
        self._check_vector(here, parcel.tensors["x"])
        goal = SiteGoal.from_json(parcel.meta["goal"])
        goal.common.check(here.job.n_classes)
        self.ledger.charge("validations", key, self.policy.max_validations_per_day)
        batches = Split.of(here.client, here.client.validation).batches(device=self.device)
        p, y = probabilities_of(model_logits(here.model, parcel.tensors["x"], batches), here.job.n_classes)
        found = goal.decide(p, y, here.counts)
        if self.folder is not None:
            write_atomically(self.folder / "decision.json", json.dumps(found.to_json()))
        told = replace(found, costs=()).to_json()  # the server knows them, and there may be many
        return Parcel({"decision": told} if here.job.reveal == "classes" else {})

    def measure(self, parcel: Parcel, key: str) -> Parcel:
        """``train_loss`` at a model or, where per-class numbers may leave, what tells of classes."""
        here = self._prepare(parcel)
        what = parcel.meta["what"]
        if what != "train_loss" and here.job.reveal != "classes":
            raise CodedError(
                "policy-reveal", f"method {here.job.method!r} needs per-class numbers; set deploy.reveal = 'classes'"
            )
        self._check_vector(here, parcel.tensors["x"])
        self.ledger.charge("validations", key, self.policy.max_validations_per_day)
        return Parcel({}, {"value": measure_client(here.model, here.client, parcel.tensors["x"], what)})

    def _prepare(self, parcel: Parcel) -> Prepared:
        job, index = Job.from_json(parcel.meta["job"]), int(parcel.meta["client"])
        now = self._prepared
        if now is not None and now.job == job and now.client.index == index:
            return now
        self.policy.check_job(job)
        self.guard.charge_split(job.seed, index)
        self._prepared = prepare(self.data, job, index, self.folder, self.device)
        return self._prepared

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


def open_sums(name: str, policy: Policy, folder: Path | None) -> SiteSums | None:
    """The site's part in masked sums; None for a site without keys, as in a simulation of one."""
    if folder is None or not all((folder / file).is_file() for file in ("sites.pub", "site.key")):
        return None
    from fedtail.federate.site.sums import SiteSums  # needs the extra of a federation that has keys

    return SiteSums(name, policy, folder)
