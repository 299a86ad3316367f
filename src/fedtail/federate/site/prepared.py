"""What a site brings to a job: its data, the model and the method, built once and kept over messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedtail.data.federation import Client, Samples
from fedtail.federate.protocol.job import Job
from fedtail.federate.site.state import SiteState
from fedtail.methods.base import Method
from fedtail.models.flat import FlatModel
from fedtail.rounds.evaluation import Split
from fedtail.runs.encoding import encode_client, encode_samples
from fedtail.runs.judged import Judged
from fedtail.runs.saved import SavedModel


class SiteData(Protocol):
    """A site's own data, wherever it comes from."""

    def schema(self) -> dict[str, Any]:
        """What must agree across sites: kind, input shape or columns, classes. No counts."""
        ...

    def statistics(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sums over the training split from which a server that is trusted derives a common preprocessing."""
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

    def test(self, index: int, job: Job) -> np.ndarray | Samples:
        """Pool indices of the site's test split, or its part of a test set that is nobody's own."""
        ...


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


def prepare(data: SiteData, job: Job, index: int, folder: Path | None, device: torch.device) -> Prepared:
    """The site as client ``index`` of a job. ``folder`` keeps its features and its method's state over restarts."""
    client, found = data.client(index, job), data.test(index, job)
    counts = client.counts
    rows = np.empty(0, dtype=np.int64) if isinstance(found, Samples) else found
    if job.encoding is not None:
        client, rows = encode_client(client, rows, job.encoding, None if folder is None else folder / "features")
        found = encode_samples(found, job.encoding) if isinstance(found, Samples) else rows
    return Prepared(
        job=job,
        client=client,
        test=Split(found, client.transform, job.n_classes) if isinstance(found, Samples) else Split.of(client, found),
        method=job.build_method(),
        model=FlatModel(job.build_model().to(device)),
        state=SiteState(folder, job.run),
        counts=counts,
    )
