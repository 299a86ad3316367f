"""Trees in the simulator: the rows of all sites together, since every partition gives the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.boosting.bins import read_columns
from fedtail.boosting.grower import Ask, Site, asking
from fedtail.boosting.model import TreesModel, with_site
from fedtail.boosting.predictor import Forest
from fedtail.core.candidates import Candidates
from fedtail.core.records import Refusal, Task, Tensors, Update
from fedtail.core.totals import LocalTotals
from fedtail.data.federation import Federation
from fedtail.rounds.evaluation import Logits, Split
from fedtail.simulate.base import Scoring

NETWORKS = "trees are grown from sums; there is no local training of a network"


class TreeSimulator(Scoring):
    """An engine for the loop of trees (``boosting.loop``)."""

    takes_rivals = False

    def __init__(self, federation: Federation, model: TreesModel) -> None:
        self.federation, self.model = federation, model
        self.n_clients, self.sizes = federation.n_clients, federation.sizes
        columns, n = model.shape.columns, len(federation.pool)
        owner = np.full(n, -1)
        for k in range(self.n_clients):
            owner[np.concatenate([federation.train[k], federation.validation[k]])] = k
        tested = federation.test_clients if federation.test_clients.size else -1
        test, pool = federation.test.x, federation.pool.x
        self._values = {
            id(federation.pool): read_columns(with_site(pool, columns, owner).numpy(), columns),
            id(federation.test): read_columns(with_site(test, columns, tested).numpy(), columns),
        }
        self._known: dict[int, tuple[Forest, np.ndarray, np.ndarray]] = {}
        """Samples -> the forest that was last asked about, the rows in bins, and their scores."""

    def asking(self, forest: Forest | None) -> Ask:
        values, y = self._values[id(self.federation.pool)], self.federation.pool.y.numpy()
        rows = (np.concatenate(self.federation.train), self.federation.validation_rows)
        train, held = ((values[:, index], y[index]) for index in rows)
        return asking(LocalTotals(1), {0: Site(train, held, forest)})

    def _logits(self, x: Tensor, split: Split) -> Logits:
        z = self._all_logits(x, split)
        rows = slice(None) if split.rows is None else split.rows
        yield torch.from_numpy(z[rows]), torch.from_numpy(split.labels)

    def _all_logits(self, x: Tensor, split: Split) -> np.ndarray:
        """(N, C) of all samples that a split is of. Of a forest that has grown, only what is new is added."""
        key, forest = id(split.samples), self.model.shape.unpack(x)
        assert forest is not None
        if key in self._known:
            before, bins, scores = self._known[key]
            if before.rounds <= forest.rounds and np.array_equal(before.value, forest.value[: before.rounds]):
                scores = forest.scores(bins, before.rounds, scores)
            else:
                scores = forest.scores(bins)
        else:
            bins = forest.start.bins.of(self._values[key])
            scores = forest.scores(bins)
        self._known[key] = (forest, bins, scores)
        return forest.logits(scores)

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        raise NotImplementedError(NETWORKS)

    def validate(self, candidates: Candidates, clients: Any) -> np.ndarray:
        raise NotImplementedError(NETWORKS)

    def measure(self, x: Tensor, what: str) -> dict[int, Tensor]:
        raise NotImplementedError(NETWORKS)

    def commit(self, choice: dict[int, int]) -> None:
        """Nothing was tried."""

    def state(self) -> dict[int, Tensors]:
        return {}

    def load_state(self, state: dict[int, Tensors]) -> None:
        """Sites keep nothing that the forest does not tell."""

    def info(self) -> dict[str, Any]:
        return {"engine": "simulator", "path": "trees", "reason": "sums of all rows", "device": "cpu"}

    def close(self) -> None:
        self._known.clear()
