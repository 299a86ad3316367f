"""A rehearsal's data: a site plays one client of a registered data set."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from fedtail.core.decisions import Decision
from fedtail.data.federation import Client, Federation, Samples
from fedtail.federate.protocol.job import Job
from fedtail.runs.judged import Judged
from fedtail.runs.saved import SavedModel


@dataclass(frozen=True)
class FederationSlice:
    """Client ``index`` of a federation that is split the same way everywhere: rehearsals and tests."""

    federation: Federation
    index: int
    model: str = "mlp"
    model_options: dict[str, Any] = field(default_factory=dict)

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

    def statistics(self, request: dict[str, Any]) -> dict[str, Any]:
        return {}

    def client(self, index: int, job: Job) -> Client:
        """The slice under the number the server gave this site, so that every random draw is the simulator's."""
        mine = self.federation.client(self.index)
        return replace(mine, index=index, transform=job.transform, augment=job.augment)

    def judged(self, model: SavedModel) -> Judged:
        rows = self.test(self.index, None)
        x, y = model.inputs(rows.x.numpy(), []), rows.y.numpy()
        raw = replace(model, decision=Decision()).probabilities(x)
        return Judged(model.classes, raw, model.decision, y=y, x=x, preprocessing=model.preprocessing)

    def test(self, index: int, job: Job | None) -> Samples:
        """Every K-th of the samples that all are tested on."""
        return self.federation.test.take(np.arange(self.index, len(self.federation.test), self.federation.n_clients))

    def columns(self, index: int, seed: int) -> tuple[np.ndarray, ...]:
        return ()
