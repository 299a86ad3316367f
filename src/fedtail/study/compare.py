"""Methods x seeds on one problem: the cells of a comparison, and the best learning rate of each method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fedtail.core.metrics import METRICS, lacking, signed
from fedtail.data.images.features import Progress
from fedtail.errors import FedtailError, one_of
from fedtail.files import read_json
from fedtail.methods import METHODS, Method
from fedtail.rates import RATES
from fedtail.runs.build import build_federation, prepare
from fedtail.runs.config import load_config
from fedtail.runs.record import read_history
from fedtail.runs.trees import check_settings
from fedtail.settings import NETWORKS_ONLY, Settings
from fedtail.study.cells import Cell, Outcome, finished, seeds_of

BUILT_IN: dict[str, Any] = {
    "data.name": "digits",
    "local.lr": 0.4,
    "local.batch_size": 32,
    "rates.rate": 0.6,
    "run.rounds": 40,
}
"""What is compared on where neither a config nor other data is given; tables can name its rate."""
BUILT_IN_LRS = (0.4, 0.1)
"""Learning rates tried there: what suits normalised steps makes weighted losses diverge."""


def brings_data(path: str | None, overrides: Sequence[str], flags: Mapping[str, Any]) -> bool:
    """Whether the caller gives a config or names the data, rather than taking the built-in problem."""
    named = flags.get("data.name") is not None or any(o.startswith("data.name=") for o in overrides)
    return path is not None or named


def default_lrs(path: str | None, overrides: Sequence[str], flags: Mapping[str, Any]) -> Sequence[float]:
    """Learning rates to try where the caller names none; empty stands for ``local.lr`` alone."""
    named = "local.lr" in flags or any(o.startswith("local.lr=") for o in overrides)
    settled = named or brings_data(path, overrides, flags)
    return () if settled else BUILT_IN_LRS


def chosen_methods(text: str) -> list[str]:
    """``all``, or names separated by commas."""
    names = list(METHODS) if text == "all" else [n.strip() for n in text.split(",") if n.strip()]
    if not names:
        raise FedtailError("no method given; use --methods all, or names from `fedtail methods` separated by commas")
    known = []
    for name in names:
        method, rates = split_pair(name)
        method = METHODS.canonical(method)
        if method not in METHODS:
            raise one_of("method", method, METHODS)
        if rates is not None and (rates := RATES.canonical(rates)) not in RATES:
            raise one_of("rate strategy", rates, RATES)
        known.append(method if rates is None else f"{method}+{rates}")
    return list(dict.fromkeys(known))


def split_pair(name: str) -> tuple[str, str | None]:
    """``fedcgnm+fedhoo`` is a method and its rate strategy, ``fedavg`` a method."""
    method, plus, rates = name.partition("+")
    return method.strip(), rates.strip() if plus else None


def method_configs(
    methods: Sequence[str],
    path: str | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Settings]:
    """One checked config per method, or per method and rate strategy (``fedcgnm+fedhoo``).

    ``method.key=value`` and ``rates.key=value`` go to every one that has the option, ``fedprox.mu=0.1`` to that method
    alone.
    """
    base = {} if brings_data(path, overrides, flags) else BUILT_IN
    given = {key: value for key, value in base.items() if key not in flags} | dict(flags)  # last: names clear options
    own, general = _split([split_pair(name)[0] for name in methods], overrides)
    out = {}
    for label in methods:
        name, rates = split_pair(label)
        kept = [o for o in general if not o.startswith("method.") or _key(o) in METHODS.options(name)]
        named = {**given, "method.name": name}
        if name == "trees" or METHODS[name].fixed:  # what networks are told is not for them
            kept = [o for o in kept if o.partition(".")[0] not in (*NETWORKS_ONLY, "rates")]
            named = {k: v for k, v in named.items() if k.partition(".")[0] not in (*NETWORKS_ONLY, "rates")}
        if rates is not None:
            kept = [o for o in kept if not o.startswith("rates.") or _key(o) in RATES.options(rates)]
            named = {k: v for k, v in named.items() if not k.startswith("rates.")} | {"rates.name": rates}
        config = load_config(path, [*kept, *own.get(name, [])], named, suggest=True)
        METHODS.build(name, **config.method.options)  # a bad value is known before the first run
        if name == "trees":
            check_settings(config)
        out[label] = config
    return out


def comparison_cells(configs: Mapping[str, Settings], seeds: int, lrs: Sequence[float] = ()) -> list[Cell]:
    """Every method under every seed and, if given, every learning rate."""
    cells = []
    for name, config in configs.items():
        for lr in (not METHODS[config.method.name].fixed and lrs) or (config.local.lr,):
            label = f"{config.data.name}-{name}" + (f"-lr{lr:g}" if lrs else "")
            cells += seeds_of(config.replaced({"local.lr": lr}), label, range(config.run.seed, config.run.seed + seeds))
    return cells


def check_data(cells: Sequence[Cell], base: Path, metric: str, *, own: bool, progress: Progress | None = None) -> None:
    """Build the caller's own data before the first run, so that what is wrong with it is said once and not per run, and
    images are encoded once and not by every run at the same time."""
    pending = own and not all(finished(cell.folder(base)) for cell in cells)
    if pending or metric == "defect_score":
        federation = build_federation(cells[0].config)
        if metric == "defect_score" and federation.background is None:
            raise lacking(METRICS[metric], f"--metric {metric}")
        if pending:
            prepare(federation, cells[0].config, progress)


def best_lrs(outcomes: Sequence[Outcome], metric: str = "macro_f1") -> list[Outcome]:
    """Keep of each method only the learning rate that does best by its mean validation metric over seeds.

    Chosen on the clients' private validation splits, never on test data. Learning rates within one standard error of
    the best count as equal and the largest of them wins: it has got furthest in the same rounds, and on a few hundred
    samples a smaller difference is luck. One at which a run failed is out, unless a run failed at each of them.
    """
    by_method: dict[str, dict[float, list[Outcome]]] = {}
    for o in outcomes:
        one = f"{o.cell.config.method.name}+{o.cell.config.rates.name}"
        by_method.setdefault(one, {}).setdefault(float(o.cell.config.local.lr), []).append(o)
    kept = []
    for tried in by_method.values():
        scores = {lr: float(np.mean([validation_score(o, metric) for o in group])) for lr, group in tried.items()}
        top = max(scores, key=lambda lr: scores[lr])
        best, n = scores[top], sum(validation_size(o) for o in tried[top])
        error = math.sqrt(best * (1 - best) / n) if n and 0 < best < 1 else 0.0
        kept += tried[max(lr for lr, score in scores.items() if score >= best - error)]
    return kept


def best_by_validation(outcomes: Sequence[Outcome], metric: str) -> list[Outcome]:
    """The runs, over all seeds, of the method and strategy with the best mean validation metric."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for o in outcomes:
        if o.error is None:
            groups.setdefault((o.cell.config.method.name, o.cell.config.rates.name), []).append(o)
    return max(groups.values(), key=lambda group: float(np.mean([validation_score(o, metric) for o in group])))


