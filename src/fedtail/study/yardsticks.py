"""Measure yardsticks: each site alone, all data pooled, and for tables scikit-learn on pooled data.

The network yardsticks have the model, the method and the settings of the federated run they are compared with; the
resampling rate is the one that the run ended with. Each is kept in a file, so an interrupted comparison goes on.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtail.boosting.loop import run_rounds
from fedtail.boosting.model import TreesModule
from fedtail.core.decisions import Decision
from fedtail.core.evidence import confusion_matrix
from fedtail.core.metrics import summarize
from fedtail.data.federation import Federation
from fedtail.rates import Uniform
from fedtail.rounds.evaluation import Split, federation_split, probabilities_of
from fedtail.rounds.race import usual_lrs
from fedtail.rounds.selection import kept_model
from fedtail.runs.build import Prepared, build, build_federation, prepare
from fedtail.runs.decide import choose_decisions
from fedtail.runs.record import RunRecord
from fedtail.runs.saved import load_model
from fedtail.runs.yardstick import FOLDER, AtSite, Yardstick, load_yardstick
from fedtail.settings import DecisionSettings, PrivacySettings, Settings

MOST_ALONE = 20
"""Most sites that are trained alone: of more, so many from the largest to the smallest."""
Measured = tuple[dict[str, Any], tuple[AtSite, ...], dict[str, list[list[int]]]]
"""Test metrics, for sites alone a record of each, and counts on each site's own test rows."""


@dataclass(frozen=True)
class Setup:
    """What all yardsticks of a run share."""

    settings: Settings
    run: RunRecord
    raw: Federation
    """As the data are."""
    ready: Prepared
    """As they are trained on."""

    @property
    def federation(self) -> Federation:
        return self.ready.federation


def measure_yardsticks(
    settings: Settings, run: RunRecord, base: Path, kinds: Iterable[str] = ()
) -> Iterator[Yardstick]:
    """The yardsticks of one federated run, all or of some kinds, those on file without being measured again."""
    files = {kind: base / FOLDER / f"{kind}-{run.folder.name}.json" for kind in kinds or MEASURED}
    setup = None if all(path.is_file() for path in files.values()) else set_up(settings, run)
    for kind, path in files.items():
        if path.is_file():
            yield load_yardstick(path)
            continue
        assert setup is not None
        if kind in ("boosting", "logistic") and len(setup.raw.input_shape) != 1:
            continue
        began = time.perf_counter()
        test, sites, confusions = MEASURED[kind](setup)
        found = Yardstick(
            kind=kind,
            seed=run.seed,
            run=run.folder.name,
            test=test,
            seconds=time.perf_counter() - began,
            sites=sites,
            confusions=confusions,
        )
        found.save(path)
        yield found


def set_up(settings: Settings, run: RunRecord) -> Setup:
    """Load and split the data of a run once for all its yardsticks."""
    raw = build_federation(settings)
    return Setup(settings=settings, run=run, raw=raw, ready=prepare(raw, settings))


def alone(setup: Setup) -> Measured:
    """Every site by itself; test metrics are means over sites. A site's own figure is of its own test samples where the
    data name sites: its validation split has chosen the model that it trained alone."""
    federation, run = setup.federation, setup.run
    federated, rates = load_model(run.folder, allow_code=True), run.rate_path()[-1]
    tests, sites = [], []
    confusions: dict[str, list[list[int]]] = {}
    for k in chosen_sites(federation):
        module, decision = train_alone(setup, one_client(federation, [k], federation.sites[k]), float(rates[k]))
        own = Split.of(federation, federation.validation[k])
        if federation.test_clients.size:
            own = replace(federation_split(federation, "test"), rows=np.flatnonzero(federation.test_clients == k))
        split = federation_split(federation, "test")
        guess = answers(module, federation, split, decision)
        tests.append(summed(confusion_matrix(split.labels, guess, federation.n_classes), federation))
        confusions |= {name: m for name, m in on_own_rows(federation, guess).items() if name == federation.sites[k]}
        several = len(np.unique(own.labels)) > 1  # of one class alone, always answering it would have an F1 of 1
        site = AtSite(
            site=federation.sites[k],
            samples=len(setup.raw.train[k]),
            test=tests[-1]["macro_f1"],
            own=scored(module, federation, own, decision)["macro_f1"] if several else None,
            federated=scored(federated.module, federation, own, federated.decision, k)["macro_f1"] if several else None,
        )
        sites.append(site)
    return mean_metrics(tests), tuple(sites), confusions


def pooled_network(setup: Setup) -> Measured:
    """One site that has all data."""
    federation, run = setup.federation, setup.run
    everything = one_client(federation, range(federation.n_clients), "all sites")
    module, decision = train_alone(setup, everything, float(run.rate_path()[-1] @ run.weights))
    split = federation_split(federation, "test")
    guess = answers(module, federation, split, decision)
    test = summed(confusion_matrix(split.labels, guess, federation.n_classes), federation)
    return test, (), on_own_rows(federation, guess)


