"""A run with trees: what is built for it, and which settings it leaves no room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedtail.boosting.bins import columns_of
from fedtail.boosting.model import Shape, TreesModel
from fedtail.data.federation import Federation
from fedtail.errors import FedtailError
from fedtail.methods.trees import Trees
from fedtail.rates import Uniform
from fedtail.rounds.state import Problem
from fedtail.settings import Settings
from fedtail.simulate.trees import TreeSimulator


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
    problem = Problem(
        engine=TreeSimulator(federation, model),
        method=method,
        rates=Uniform(federation.n_clients, 0.0),
        n_classes=classes,
        train_counts=federation.label_map().sum(0),
        background=federation.background,
    )
    return problem, architecture
