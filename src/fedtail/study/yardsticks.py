"""Measure yardsticks: each site alone, all data pooled, and for tables scikit-learn on pooled data.

The network yardsticks have the model, the method and the settings of the federated run they are compared with; the
resampling rate is the one that the run ended with. Each is kept in a file, so an interrupted comparison goes on.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.core.metrics import confusion_matrix, summarize
from fedtail.data.federation import Federation
from fedtail.data.registry import Pooled
from fedtail.methods import METHODS
from fedtail.rates import RATES
from fedtail.rounds.loop import train_rounds
from fedtail.runs.problem import assemble, build_federation, build_module, load_pooled
from fedtail.runs.record import RunRecord
from fedtail.runs.saved import SavedModel, load_model
from fedtail.runs.yardstick import FOLDER, AtSite, Yardstick, load_yardstick
from fedtail.settings import Privacy, Settings

MOST_ALONE = 20
"""Most sites that are trained alone: of more, so many from the largest to the smallest."""
Model = Callable[[np.ndarray], np.ndarray]
"""Pool rows -> predicted classes."""


def measure_yardsticks(config: Settings, run: RunRecord, base: Path) -> Iterator[Yardstick]:
    """The yardsticks of one federated run, those on file without being measured again."""
    files = {kind: base / FOLDER / f"{kind}-{run.folder.name}.json" for kind in ("alone", "pooled", "boosting")}
    files["logistic"] = base / FOLDER / f"logistic-{run.folder.name}.json"
    pooled = load_pooled(config) if not all(path.is_file() for path in files.values()) else None
    federation = None if pooled is None else build_federation(config, pooled)
    for kind, path in files.items():
        if path.is_file():
            yield load_yardstick(path)
            continue
        assert pooled is not None and federation is not None
        if kind in ("boosting", "logistic") and len(federation.input_shape) != 1:
            continue
        began = time.perf_counter()
        test, sites = MEASURED[kind](config, federation, pooled, run)
        took = time.perf_counter() - began
        found = Yardstick(kind=kind, seed=run.seed, run=run.folder.name, test=test, seconds=took, sites=sites)
        found.save(path)
        yield found


def alone(
    config: Settings, federation: Federation, pooled: Pooled, run: RunRecord
) -> tuple[dict[str, Any], tuple[AtSite, ...]]:
    """Every site by itself; test metrics are means over sites."""
    federated, counts = load_model(run.folder, allow_code=True), federation.label_map()
    tests, sites = [], []
    for k in chosen_sites(federation):
        one = replace(
            federation,
            train=(federation.train[k],),
            validation=(federation.validation[k],),
            sites=(federation.sites[k],),
            clusters=(),
        )
        model = train_alone(config, one, pooled, run, float(run.rate_path()[-1][k]))
        tests.append(tested(model, federation))
        held = federation.validation[k]
        site = AtSite(
            site=federation.sites[k],
            samples=int(counts[k].sum()),
            test=tests[-1]["macro_f1"],
            own=macro_f1(model, federation, held),
            federated=macro_f1(federated, federation, held),
        )
        sites.append(site)
    return mean_metrics(tests), tuple(sites)


def pooled_network(
    config: Settings, federation: Federation, pooled: Pooled, run: RunRecord
) -> tuple[dict[str, Any], tuple[AtSite, ...]]:
    """One site that has all data."""
    one = replace(
        federation,
        train=(np.concatenate(federation.train),),
        validation=(np.concatenate(federation.validation),),
        sites=("all sites",),
        clusters=(),
    )
    rate = float(run.rate_path()[-1] @ run.weights)
    return tested(train_alone(config, one, pooled, run, rate), federation), ()


def with_sklearn(kind: str) -> Callable[..., tuple[dict[str, Any], tuple[AtSite, ...]]]:
    """A measurement that fits a scikit-learn classifier to all training rows."""

    def measure(
        config: Settings, federation: Federation, pooled: Pooled, run: RunRecord
    ) -> tuple[dict[str, Any], tuple[AtSite, ...]]:
        from sklearn.ensemble import HistGradientBoostingClassifier
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        rows = np.concatenate(federation.train)
        x = federation.transform(federation.pool.x[rows]).numpy()
        y = federation.pool.y.numpy()[rows]
        model: Any = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        if kind == "boosting":
            model = HistGradientBoostingClassifier(class_weight="balanced", random_state=run.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of convergence: the yardstick is what its defaults give
            model.fit(x, y)
        guess = model.predict(federation.transform(federation.test.x).numpy())
        return scored(federation.test.y.numpy(), guess, federation), ()

    return measure


MEASURED: Mapping[str, Callable[..., tuple[dict[str, Any], tuple[AtSite, ...]]]] = {
    "alone": alone,
    "pooled": pooled_network,
    "boosting": with_sklearn("boosting"),
    "logistic": with_sklearn("logistic"),
}


def train_alone(config: Settings, one: Federation, pooled: Pooled, run: RunRecord, rate: float) -> SavedModel:
    """The model of a federation of one. Without validation data it takes the learning rate that the run found, and its
    last model."""
    changes = {"run": {"participation": 1.0, "search_only": False, "validate_on": "clients"}, "local": {}}
    if not len(one.validation[0]):
        changes["run"] |= {"select": "last", "patience": 0}
        if config.local.lr == "auto":
            changes["local"] = {"lr": run.result.get("found", {}).get("lr", 0.1)}
    settings = config.model_copy(
        update={
            "run": config.run.model_copy(update=changes["run"]),
            "local": config.local.model_copy(update=changes["local"]),
            "privacy": Privacy(),
        }
    )
    module, architecture = build_module(settings, one, pooled)
    method = METHODS.build(settings.method.name, **settings.method.options)
    problem = assemble(one, module, method, RATES.build("uniform", 1, rate=rate), settings)
    try:
        state = train_rounds(problem, settings, problem.begin())
    finally:
        problem.engine.close()
    problem.model.load(state.best.x if settings.run.select == "best" and state.best is not None else state.x)
    return SavedModel.of(problem.model.module, one, architecture)


def chosen_sites(federation: Federation) -> list[int]:
    """Which sites are trained alone, in order: all of them, or some of every size."""
    if federation.n_clients <= MOST_ALONE:
        return list(range(federation.n_clients))
    by_size = np.argsort(-federation.sizes, kind="stable")
    picked = by_size[np.linspace(0, federation.n_clients - 1, MOST_ALONE).round().astype(int)]
    return sorted(int(k) for k in picked)


def tested(model: SavedModel, federation: Federation) -> dict[str, Any]:
    """Test metrics of a model."""
    guess = model.probabilities(federation.test.x).argmax(1)
    return scored(federation.test.y.numpy(), guess, federation)


def macro_f1(model: SavedModel, federation: Federation, rows: np.ndarray) -> float | None:
    """On some rows of the pool; None if there are none."""
    if not len(rows):
        return None
    guess = model.probabilities(federation.pool.x[rows]).argmax(1)
    return float(scored(federation.pool.y.numpy()[rows], guess, federation)["macro_f1"])


def scored(y: np.ndarray, guess: np.ndarray, federation: Federation) -> dict[str, Any]:
    """All metrics of some predictions."""
    matrix = confusion_matrix(y, guess, federation.n_classes)
    return summarize(matrix, federation.label_map().sum(0), federation.background)


def mean_metrics(each: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of every scalar metric."""
    return {k: float(np.mean([e[k] for e in each])) for k, v in each[0].items() if isinstance(v, float)}
