"""What a site brings to a job: its data, the model and the method, built once and kept over messages."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import torch as safetensors_torch
from torch import Tensor

from fedtail.core.decisions import Decision, SiteGoal
from fedtail.core.records import Tensors
from fedtail.core.scores import Scores
from fedtail.data.federation import Client, Federation, Samples
from fedtail.federate.protocol.faults import CodedError
from fedtail.federate.protocol.job import Job
from fedtail.files import write_atomically
from fedtail.methods.base import Method
from fedtail.models.flat import FlatModel
from fedtail.rounds.evaluation import Split, confusion_on, model_logits, probabilities_of, scores_on
from fedtail.runs.encoding import encode_client, encode_samples
from fedtail.runs.judged import Judged
from fedtail.runs.saved import SavedModel


class SiteData(Protocol):
    """A site's own data, wherever it comes from."""

    @property
    def min_count(self) -> int:
        """Fewer values than this are not told of by themselves."""
        ...

    def schema(self) -> dict[str, Any]:
        """What must agree across sites: kind, input shape or columns, classes. No counts."""
        ...

    def columns(self, index: int, seed: int) -> Sequence[np.ndarray]:
        """The numbers whose distribution makes the common preprocessing: those of each numeric column of a table, or of
        each channel of images, in the training split; NaN where one is missing."""
        ...

    def client(self, index: int, job: Job) -> Client:
        """The data as ``rounds.local`` wants it."""
        ...

    def judged(self, model: SavedModel) -> Judged:
        """The rows on which this site judges a trained model."""
        ...

    def unstratified(self) -> SiteData:
        """The same, split into rows to train and to test on whatever their labels are: where classes are split one by
        one, a label that changes moves other rows to the other side, and noise for one row hides no more than one."""
        ...

    def test(self, index: int, job: Job) -> np.ndarray | Samples:
        """Pool indices of the site's test split, or its part of a test set that is nobody's own."""
        ...


@dataclass(frozen=True)
class FederationSlice:
    """Client ``index`` of a federation that is split the same way everywhere: rehearsals and tests."""

    federation: Federation
    index: int
    model: str = "mlp"
    model_options: dict[str, Any] = field(default_factory=dict)
    min_count: int = 1

    def schema(self) -> dict[str, Any]:
        federation = self.federation
        return {
            "kind": "slice",
            "name": federation.name,
            "input_shape": list(federation.input_shape),
            "dtype": str(federation.pool.x.dtype).removeprefix("torch."),
            "classes": list(federation.classes),
            "transform": asdict(federation.transform),
            "augment": federation.augment,
            "model": self.model,
            "model_options": self.model_options,
            "preprocessing": federation.preprocessing,
            "background": federation.background,
        }

    def columns(self, index: int, seed: int) -> tuple[np.ndarray, ...]:
        return ()

    def unstratified(self) -> FederationSlice:
        return self  # nobody's rows

    def client(self, index: int, job: Job) -> Client:
        """The slice under the number the server gave this site, so that every random draw is the simulator's."""
        own = self.federation.client(self.index)
        return replace(own, index=index, transform=job.transform, augment=job.augment)

    def judged(self, model: SavedModel) -> Judged:
        rows = self.test(self.index, None)
        x, y = model.inputs(rows.x.numpy(), []), rows.y.numpy()
        raw = replace(model, decision=Decision()).probabilities(x)
        return Judged(model.classes, raw, model.decision, y=y, x=x, preprocessing=model.preprocessing)

    def test(self, index: int, job: Job | None) -> Samples:
        """Every K-th of the samples that all are tested on."""
        return self.federation.test.take(np.arange(self.index, len(self.federation.test), self.federation.n_clients))


@dataclass
class Prepared:
    """What a job needs, built once and kept while messages carry the same job."""

    job: Job
    client: Client
    test: Split
    method: Method
    model: FlatModel
    state: SiteState
    counts: np.ndarray
    """(C,) training samples per class, each image once."""
    folder: Path
    """Where features, the method's state and the decision are kept."""

    def split(self, name: str) -> Split:
        """``test`` or ``validation``."""
        return self.test if name == "test" else Split.of(self.client, self.client.validation)

    def confusion(self, x: Tensor, name: str) -> np.ndarray:
        """(C, C) of a model on a split."""
        return confusion_on(self.model, self.split(name))(x)

    def scores(self, x: Tensor, name: str, rule: Decision) -> Scores:
        """Counts of a model's probabilities on a split."""
        batches = self.split(name).batches(device=self.model.vector.device)
        return scores_on(model_logits(self.model, x, batches), self.job.n_classes, rule)

    def decide(self, x: Tensor, goal: SiteGoal) -> Decision:
        """The site's own decision for a model, found on its validation split and kept here."""
        goal.common.check(self.job.n_classes)
        batches = self.split("validation").batches(device=self.model.vector.device)
        p, y = probabilities_of(model_logits(self.model, x, batches), self.job.n_classes)
        found = goal.decide(p, y, self.counts)
        write_atomically(self.folder / "decision.json", json.dumps(found.to_json()))
        return found


