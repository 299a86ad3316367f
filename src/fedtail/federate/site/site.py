"""The site's side of a real federation: one message in, one reply out.

A site holds its data and its policy. What leaves it: updates, sample counts, validation counts and the scalars
a rate strategy asks for. Training itself is ``rounds.local``, the code the reference simulator runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedtail.core.decisions import Decision
from fedtail.core.metrics import class_counts
from fedtail.core.records import Task, Tensors, Update
from fedtail.data.federation import Client
from fedtail.errors import FedtailError, one_of
from fedtail.federate.protocol.compress import compress
from fedtail.federate.protocol.handshake import versions
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.policy import Ledger, Policy
from fedtail.federate.protocol.transport import Phase
from fedtail.federate.protocol.wire import (
    Parcel,
    Parts,
    error_parts,
    pack,
    pack_update,
    unpack,
    unpack_candidates,
    unpack_task,
)
from fedtail.federate.site.audit import Audit
from fedtail.federate.site.state import SiteState
from fedtail.methods.base import Method, run_bound
from fedtail.models.encoders import Encoding, default_encoder, open_encoder
from fedtail.models.flat import FlatModel
from fedtail.rounds.evaluation import Split, confusion_on, model_logits, scores_on
from fedtail.rounds.local import measure_client, train_client
from fedtail.rounds.privacy import add_noise
from fedtail.runs.encoding import choose_encoding, encode_client
from fedtail.runs.problem import is_images
from fedtail.settings import Model, checked

LEFT = "compression/left"
"""What compression left of the last update, in the site's state."""


