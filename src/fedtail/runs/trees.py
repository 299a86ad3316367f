"""A run with trees: what is built for it, and which settings it leaves no room for."""

from __future__ import annotations

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


def shape_of(method: Trees, federation: Federation, rounds: int) -> tuple[Shape, list[str]]:
    """The forest's shape, and the names of the sites that it knows."""
    if len(federation.input_shape) != 1:
        raise FedtailError(
            "method 'trees' needs a table, or images behind an encoder (model.encoder), but samples have shape "
            f"{federation.input_shape}"
        )
    sites = list(federation.sites) if method.site and federation.preprocessing.get("site") else []
    columns = columns_of(federation.preprocessing, federation.input_shape[0], len(sites))
    return Shape(columns, federation.n_classes, rounds, method.leaves), sites


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
    if settings.run.validate_on != "clients" or settings.run.participation < 1:
        raise FedtailError(f"{method} needs all sites in every round, and validates on their private splits")


def assemble_trees(federation: Federation, method: Trees, settings: Settings) -> tuple[Problem, dict[str, Any]]:
    """Everything the loop over trees needs, in the simulator, and the model's description."""
    check_settings(settings)
    shape, sites = shape_of(method, federation, settings.run.rounds)
    problem = Problem(
        engine=TreeSimulator(federation, TreesModel(shape)),
        method=method,
        rates=Uniform(federation.n_clients, 0.0),
        n_classes=federation.n_classes,
        train_counts=federation.label_map().sum(0),
        background=federation.background,
    )
    return problem, {"name": "trees", "options": shape.to_json(), **({"sites": sites} if sites else {})}
