"""Measure yardsticks: each site alone, all data pooled, and for tables scikit-learn on pooled data.

The network yardsticks have the model, the method and the settings of the federated run they are compared with; the
resampling rate is the one that the run ended with. Each is kept in a file, so an interrupted comparison goes on.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtail.boosting.loop import run_rounds
from fedtail.boosting.model import TreesModule
from fedtail.core.decisions import Decision
from fedtail.core.metrics import signed, summarize
from fedtail.core.scores import Scores
from fedtail.data.federation import Federation, Samples
from fedtail.rates import Uniform
from fedtail.rounds.evaluation import Split, federation_split, probabilities_of
from fedtail.rounds.race import usual_lrs
from fedtail.rounds.validation import kept_model
from fedtail.runs.build import Prepared, build, build_federation, prepare
from fedtail.runs.decide import choose_decisions, common_goal
from fedtail.runs.record import FOLDER, AtSite, RunRecord, Yardstick, load_yardstick
from fedtail.runs.saved import load_model
from fedtail.settings import DecisionSettings, Settings

MOST_ALONE = 20
"""Most sites that are trained alone: of more, so many from the largest to the smallest."""
Measured = dict[str, Any]
"""Fields of a ``Yardstick``: test metrics, counts on each site's own test rows, for sites alone a record of each."""


@dataclass(frozen=True)
class Setup:
    """What all yardsticks of a run share."""

    settings: Settings
    run: RunRecord
    raw: Federation
    """The data as they are."""
    ready: Prepared
    """The data as they are trained on."""


def measure_yardsticks(
    settings: Settings, run: RunRecord, base: Path, kinds: Iterable[str] = ()
) -> Iterator[Yardstick]:
    """The yardsticks of one federated run, all or of some kinds, those on file without being measured again."""
    files = {kind: base / FOLDER / f"{kind}-{run.folder.name}.json" for kind in kinds or MEASURED}
    setup = None
    if not all(path.is_file() for path in files.values()):  # the data are loaded and split once for all of them
        raw = build_federation(settings)
        setup = Setup(settings, run, raw, prepare(raw, settings))
    for kind, path in files.items():
        if path.is_file():
            yield load_yardstick(path)
            continue
        assert setup is not None
        if kind in ("boosting", "logistic") and len(setup.raw.input_shape) != 1:
            continue
        began = time.perf_counter()
        found = MEASURED[kind](setup)
        seconds = time.perf_counter() - began
        yardstick = Yardstick(kind=kind, seed=run.seed, run=run.folder.name, seconds=seconds, **found)
        yardstick.save(path)
        yield yardstick


def alone(setup: Setup) -> Measured:
    """Every site by itself; test metrics are means over sites. A site's own figure is of its own test samples where the
    data name sites: its validation split has chosen the model that it trained alone."""
    federation, run = setup.ready.federation, setup.run
    federated, rates = load_model(run.folder, allow_code=True), run.rate_path()[-1]
    tests, sites = [], []
    confusions: dict[str, list[list[int]]] = {}
    for k in chosen_sites(federation):
        name = federation.sites[k]
        module, decision = train_alone(setup, one_client(federation, [k], name), float(rates[k]))
        own = Split.of(federation, federation.validation[k])
        if federation.test_clients.size:
            own = replace(federation_split(federation, "test"), rows=np.flatnonzero(federation.test_clients == k))
        found = judged(federation, probabilities(module, federation, federation_split(federation, "test")), decision)
        tests.append(found["test"])
        confusions |= {site: counts for site, counts in found["confusions"].items() if site == name}
        several = len(np.unique(own.labels)) > 1  # of one class alone, always answering it would have an F1 of 1
        site = AtSite(
            site=name,
            samples=len(setup.raw.train[k]),
            test=tests[-1]["macro_f1"],
            own=macro_f1(module, federation, own, decision) if several else None,
            federated=macro_f1(federated.module, federation, own, federated.decision, k) if several else None,
        )
        sites.append(site)
    means = {key: float(np.mean([t[key] for t in tests])) for key, v in tests[0].items() if isinstance(v, float)}
    each = [site.own for site in sites if site.own is not None]
    if each:  # a site alone is judged at home
        means |= {"worst_site": min(each), "site_spread": float(np.std(each))}
    return {"test": means, "sites": tuple(sites), "confusions": confusions}


def pooled_network(setup: Setup) -> Measured:
    """One site that has all data."""
    federation, run = setup.ready.federation, setup.run
    everything = one_client(federation, range(federation.n_clients), "all sites")
    module, decision = train_alone(setup, everything, float(run.rate_path()[-1] @ run.weights))
    return judged(federation, probabilities(module, federation, federation_split(federation, "test")), decision)


Rows = tuple[np.ndarray, np.ndarray]
"""(N, width) inputs and (N,) labels."""
Fitted = Callable[[np.ndarray], np.ndarray]
"""(N, width) inputs -> (N, C) probabilities."""