class SiteData(Protocol):
    """A site's own data, wherever it comes from."""

    def schema(self) -> dict[str, Any]:
        """What must agree across sites: kind, input shape or columns, classes. No counts."""
        ...

    def statistics(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sums over the training split from which the server derives a common preprocessing."""
        ...

    def client(self, index: int, job: Job) -> Client:
        """The data as ``rounds.local`` wants it."""
        ...

    def test(self, index: int, job: Job) -> np.ndarray:
        """Pool indices of the site's test split; empty if it has none."""
        ...


@dataclass
class Prepared:
    """What a job needs, built once and kept while messages carry the same job."""

    job: Job
    client: Client
    test: np.ndarray
    method: Method
    model: FlatModel
    state: SiteState
    counts: np.ndarray
    """(C,) training samples per class, each image once."""


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

    def handle(self, phase: str, parts: Parts) -> Parts:
        """The reply to one message, noted in the audit log; whatever goes wrong becomes an error reply of one line."""
        began = time.perf_counter()
        reply = self._answer(phase, parts)
        self.audit.enter(phase, parts, reply, time.perf_counter() - began)
        return reply

    def _answer(self, phase: str, parts: Parts) -> Parts:
        try:
            if phase not in list(Phase):
                raise one_of("phase", phase, list(Phase))
            answer: Callable[[Parcel], Parcel] = getattr(self, phase)
            return pack(answer(unpack(parts)))
        except FedtailError as error:
            return error_parts(str(error))
        except Exception as error:  # a site must answer, whatever happened
            return error_parts(f"{type(error).__name__}: {error}")

    def hello(self, parcel: Parcel) -> Parcel:
        """Who is here, with which software, clock and data schema; the job is checked against the policy."""
        meta: dict[str, Any] = {"site": self.name, "schema": self._schema(parcel.meta), "versions": versions()}
        meta["clock"] = time.time()
        if "job" in parcel.meta:
            here = self._prepare(parcel)
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
                encoding = open_encoder(wanted.name, wanted.weights).use(wanted.views, wanted.unfreeze)
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

    def statistics(self, parcel: Parcel) -> Parcel:
        """Federated sums for a common preprocessing."""
        return Parcel({"statistics": self.data.statistics(parcel.meta.get("request", {}))})

    def train(self, parcel: Parcel) -> Parcel:
        """Local training: the update, and nothing else."""
        here = self._prepare(parcel)
        task = unpack_task(parcel)
        self._check_vector(here, task.x)
        self.policy.check_size(task.x.numel() * task.n_probes)
        self.policy.check_data(here.counts)
        self.ledger.enter(here.job.run, task.round, self.policy.max_rounds_per_day)
        committed = parcel.meta.get("commit")
        if committed is not None:
            here.state.commit(int(committed["round"]), int(committed["probe"]))
        kept = {name: value.to(self.device) for name, value in here.state.before(task.round).items()}
        left = kept.pop(LEFT, None)
        update, states = train_client(here.model, here.client, here.method, task, 0, kept, here.job.settings)
        if here.job.compress != "none":
            return self._compressed(here, task, update, states, left)
        if here.method.client_state != "none":
            here.state.hold(task.round, states)
        if here.job.noise:
            # From the system's entropy: whoever knows the run's seed could take keyed noise off again.
            n_classes, n_params = here.job.n_classes, here.model.n_params
            update = add_noise(update, task, here.method, here.job.noise, None, n_classes, n_params)
        return pack_update(update, {"round": task.round})

    @staticmethod
    def _compressed(here: Prepared, task: Task, update: Update, states: list[Tensors], left: Tensor | None) -> Parcel:
        """The update in fewer bytes; what is left of each probe's waits, as the method's state does, until it is known
        which probe was kept."""
        n = here.job.n_classes
        bounds = [run_bound(here.method, task, update.client, i, steps, n) for i, steps in enumerate(update.steps)]
        sent, rest = compress(update.delta, left, bounds, here.job.compress)
        here.state.hold(task.round, [{**state, LEFT: row} for state, row in zip(states, rest, strict=True)])
        parcel = pack_update(update, {"round": task.round})
        return Parcel(parcel.meta, {**parcel.tensors, **sent})

    def validate(self, parcel: Parcel) -> Parcel:
        """(N, 3, C) counts of every candidate on the private validation split, or (N, 3, 1) totals."""
        here = self._prepare(parcel)
        if "models" in parcel.tensors:
            vectors = enumerate(parcel.tensors["models"])
            n = len(parcel.tensors["models"])
        else:
            candidates = unpack_candidates(parcel)
            vectors, n = candidates.walk(), len(candidates)  # type: ignore[assignment]
        counts = np.zeros((n, 3, here.job.n_classes), dtype=np.int64)
        confusion = confusion_on(here.model, Split.of(here.client, here.client.validation))
        for s, vector in vectors:
            self._check_vector(here, vector)
            counts[s] = class_counts(confusion(vector))
        if here.job.reveal == "totals":
            counts = counts.sum(-1, keepdims=True)
        return Parcel({}, {"counts": torch.as_tensor(counts)})

    def confusion(self, parcel: Parcel) -> Parcel:
        """(C, C) confusion matrix on each split asked for; (2,) correct and all samples where totals must do."""
        here = self._prepare(parcel)
        x = parcel.tensors["x"]
        self._check_vector(here, x)
        splits = {"test": here.test, "validation": here.client.validation}
        out = {}
        for split in parcel.meta["splits"]:
            matrix = confusion_on(here.model, Split.of(here.client, splits[split]))(x)
            if here.job.reveal == "totals":
                matrix = np.array([np.diag(matrix).sum(), matrix.sum()])
            out[split] = torch.as_tensor(matrix)
        return Parcel({}, out)

    def scores(self, parcel: Parcel) -> Parcel:
        """Counts of a model's probabilities on a split; only where counts per class may leave."""
        here = self._prepare(parcel)
        if here.job.reveal == "totals":
            raise FedtailError(
                "counts of probabilities tell how many samples each class has; set deploy.reveal = 'classes'"
            )
        self._check_vector(here, parcel.tensors["x"])
        rows = here.test if parcel.meta["split"] == "test" else here.client.validation
        batches = Split.of(here.client, rows).batches(device=self.device)
        rule = Decision.from_json(parcel.meta.get("decision", {}))
        found = scores_on(model_logits(here.model, parcel.tensors["x"], batches), here.job.n_classes, rule)
        return Parcel({}, {name: torch.as_tensor(value) for name, value in vars(found).items()})

    def measure(self, parcel: Parcel) -> Parcel:
        """``train_loss`` at a model or, where per-class numbers may leave, what tells of classes."""
        here = self._prepare(parcel)
        what = parcel.meta["what"]
        if what != "train_loss" and here.job.reveal == "totals":
            raise FedtailError(f"method {here.job.method!r} needs per-class numbers; set deploy.reveal = 'classes'")
        self._check_vector(here, parcel.tensors["x"])
        return Parcel({}, {"value": measure_client(here.model, here.client, parcel.tensors["x"], what)})

    def _prepare(self, parcel: Parcel) -> Prepared:
        job, index = Job.from_json(parcel.meta["job"]), int(parcel.meta["client"])
        now = self._prepared
        if now is not None and now.job == job and now.client.index == index:
            return now
        self.policy.check_job(job)
        client, test = self.data.client(index, job), self.data.test(index, job)
        counts = client.counts
        if job.encoding is not None:
            store = None if self.folder is None else self.folder / "features"
            client, test = encode_client(client, test, job.encoding, store)
        model = FlatModel(job.build_model().to(self.device))
        state = SiteState(self.folder, job.run)
        self._prepared = Prepared(
            job=job,
            client=client,
            test=test,
            method=job.build_method(),
            model=model,
            state=state,
            counts=counts,
        )
        return self._prepared

    @staticmethod
    def _check_vector(here: Prepared, x: torch.Tensor) -> None:
        if tuple(x.shape) != (here.model.size,):
            raise FedtailError(f"the server sent a model of shape {tuple(x.shape)}, expected ({here.model.size},)")
