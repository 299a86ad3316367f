"""Federated models for tables against pooled yardsticks: `python benchmarks/tables.py compare` prints the table.

Every contender gets the same rows. Federated ones train over ten Dirichlet(0.5) sites (Adult, UNSW) or over carriers
(flights), on the path of a user's own table; pooled gradient boosting and logistic regression see all training rows
at once.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from fedtail import fit
from fedtail.core.metrics import summarize
from fedtail.core.random import generator
from fedtail.data import DATASETS, Pooled, partition, table_from_frame
from fedtail.data.federation import stratified_holdout
from fedtail.data.sets import adult, unsw
from fedtail.data.sets.flights import CLASSES as OUTCOMES
from fedtail.data.sets.flights import read_flights
from fedtail.data.sources import locate
from fedtail.models import build_model, choose_model

Frames = tuple[pd.DataFrame, pd.DataFrame, str]
"""Training rows, test rows, label column."""

MODELS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "mlp, standardized": ("mlp", {"hidden": (128, 64, 32)}, 0),
    "mlp, pieces": ("mlp", {"hidden": (128, 64, 32)}, None),
    "residual 64, standardized": ("residual_mlp", {"width": 64}, 0),
    "residual 64, pieces": ("residual_mlp", {"width": 64}, None),
    "residual 128, pieces": ("residual_mlp", {"width": 128}, None),
}
"""Name -> model, its options, and pieces per number (None: the default)."""


def compare(names: list[str], models: list[str], methods: list[str], rates: list[float], **settings: Any) -> None:
    """One line per contender, as they end; ``settings`` are those of ``fedtail.fit``."""
    print(f"| data | contender | macro F1 | tail recall | balanced accuracy | CPU s |\n|{'---|' * 6}", flush=True)
    for name in names:
        for title, contender in {**yardsticks(name), **federated(name, models, methods, rates, settings)}.items():
            began = time.process_time()
            found = contender()
            shown = " | ".join(f"{found[k]:.4f}" for k in ("macro_f1", "tail", "balanced_accuracy"))
            print(f"| {name} | {title} | {shown} | {time.process_time() - began:.0f} |", flush=True)


def frames(name: str) -> Frames:
    if name == "flights":
        table = read_flights(locate("flights"))
        future = table["month"] > 10
        return table[~future].reset_index(drop=True), table[future].reset_index(drop=True), "outcome"
    if name == "adult-10":
        folder = locate("adult")
        table = pd.concat([adult._read(folder / "adult.data", 0), adult._read(folder / "adult.test", 1)])
        table = table[~(table == "?").any(axis=1)].reset_index(drop=True)
        table["income"] = table["income"].str.rstrip(".")
        label = "income"
        table = table.iloc[adult.thin_minority((table[label] == adult.CLASSES[1]).to_numpy().astype(int), 10, 0)]
        table = table.astype(dict.fromkeys(adult.LAYOUT.numeric, float))
    else:
        label, parts = "attack_cat", unsw._frames(locate("unsw"))
        table = next(iter(parts.values())).drop(columns=["id", "label"], errors="ignore")
        table[label] = table[label].str.strip()
    y = pd.factorize(table[label], sort=True)[0]
    train, test = stratified_holdout(y, np.arange(len(y)), 0.15, generator(0, f"{name.partition('-')[0]}/test"))
    return table.iloc[train].reset_index(drop=True), table.iloc[test].reset_index(drop=True), label


def federated(
    name: str, models: list[str], methods: list[str], rates: list[float], settings: dict[str, Any]
) -> dict[str, Callable[[], dict[str, float]]]:
    """Title -> a run over the sites that returns its test metrics."""

    def run(method: str, rate: float, model: tuple[str, dict[str, Any], int | None]) -> dict[str, float]:
        pooled = as_table(name, model[2])
        sites = partition(pooled, clients=10, alpha=0.5) if pooled.sites is None else partition(pooled)
        module = build_model(model[0], sites.input_shape, sites.n_classes, **model[1])
        result = fit(sites, module, method, rate, metric="macro_f1", select="best", diagnostics=(), **settings)
        return result.test

    chosen = {"auto": (*choose_model((1,)), None), **MODELS}
    return {
        f"{method}, rate {rate:g}, {model}": partial(run, method, rate, chosen[model])
        for model in models
        for method in methods
        for rate in rates
    }


def as_table(name: str, pieces: int | None) -> Pooled:
    if name == "flights" and pieces is None:
        return DATASETS.build("flights")
    train, test, label = frames(name)
    more: dict[str, Any] = {"site": "carrier", "classes": OUTCOMES, "max_levels": 128} if name == "flights" else {}
    return table_from_frame(train, label, test=test, pieces=pieces, **more)


def yardsticks(name: str) -> dict[str, Callable[[], dict[str, float]]]:
    """Title -> a model of all training rows, by scikit-learn."""
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

    train, test, label = frames(name)
    y, truth = train.pop(label), test.pop(label)
    names = [c for c in train if not pd.api.types.is_numeric_dtype(train[c])]
    numbers = [c for c in train if c not in names]

    def score(model: Any) -> dict[str, float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            guess = model.fit(train, y).predict(test)
        classes, counts = np.unique(y, return_counts=True)
        table = np.zeros((len(classes), len(classes)), dtype=np.int64)
        np.add.at(table, (np.searchsorted(classes, truth), np.searchsorted(classes, guess)), 1)
        return summarize(table, counts)

    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1, max_categories=250)
    levels = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore"), names),
        (make_pipeline(SimpleImputer(), StandardScaler()), numbers),
    )
    trees = HistGradientBoostingClassifier(
        class_weight="balanced", categorical_features=list(range(len(names))), random_state=0
    )
    coded = make_column_transformer((codes, names), remainder="passthrough")
    return {
        "pooled gradient boosting, balanced": lambda: score(make_pipeline(coded, trees)),
        "pooled logistic regression": lambda: score(make_pipeline(levels, LogisticRegression(max_iter=300))),
    }
