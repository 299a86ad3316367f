"""A run with trees: what is built for it, its engine in the simulator, and which settings it leaves no room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.boosting.bins import columns_of, read_columns
from fedtail.boosting.grower import Ask, Site
from fedtail.boosting.model import Shape, TreesModel, with_site
from fedtail.boosting.predictor import Forest
from fedtail.core.records import Tensors
from fedtail.data.federation import Federation
from fedtail.errors import FedtailError
from fedtail.methods.trees import Trees
from fedtail.rates import Uniform
from fedtail.rounds.evaluation import Logits, Split
from fedtail.rounds.state import Problem
from fedtail.settings import Settings
from fedtail.simulate.base import Scoring


def forest_of(
    method: Trees,
    input_shape: Sequence[int],
    n_classes: int,
    preprocessing: Mapping[str, Any],
    sites: Sequence[str],
    settings: Settings,
) -> tuple[TreesModel, dict[str, Any]]:
    """A model without trees, and its description. ``sites``: those that data name, or nothing."""
    if len(input_shape) != 1:
        raise FedtailError(
            "method 'trees' needs a table, or images behind an encoder (model.encoder), but samples have shape "
            f"{tuple(input_shape)}"
        )
    known = list(sites) if method.site else []
    columns = columns_of(preprocessing, input_shape[0], len(known))
    shape = Shape(columns, n_classes, settings.run.rounds, method.leaves)
    return TreesModel(shape), {"name": "trees", "options": shape.to_json(), **({"sites": known} if known else {})}


def check_settings(settings: Settings) -> None:
    """Refuse what is asked of networks only."""
    method = "method 'trees'"
    if settings.model.name not in ("auto", "trees"):
        raise FedtailError(f"model.name = {settings.model.name!r} has no effect with {method}, which is its own model")
    if settings.privacy.mode != "none":
        raise FedtailError(
            f"privacy.mode = {settings.privacy.mode!r} adds noise to updates of networks; {method} has none, so choose "
            "another method, or privacy.mode = 'none'"
        )
    if settings.rates.name not in ("uniform", "fixed") or settings.rates.options.get("rate") == "auto":
        raise FedtailError(
            f"rates.name = {settings.rates.name!r} searches resampling rates; {method} weighs rows instead, see "
            "method.power; leave it out"
        )
    if settings.data.holdout or settings.run.participation < 1:
        raise FedtailError(f"{method} needs all sites in every round, and validates on their private splits")


def assemble_trees(federation: Federation, method: Trees, settings: Settings) -> tuple[Problem, dict[str, Any]]:
    """Everything the loop over trees needs, in the simulator, and the model's description."""
    check_settings(settings)
    sites = federation.sites if federation.preprocessing.get("site") else ()
    shape, classes = federation.input_shape, federation.n_classes
    model, architecture = forest_of(method, shape, classes, federation.preprocessing, sites, settings)
    engine: Any = TreeSimulator(federation, model)  # trains no networks
    problem = Problem(
        engine=engine,
        method=method,
        rates=Uniform(federation.n_clients, 0.0),
        n_classes=classes,
        train_counts=federation.label_map().sum(0),
        background=federation.background,
    )
    return problem, architecture


class TreeSimulator(Scoring):
    """The rows of all sites together, since every partition gives the same bits: an engine for ``boosting.loop``."""

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
        return Site(train, held, forest).answer

    def _logits(self, x: Tensor, split: Split) -> Logits:
        z = self._all_logits(x, split)
        rows = slice(None) if split.rows is None else split.rows
        yield torch.from_numpy(z[rows]), torch.from_numpy(split.labels)

    def _all_logits(self, x: Tensor, split: Split) -> np.ndarray:
        """(N, C) of all samples that a split is of. Of a forest that has grown, only what is new is added."""
        key, forest = id(split.samples), self.model.shape.unpack(x)
        assert forest is not None
        before, bins, scores = self._known.get(key) or (None, forest.start.bins.of(self._values[key]), None)
        grown = before is not None and np.array_equal(before.value, forest.value[: before.rounds])
        scores = forest.scores(bins, before.rounds, scores) if before is not None and grown else forest.scores(bins)
        self._known[key] = (forest, bins, scores)
        return forest.logits(scores)

    def state(self) -> dict[int, Tensors]:
        return {}

    def load_state(self, state: dict[int, Tensors]) -> None:
        """Sites keep nothing that the forest does not tell."""

    def info(self) -> dict[str, Any]:
        return {"engine": "simulator", "path": "trees", "reason": "sums of all rows", "device": "cpu"}

    def close(self) -> None:
        self._known.clear()
