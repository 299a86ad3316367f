"""Methods x seeds on one problem: the cells of a comparison, and the best learning rate of each method."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedtail.errors import FedtailError, one_of
from fedtail.methods import METHODS
from fedtail.runs.config import Config, load_config
from fedtail.runs.folder import read_history
from fedtail.study.cells import Cell, Outcome, seeds_of

DIGITS: dict[str, Any] = {
    "data.name": "digits",
    "rates.name": "uniform",
    "rates.rate": 0.6,
    "local.lr": 0.4,
    "local.batch_size": 32,
    "run.rounds": 40,
}
"""What is compared on where neither a config nor other data is given: the demo's problem."""


DIGITS_LRS = (0.4, 0.1)
"""Learning rates tried on that problem: what suits normalised steps makes weighted losses diverge."""


def own_problem(path: str | None, overrides: Sequence[str], flags: Mapping[str, Any] | None = None) -> bool:
    """Whether the caller brings a config or data, rather than taking the built-in problem."""
    named = (flags or {}).get("data.name") is not None or any(o.startswith("data.name=") for o in overrides)
    return path is not None or named


def chosen_methods(text: str) -> list[str]:
    """``all``, or names separated by commas."""
    names = list(METHODS) if text == "all" else [n.strip() for n in text.split(",") if n.strip()]
    if not names:
        raise FedtailError("no method given; use --methods all, or names from `fedtail methods` separated by commas")
    for name in names:
        if name not in METHODS:
            raise one_of("method", name, METHODS)
    return list(dict.fromkeys(names))


def method_configs(
    methods: Sequence[str],
    path: str | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> dict[str, Config]:
    """One checked config per method.

    ``method.key=value`` goes to every method that has the option, ``fedprox.mu=0.1`` to that method alone.
    """
    given = {k: v for k, v in (flags or {}).items() if v is not None}
    base = {} if own_problem(path, overrides, flags) else DIGITS
    own, general = _split(methods, overrides)
    out = {}
    for name in methods:
        mine = [o for o in general if not o.startswith("method.") or _key(o) in METHODS.options(name)]
        config = load_config(path, [*mine, *own.get(name, [])], {**base, **given, "method.name": name})
        METHODS.build(name, **config.method.options)  # a bad value is known before the first run
        out[name] = config
    return out


def comparison_cells(configs: Mapping[str, Config], seeds: int, lrs: Sequence[float] = ()) -> list[Cell]:
    """Every method under every seed and, if given, every learning rate."""
    cells = []
    for name, config in configs.items():
        for lr in lrs or (config.local.lr,):
            local = config.local.model_copy(update={"lr": lr})
            tried = config.model_copy(update={"local": local})
            label = f"{config.data.name}-{name}" + (f"-lr{lr:g}" if lrs else "")
            cells += seeds_of(tried, label, range(config.run.seed, config.run.seed + seeds))
    return cells


def best_rates(outcomes: Sequence[Outcome], metric: str = "macro_f1") -> list[Outcome]:
    """Of each method only the learning rate that does best by its mean validation metric over seeds.

    Chosen on the clients' private validation splits, never on test data. Rates within one standard error of the best
    count as equal and the largest of them wins: it has got furthest in the same rounds, and on a few hundred samples
    a smaller difference is luck. A rate at which a run failed is out, unless every rate failed.
    """
    by_method: dict[str, dict[float, list[Outcome]]] = {}
    for o in outcomes:
        by_method.setdefault(o.cell.config.method.name, {}).setdefault(o.cell.config.local.lr, []).append(o)
    kept = []
    for tried in by_method.values():
        scores = {lr: float(np.mean([validation_score(o, metric) for o in group])) for lr, group in tried.items()}
        top = max(scores, key=lambda lr: scores[lr])
        best, n = scores[top], sum(validation_size(o) for o in tried[top])
        error = math.sqrt(best * (1 - best) / n) if n and 0 < best < 1 else 0.0
        kept += tried[max(lr for lr, score in scores.items() if score >= best - error)]
    return kept


def validation_score(outcome: Outcome, metric: str) -> float:
    """The run's last validation metric; minus infinity for a failed run."""
    if outcome.error is not None:
        return -math.inf
    last: dict[str, Any] = {}
    for record in read_history(outcome.folder):
        last = record.get("validation") or last
    value = last.get(metric)
    return -math.inf if value is None else float(value)


def validation_size(outcome: Outcome) -> int:
    """Validation samples of all the run's clients together; 0 for a failed run."""
    about = outcome.folder / "clients.json"
    return sum(json.loads(about.read_text())["validation_sizes"]) if outcome.error is None else 0


def _split(methods: Sequence[str], overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Overrides of single methods, rewritten to ``method.key=value``, and the rest."""
    own: dict[str, list[str]] = {}
    general = []
    for item in overrides:
        section, dot, rest = item.partition(".")
        if dot and section in METHODS and section not in Config.model_fields:
            if section not in methods:
                raise FedtailError(f"override {item!r} is for a method that is not compared; add it to --methods")
            own.setdefault(section, []).append(f"method.{rest}")
            continue
        if section == "method":
            if _key(item) == "name":
                raise FedtailError(f"override {item!r} has no effect in a comparison; use --methods")
            if not any(_key(item) in METHODS.options(m) for m in methods):
                raise one_of(
                    "option of the compared methods", _key(item), {k for m in methods for k in METHODS.options(m)}
                )
        general.append(item)
    return own, general


def _key(override: str) -> str:
    return override.partition("=")[0].partition(".")[2].strip()
