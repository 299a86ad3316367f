"""The search phase of a round: what clients try, which models that makes, how good they are, what is in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fedtail.core.candidates import Candidates, separate_candidates
from fedtail.core.metrics import METRICS, score, score_of
from fedtail.core.records import Update
from fedtail.errors import FedtailError
from fedtail.rates.base import RateStrategy
from fedtail.rates.race import Race
from fedtail.rounds.evaluation import count_candidates, score_candidates
from fedtail.rounds.state import Problem
from fedtail.settings import Settings


class NoValidationError(FedtailError):
    """Models were to be compared where nobody has validation data."""


def racing(rates: RateStrategy, settings: Settings) -> RateStrategy:
    """The strategy, behind a race where ``local.lr`` or the rate is ``auto``."""
    lr = settings.local.lr == "auto"
    if not lr and not rates.raced:
        return rates
    if lr and rates.searches == "lr":
        raise FedtailError("local.lr = 'auto' and rates.searches = 'lr' both search for a learning rate; use only one")
    if settings.privacy.mode == "central":
        raise FedtailError(
            f"privacy.mode = 'central' covers one aggregate per round, but {'local.lr' if lr else 'rates.rate'} = "
            f"'auto' compares several; set a number, e.g. {0.1 if lr else 0.6}"
        )
    names = (*(["lr"] if lr else []), *(["rate"] if rates.raced else []))
    return Race(rates, names, settings.local.optimizer)


def probes_of(rates: RateStrategy, clients: tuple[int, ...], decay: float) -> dict[str, np.ndarray]:
    """(S, P) values that the sampled clients try, by what is searched. A searched learning rate is the schedule's first
    value; ``decay`` is what the schedule has made of it."""
    rows = rates.ask()[list(clients)]
    tried = {name: np.broadcast_to(values, rows.shape) for name, values in rates.trials().items()}
    if rates.searches == "rate":
        tried["rate"] = rows
    else:
        tried |= {"rate": np.broadcast_to(rates.base_rates[list(clients)][:, None], rows.shape), rates.searches: rows}
    return {name: values * decay if name == "lr" else values for name, values in tried.items()}


def rewards_of(problem: Problem, settings: Settings, candidates: Candidates, present: np.ndarray) -> np.ndarray:
    """(N,) the metric of every candidate, from counts summed over all validating clients or from the server's set."""
    return _values(problem, settings, candidates, present, settings.run.metric)[settings.run.metric]


def values_of(problem: Problem, settings: Settings, models: Sequence[Tensor]) -> np.ndarray:
    """(N,) the metric of models that are no candidates of a round; NaN where there is no validation data."""
    metric = settings.run.metric
    every = np.arange(problem.engine.n_clients)
    try:
        return _values(problem, settings, separate_candidates(models), every, metric)[metric]
    except NoValidationError:
        return np.full(len(models), np.nan)


WEIGHTS = {"pr_auc": 2.0}
"""Of what races compare by, others count once. The class-balanced loss alone prefers models that are sure of nothing,
which small steps give. How samples are ordered does not, but few samples tell it less well."""


def race_values(
    problem: Problem, settings: Settings, candidates: Candidates, present: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(N,) what the models of a race are compared by, higher is better, and what is to be told of them: smooth
    companions of the metric where somebody tells of probabilities, since after a few rounds they differ by less than a
    small split tells by right and wrong answers."""
    run = settings.run
    smooth = METRICS[run.metric].smooth
    tells = problem.engine.tells_scores or (run.validate_on == "server" and problem.holdout is not None)
    if not smooth or not tells:
        found = rewards_of(problem, settings, candidates, present)
        return found, {"reward": found}
    values = _values(problem, settings, candidates, present, run.metric, *smooth)
    known = [m for m in smooth if np.isfinite(values[m]).all()] or [run.metric]
    told = {m: values[m] if METRICS[m].higher_is_better else 1 / values[m] - 1 for m in smooth if m in known}
    return np.sum([WEIGHTS.get(m, 1.0) * values[m] for m in known], axis=0), {"reward": values[run.metric], **told}


def _values(
    problem: Problem, settings: Settings, candidates: Candidates, present: np.ndarray, *metrics: str
) -> dict[str, np.ndarray]:
    """(N,) each metric of every candidate as ``core.metrics.reward`` has it."""
    clients = present.tolist()
    held = problem.holdout if settings.run.validate_on == "server" else None
    if any(METRICS[metric].needs == "scores" for metric in metrics):
        told = None if held is None else score_candidates(problem.model, candidates, held)
        scored = dict(told or problem.engine.validate_scores(candidates, clients))
        each = [scored[s] for s in range(len(candidates))]
        values = {m: np.array([score_of(one, m, problem.background) for one in each]) for m in metrics}
        n = np.array([one.n for one in each])
    else:
        counts = (
            problem.engine.validate(candidates, clients)
            if held is None
            else count_candidates(problem.model, candidates, held)
        )
        values = {m: score(counts, m, problem.background) for m in metrics}
        n = counts[:, 1].sum(axis=-1)
    if not n.all():
        where = "at the clients; set data.validation" if settings.run.validate_on == "clients" else "at the server"
        who = problem.rates.name if isinstance(problem.rates, Race) else f"rates {problem.rates.name!r}"
        raise NoValidationError(f"{who} compares models, but there is no validation data {where}")
    return values


def reports_of(updates: Sequence[Update], n_clients: int) -> dict[str, np.ndarray]:
    """name -> (K, P) scalars that clients reported, NaN for those that did not."""
    names = {name for u in updates for name in u.reports}
    out = {}
    for name in sorted(names):
        probes = max(len(u.reports[name]) for u in updates if name in u.reports)
        out[name] = np.full((n_clients, probes), np.nan)
        for u in updates:
            if name in u.reports:
                out[name][u.client] = u.reports[name]
    return out


class RatesInForce:
    """The resampling rates of each round, and V_t = sum of p_k |r_k^t - r_k^(t-1)| with V_t / sqrt(t) (paper 3.3).

    Rounds of equal rates share one list, so that a history over a million clients stays small.
    """

    def __init__(self, history: Sequence[dict[str, Any]]) -> None:
        self.before = history[-1] if history else None
        self.last = np.array(history[-1]["rates"], dtype=np.float64) if history else None

    def record(self, rates: RateStrategy, p: np.ndarray, t: int) -> dict[str, Any]:
        """What round t's record says of rates and of whatever else is searched."""
        own, before = rates.searches == "rate", self.before or {}
        now = np.array(rates.rates if own else rates.base_rates, dtype=np.float64)
        same = self.last is not None and np.array_equal(now, self.last)
        moved = 0.0 if same or self.last is None else float(np.abs(now - self.last) @ p)
        variation = float(before.get("path_variation", 0.0)) + moved
        out: dict[str, Any] = {"rates": before["rates"] if same else now.tolist()}
        if not own:
            searched = {rates.searches: rates.rates.tolist()}
            out["searched"] = before["searched"] if searched == before.get("searched") else searched
        out["path_variation"] = variation
        out["path_variation_per_root_round"] = variation / float(np.sqrt(t + 1))
        self.last, self.before = now, out
        return out