def with_sklearn(kind: str) -> Callable[[Setup], Measured]:
    """A measurement that fits a scikit-learn classifier to all training rows."""

    def measure(setup: Setup) -> Measured:
        from sklearn.ensemble import HistGradientBoostingClassifier
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        federation = setup.raw
        rows = np.concatenate(federation.train)
        x = federation.transform(federation.pool.x[rows]).numpy()
        model: Any = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        if kind == "boosting":
            model = HistGradientBoostingClassifier(class_weight="balanced", random_state=setup.run.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of convergence: the yardstick is what its defaults give
            model.fit(x, federation.pool.y.numpy()[rows])
        guess = model.predict(federation.transform(federation.test.x).numpy())
        test = summed(confusion_matrix(federation.test.y.numpy(), guess, federation.n_classes), federation)
        return test, (), on_own_rows(federation, guess)

    return measure


MEASURED: Mapping[str, Callable[[Setup], Measured]] = {
    "alone": alone,
    "pooled": pooled_network,
    "boosting": with_sklearn("boosting"),
    "logistic": with_sklearn("logistic"),
}


def one_client(federation: Federation, members: Iterable[int], name: str) -> Federation:
    """Some clients' data as those of one."""
    members = list(members)
    return replace(
        federation,
        train=(np.concatenate([federation.train[k] for k in members]),),
        validation=(np.concatenate([federation.validation[k] for k in members]),),
        sites=(name,),
        clusters=(),
    )


def train_alone(setup: Setup, one: Federation, rate: float) -> tuple[nn.Module, Decision]:
    """The model of a federation of one, and how it answers. Without validation data it takes the learning rate that the
    run found, its last model and the likeliest class."""
    settings = setup.settings
    run: dict[str, Any] = {"participation": 1.0}
    local: dict[str, Any] = {}
    wanted = settings.decision if len(one.validation[0]) else DecisionSettings()
    if not len(one.validation[0]):
        run |= {"select": "last", "patience": 0}
        usual = usual_lrs(settings.local.optimizer)[0]
        local |= {"lr": setup.run.result.get("found", {}).get("lr", usual)} if settings.local.lr == "auto" else {}
    settings = settings.model_copy(
        update={
            "run": settings.run.model_copy(update=run),
            "local": settings.local.model_copy(update=local),
            "privacy": PrivacySettings(),
            "decision": wanted,
        }
    )
    problem = build(settings, replace(setup.ready, federation=one), rates=Uniform(1, rate)).problem
    try:
        kept = kept_model(problem, settings, run_rounds(problem, settings, problem.begin()))
        decision = choose_decisions(problem, kept, wanted, one.classes).at(0)
    finally:
        problem.engine.close()
    problem.model.load(kept)
    return problem.model.module, decision


def chosen_sites(federation: Federation) -> list[int]:
    """Which sites are trained alone, in order: all of them, or some of every size."""
    if federation.n_clients <= MOST_ALONE:
        return list(range(federation.n_clients))
    by_size = np.argsort(-federation.sizes, kind="stable")
    picked = by_size[np.linspace(0, federation.n_clients - 1, MOST_ALONE).round().astype(int)]
    return sorted(int(k) for k in picked)


def scored(
    module: nn.Module, federation: Federation, split: Split, decision: Decision, site: int = -1
) -> dict[str, Any]:
    """All metrics of a model on a split, by its decision."""
    guess = answers(module, federation, split, decision, site)
    return summed(confusion_matrix(split.labels, guess, federation.n_classes), federation)


def answers(module: nn.Module, federation: Federation, split: Split, decision: Decision, site: int = -1) -> np.ndarray:
    """A model's answers on a split, by its decision. ``site``: the client whose rows these are, -1 for none."""
    module.eval()
    if isinstance(module, TreesModule):
        module.site = site
    with torch.no_grad():
        p, _ = probabilities_of(((module(x), y) for x, y in split.batches()), federation.n_classes)
    return decision.answers(decision.probabilities(p))


def on_own_rows(federation: Federation, guess: np.ndarray) -> dict[str, list[list[int]]]:
    """Site -> counts of some answers on the common test set, on the rows that are the site's own."""
    y, owner = federation.test.y.numpy(), federation.test_clients
    return {
        name: confusion_matrix(y[owner == k], guess[owner == k], federation.n_classes).astype(int).tolist()
        for k, name in enumerate(federation.sites if owner.size else ())
    }


def summed(confusion: np.ndarray, federation: Federation) -> dict[str, Any]:
    """All metrics of a confusion matrix."""
    return summarize(confusion, federation.label_map().sum(0), federation.background)


def mean_metrics(each: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of every scalar metric."""
    return {k: float(np.mean([e[k] for e in each])) for k, v in each[0].items() if isinstance(v, float)}
