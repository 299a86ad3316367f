"""What a site brings to a job: its data, the model and the method, built once and kept over messages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedtail.data.federation import Client
from fedtail.federate.protocol.job import Job
from fedtail.federate.site.state import SiteState
from fedtail.methods.base import Method
from fedtail.models.flat import FlatModel
from fedtail.runs.encoding import encode_client


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


def prepare(data: SiteData, job: Job, index: int, folder: Path | None, device: torch.device) -> Prepared:
    """The site as client ``index`` of a job. ``folder`` keeps its features and its method's state over restarts."""
    client, test = data.client(index, job), data.test(index, job)
    counts = client.counts
    if job.encoding is not None:
        store = None if folder is None else folder / "features"
        client, test = encode_client(client, test, job.encoding, store)
    return Prepared(
        job=job,
        client=client,
        test=test,
        method=job.build_method(),
        model=FlatModel(job.build_model().to(device)),
        state=SiteState(folder, job.run),
        counts=counts,
    )