def prepare(
    data: SiteData, job: Job, index: int, folder: Path, device: torch.device, begun: Path | None = None
) -> Prepared:
    """The site as client ``index`` of a job. begun: the file that says with which rows its run has begun."""
    client, found = data.client(index, job), data.test(index, job)
    if begun is not None:
        check_rows(client, begun)
    counts = client.counts
    rows = np.empty(0, dtype=np.int64) if isinstance(found, Samples) else found
    if job.encoding is not None:
        client, rows = encode_client(client, rows, job.encoding, folder / "features")
        found = encode_samples(found, job.encoding) if isinstance(found, Samples) else rows
    return Prepared(
        job=job,
        client=client,
        test=Split(found, client.transform, job.n_classes) if isinstance(found, Samples) else Split.of(client, found),
        method=job.build_method(),
        model=FlatModel(job.build_model().to(device)),
        state=SiteState(folder / "state" / re.sub(r"^\.+|[^\w.-]", "_", job.run)),
        counts=counts,
        folder=folder,
    )


def check_rows(client: Client, begun: Path) -> None:
    """Note which rows a run begins with, and raise if it would go on with others: their weight is settled by then, and
    what was held out for tests may have been trained on."""
    rows = hashlib.sha256()
    for part in (client.train, client.validation, client.pool.y.numpy(), client.pool.x.numpy()):
        rows.update(np.ascontiguousarray(part).data.cast("B") if part.size else b"")
    if not begun.is_file():
        write_atomically(begun, rows.hexdigest())
    elif begun.read_text() != rows.hexdigest():
        raise CodedError("changed", "the data are not those that the run began with; restore them, or start a new run")


KEEP = 20
"""Rounds of state kept; a checkpoint older than this cannot be resumed with a stateful method."""
START, PROBE = "start", "probe"
Key = tuple[str, int, int]
"""What is kept: the start of a round, or what a probe of it has left; the round; the probe."""


class SiteState:
    """States of one run, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rival(self, number: int) -> SiteState:
        """What is kept for one of several models side by side."""
        return SiteState(self.folder / f"rival-{number}") if number else self

    def before(self, round: int) -> Tensors:
        """The state round ``round`` starts from; later states are dropped, they belong to a future undone."""
        starts = [key for key in self._keys() if key[0] == START]
        self._drop(key for key in starts if key[1] > round)
        known = [key for key in starts if key[1] <= round]
        return dict(safetensors_torch.load_file(self._file(max(known)))) if known else {}

    def hold(self, round: int, states: list[Tensors]) -> None:
        """Keep what each probe of a round would leave, until ``commit``."""
        self._drop(key for key in self._keys() if key[:2] == (PROBE, round))
        for probe, state in enumerate(states):
            if state:
                self.folder.mkdir(parents=True, exist_ok=True)
                temporary = self._file((PROBE, round, probe)).with_suffix(".tmp")
                safetensors_torch.save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, temporary)
                temporary.replace(self._file((PROBE, round, probe)))

    def commit(self, round: int, probe: int) -> None:
        """Probe ``probe`` of ``round`` was kept. Safe to repeat."""
        keys = self._keys()
        if (PROBE, round, probe) in keys:
            self._file((PROBE, round, probe)).replace(self._file((START, round + 1, 0)))
        self._drop(k for k in keys if k[:2] == (PROBE, round) or (k[0] == START and k[1] < round + 1 - KEEP))

    def _keys(self) -> list[Key]:
        named = [file.stem.split("-") for file in self.folder.glob("*.safetensors")]
        return [(kind, int(round), int(probe)) for kind, round, probe in named]

    def _file(self, key: Key) -> Path:
        return self.folder / f"{key[0]}-{key[1]:06d}-{key[2]}.safetensors"

    def _drop(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._file(key).unlink(missing_ok=True)