def validation_score(outcome: Outcome, metric: str) -> float:
    """The run's last validation metric, negative where less is better; minus infinity for a failed run. Of the final
    model where the rounds did not take it: a metric of probabilities, a method that changes the model afterwards."""
    if outcome.error is not None:
        return -math.inf
    last: dict[str, Any] = {}
    seen = METHODS[outcome.cell.config.method.name].conclude is Method.conclude
    for record in read_history(outcome.folder) if seen else ():
        last = record.get("validation") or last
    if metric not in last:
        last = read_json(outcome.folder / "result.json").get("validation", {})
    return signed(metric, last.get(metric))


def validation_size(outcome: Outcome) -> int:
    """Validation samples of all the run's clients together; 0 for a failed run."""
    return sum(read_json(outcome.folder / "clients.json")["validation_sizes"]) if outcome.error is None else 0


def _split(methods: Sequence[str], overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Overrides of single methods, rewritten to ``method.key=value``, and the rest."""
    own: dict[str, list[str]] = {}
    general = []
    for item in overrides:
        section, dot, rest = item.partition(".")
        if dot and section in METHODS and section not in Settings.model_fields:
            if section not in methods:
                raise FedtailError(f"override {item!r} is for a method that is not compared; add it to --methods")
            own.setdefault(section, []).append(f"method.{rest}")
            continue
        if section == "method":
            if _key(item) == "name":
                raise FedtailError(f"override {item!r} has no effect in a comparison; use --methods")
            if not any(_key(item) in METHODS.options(m) for m in methods):
                allowed = {k for m in methods for k in METHODS.options(m)}
                raise one_of("option", _key(item), allowed, lead="none of the compared methods has the")
        general.append(item)
    return own, general


def _key(override: str) -> str:
    return override.partition("=")[0].partition(".")[2].strip()