def boosting(setup: Setup) -> Measured:
    """scikit-learn's gradient boosting on all training rows, unweighted or with weights share^-1/2, whichever is better
    on validation rows after the decision step."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    def fit(rows: Rows, power: float) -> Fitted:
        x, y = rows
        shares = np.bincount(y, minlength=setup.raw.n_classes) / len(y)
        weights = np.maximum(shares, 1 / len(y)) ** -power
        model = HistGradientBoostingClassifier(random_state=setup.run.seed).fit(x, y, sample_weight=weights[y])
        return lambda x: spread(model, x, setup.raw.n_classes) / weights  # so that they mean what they did unweighted

    return best_pooled(setup, [partial(fit, power=power) for power in (0.0, 0.5)])


def logistic(setup: Setup) -> Measured:
    """scikit-learn's logistic regression on all training rows, standardized."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def fit(rows: Rows) -> Fitted:
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of convergence: the yardstick is what its defaults give
            model.fit(*rows)
        return lambda x: spread(model, x, setup.raw.n_classes)

    return best_pooled(setup, [fit])


def spread(model: Any, x: np.ndarray, n_classes: int) -> np.ndarray:
    """(N, C) probabilities of a scikit-learn classifier, 0 for classes that it has never seen."""
    out = np.zeros((len(x), n_classes))
    out[:, model.classes_] = model.predict_proba(x)
    return out


def best_pooled(setup: Setup, fits: Sequence[Callable[[Rows], Fitted]]) -> Measured:
    """Fit to all training rows; of several, keep the best on all validation rows by the run's metric. Each answers by
    the decision that the run's settings ask for, found on the same rows."""
    federation, settings = setup.raw, setup.settings

    def inputs(samples: Samples) -> np.ndarray:
        return np.asarray(federation.transform(samples.x).numpy())

    train, held = (federation.pool.take(np.concatenate(part)) for part in (federation.train, federation.validation))
    best, score = None, -np.inf
    for fit in fits if len(held) else fits[:1]:
        model, decision = fit((inputs(train), train.y.numpy())), Decision()
        if len(held):
            p, y = normalized(model(inputs(held))), held.y.numpy()
            decision = common_goal(partial(Decision.scores, p=p, y=y), settings.decision, federation.classes).common
            value = signed(settings.run.metric, summarized(federation, decision.scores(p, y)).get(settings.run.metric))
        if best is None or value > score:
            best, score = (model, decision), value if len(held) else score
    assert best is not None
    return judged(federation, normalized(best[0](inputs(federation.test))), best[1])


MEASURED: Mapping[str, Callable[[Setup], Measured]] = {
    "alone": alone,
    "pooled": pooled_network,
    "boosting": boosting,
    "logistic": logistic,
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
    settings = setup.settings.replaced({"run.participation": 1.0, "privacy.mode": "none"})
    if not len(one.validation[0]):
        settings = settings.replaced({"run.select": "last", "run.patience": 0})
        settings = settings.model_copy(update={"decision": DecisionSettings()})
        if settings.local.lr == "auto":
            usual = usual_lrs(settings.local.optimizer)[0]
            settings = settings.replaced({"local.lr": setup.run.result.get("found", {}).get("lr", usual)})
    problem = build(settings, replace(setup.ready, federation=one), rates=Uniform(1, rate)).problem
    try:
        kept = kept_model(problem, settings, run_rounds(problem, settings, problem.begin()))
        decision = choose_decisions(problem, kept, settings.decision, one.classes).at(0)
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


def probabilities(module: nn.Module, federation: Federation, split: Split, site: int = -1) -> np.ndarray:
    """(N, C) a model's probabilities on a split. ``site``: the client whose rows these are, -1 for none."""
    module.eval()
    if isinstance(module, TreesModule):
        module.site = site
    with torch.no_grad():
        return probabilities_of(((module(x), y) for x, y in split.batches()), federation.n_classes)[0]


def normalized(p: np.ndarray) -> np.ndarray:
    return np.asarray(p / p.sum(1, keepdims=True))


def macro_f1(module: nn.Module, federation: Federation, split: Split, decision: Decision, site: int = -1) -> float:
    """Macro F1 of a model on a split, by its decision."""
    scores = decision.scores(probabilities(module, federation, split, site), split.labels)
    return float(summarize(scores.confusion)["macro_f1"])


def judged(federation: Federation, p: np.ndarray, decision: Decision) -> Measured:
    """All metrics of (N, C) probabilities on the common test set, and counts on the rows that are a site's own."""
    y, owner = federation.test.y.numpy(), federation.test_clients
    own = {
        name: decision.scores(p[owner == k], y[owner == k]).confusion
        for k, name in enumerate(federation.sites if owner.size else ())
    }
    each = [float(summarize(m)["macro_f1"]) for m in own.values() if np.count_nonzero(m.sum(1)) > 1]
    test = summarized(federation, decision.scores(p, y), each)
    return {"test": test, "confusions": {name: m.tolist() for name, m in own.items()}}


def summarized(federation: Federation, scores: Scores, sites: Sequence[float] = ()) -> dict[str, Any]:
    """All metrics of some counts. sites: macro F1 of each site."""
    return summarize(scores.confusion, federation.label_map().sum(0), federation.background, scores, sites or None)
