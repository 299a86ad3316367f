"""The search phase of a round: what clients try, which models that makes, how good they are, what is in force.

A race gives every learning rate a model of its own, a *rival* (vector, server moments and method state, and what
clients keep), since after one round a small step from a common model nearly always looks better than a large one
(short-horizon bias; Wu et al., ICLR 2018). The winner is the run that had its value from the start, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from fedtail.core.candidates import Candidates, separate_candidates
from fedtail.core.evidence import Evidence
from fedtail.core.metrics import METRICS, check_known, score, score_of
from fedtail.core.records import DIVERGED, Refusal, Task, Update
from fedtail.core.scores import Scores
from fedtail.errors import FedtailError, one_of
from fedtail.methods.base import Server
from fedtail.rates.base import RateStrategy, Setting
from fedtail.rounds.acceptance import QuorumError
from fedtail.rounds.aggregation import check_aggregate
from fedtail.rounds.evaluation import count_candidates, score_candidates
from fedtail.rounds.privacy import check_privacy
from fedtail.rounds.race import race_of
from fedtail.rounds.state import Problem, Rival, State
from fedtail.settings import LocalSettings, Settings


class NoValidationError(FedtailError):
    """Models were to be compared where nobody has validation data."""


def begin_search(problem: Problem, settings: Settings, round: int) -> None:
    """Tell the rate strategy of the run, and refuse a search that cannot work with this method, this data or this
    participation. Safe to repeat; a caller that leaves traces on disk calls it before it does."""
    rates, run = problem.rates, settings.run
    allowed = ("rate", "lr", *problem.method.tunable)
    if rates.searches not in allowed:
        raise one_of(f"rates.searches (with method {problem.method.name!r})", rates.searches, allowed)
    if problem.search_only and round == 0 and rates.done:
        raise FedtailError(f"rates {rates.name!r} does not search; to tune, use one that does, e.g. 'fedhoo'")
    evidence = Evidence(  # what there will be to compare models by
        counts=np.zeros((3, problem.n_classes)),
        background=problem.background,
        scores=Scores.of(np.empty((0, problem.n_classes)), np.empty(0, dtype=np.int64), tempered=False),
        sites=np.empty(0) if rates.done else None,
    )
    check_known(METRICS[run.metric], evidence)
    if settings.data.holdout and problem.holdout is None:
        raise FedtailError("data.holdout needs a server that has data; in a real federation, leave it out")
    check_privacy(problem, settings.privacy)
    check_aggregate(problem, settings)
    setting = Setting(
        rounds=run.rounds,
        participation=run.participation,
        sizes=np.asarray(problem.engine.sizes),
        labels=problem.labels,
        seed=run.seed,
        rivals=problem.engine.takes_rivals,
    )
    rates.begin(setting)


def starting_lr(rates: RateStrategy, local: LocalSettings) -> float:
    """The learning rate that the schedule starts from: the settings' own, or what a race has found so far."""
    race = race_of(rates)
    return float(local.lr) if race is None else race.lr


def scheduled_lr(rates: RateStrategy, settings: Settings, t: int) -> tuple[float, float]:
    """(learning rate of round t, the part of the first one that the schedule has left of it)."""
    local, first = settings.local, starting_lr(rates, settings.local)
    lr = round_rate(local.schedule, t, settings.run.rounds, first, min(LAST, first), local.warmup)
    return lr, lr / first


def probes_of(rates: RateStrategy, clients: tuple[int, ...], decay: float) -> dict[str, np.ndarray]:
    """(S, P) values that the sampled clients try, by what is searched. A searched learning rate is the schedule's first
    value; ``decay`` is what the schedule has made of it."""
    rows = rates.ask()[list(clients)]
    race = race_of(rates)
    tried = {} if race is None else {"lr": np.broadcast_to(race.trials(), rows.shape)}
    if rates.searches != "rate":
        tried["rate"] = np.broadcast_to(rates.base_rates[list(clients)][:, None], rows.shape)
    tried[rates.searches] = rows
    return {name: values * decay if name == "lr" else values for name, values in tried.items()}


def select(
    problem: Problem, settings: Settings, candidates: Candidates | None, updates: Sequence[Update], present: np.ndarray
) -> tuple[int, float | None]:
    """(number of the candidate that becomes the next model, its reward), after the strategy has been told the rewards
    of all; 0 and None where there is nothing to compare."""
    rates, n = problem.rates, problem.engine.n_clients
    race, reports = race_of(rates), reports_of(updates, n)
    if race is not None and race.rivals:  # models side by side are compared with each other (play_rivals)
        return 0, None
    if race is not None and race.racing and candidates is not None:
        values, shown = race_values(problem, settings, candidates, present)
        failed = np.nan_to_num(reports.get(DIVERGED, np.zeros((1, len(candidates))))).max(axis=0) > 0
        winner = race.judge(values, shown, failed)
        return winner, float(shown["reward"][winner])
    rewards = None if candidates is None else rewards_of(problem, settings, candidates, present)
    winner = rates.tell(rewards, reports=reports, present=np.isin(np.arange(n), present))
    return winner, None if rewards is None else float(rewards[winner])


def rewards_of(problem: Problem, settings: Settings, candidates: Candidates, present: np.ndarray) -> np.ndarray:
    """(N,) the metric of every candidate, from counts summed over all validating clients or from the server's set."""
    return _values(problem, candidates, present, settings.run.metric)[settings.run.metric]


def values_of(problem: Problem, settings: Settings, models: Sequence[Tensor]) -> np.ndarray:
    """(N,) the metric of models that are no candidates of a round; NaN where there is no validation data."""
    metric = settings.run.metric
    every = np.arange(problem.engine.n_clients)
    try:
        return _values(problem, separate_candidates(models), every, metric)[metric]
    except NoValidationError:
        return np.full(len(models), np.nan)


WEIGHTS = {"pr_auc": 2.0}
"""Weights of what races compare by, where it is not 1. The class-balanced loss alone prefers models that are sure of
nothing, which small steps give. How samples are ordered does not, but few samples tell it less well."""


def race_values(
    problem: Problem, settings: Settings, candidates: Candidates, present: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(N,) what the models of a race are compared by, higher is better, and what is to be told of them: the metric's
    smooth companions, since after a few rounds models differ by less than a small split tells by right and wrong
    answers."""
    run = settings.run
    smooth = METRICS[run.metric].smooth
    if not smooth:
        rewards = rewards_of(problem, settings, candidates, present)
        return rewards, {"reward": rewards}
    values = _values(problem, candidates, present, run.metric, *smooth)
    known = [m for m in smooth if np.isfinite(values[m]).all()] or [run.metric]
    shown = {m: values[m] if METRICS[m].higher_is_better else 1 / values[m] - 1 for m in smooth if m in known}
    return np.sum([WEIGHTS.get(m, 1.0) * values[m] for m in known], axis=0), {"reward": values[run.metric], **shown}


def _values(problem: Problem, candidates: Candidates, present: np.ndarray, *metrics: str) -> dict[str, np.ndarray]:
    """(N,) each metric of every candidate as ``core.metrics.reward`` has it."""
    clients = present.tolist()
    held = problem.holdout
    if any(METRICS[metric].needs == "scores" for metric in metrics):
        pairs = None if held is None else score_candidates(problem.model, candidates, held)
        scored = dict(pairs or problem.engine.validate_scores(candidates, clients))
        each = [scored[s] for s in range(len(candidates))]
        values = {m: np.array([score_of(scores, m, problem.background) for scores in each]) for m in metrics}
        n = np.array([scores.n for scores in each])
    else:
        counts = (
            problem.engine.validate(candidates, clients)
            if held is None
            else count_candidates(problem.model, candidates, held)
        )
        values = {m: score(counts, m, problem.background) for m in metrics}
        n = counts[:, 1].sum(axis=-1)
    if not n.all():
        where = "at the clients; set data.validation" if held is None else "at the server"
        who = f"rates {problem.rates.name!r}" if race_of(problem.rates) is None else problem.rates.name
        raise NoValidationError(f"{who} compares models, but there is no validation data {where}")
    return values


def reports_of(updates: Sequence[Update], n_clients: int) -> dict[str, np.ndarray]:
    """name -> (K, P) scalars that clients reported, NaN for those that did not."""
    out: dict[str, np.ndarray] = {}
    for u in updates:
        for name, values in u.reports.items():
            out.setdefault(name, np.full((n_clients, len(values)), np.nan))[u.client] = values
    return out


class RatesInForce:
    """The resampling rates of each round, and V_t = sum of p_k |r_k^t - r_k^(t-1)| with V_t / sqrt(t) (paper 3.3).
    Rounds of equal rates share one list: see ``rounds.history``."""

    def __init__(self, history: Sequence[dict[str, Any]]) -> None:
        self.before = history[-1] if history else None
        self.last = np.array(history[-1]["rates"], dtype=np.float64) if history else None

    def record(self, rates: RateStrategy, p: np.ndarray, t: int) -> dict[str, Any]:
        """Return the part of round t's record that is about rates and whatever else is searched."""
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


@dataclass(frozen=True)
class Played:
    """A round of one model, for the round's record."""

    task: Task
    server: Server
    present: np.ndarray
    """Clients whose updates were taken."""
    refused: list[Refusal]
    record: dict[str, Any]
    more: dict[str, Any]
    """What the record says last: privacy, diagnostics, reward."""


def play_rivals(
    problem: Problem, settings: Settings, state: State, play: Callable[[dict[str, Any] | None], Played]
) -> Played:
    """Play a round of every rival, after which ``state`` is that of the leading one; of the one model, if there are no
    rivals. ``play``: the round of the model that ``state`` holds, given the record with what privacy has cost so far.

    A rival in which a client's loss is not finite, or too few clients are left, has failed; its model stays where it
    was.
    """
    race = race_of(problem.rates)
    if race is None or not race.rivals:
        return play(None)
    start, rivals, played, trouble = leave(problem, state), race.rivals, dict[int, Played](), None
    spent: dict[str, Any] | None = None
    for rival in rivals:
        enter(problem, state, state.rivals.setdefault(rival, start))
        race.rival = rival
        try:
            played[rival] = play(spent)
        except QuorumError as error:
            trouble = error
            continue
        state.rivals[rival], spent = leave(problem, state), played[rival].more
    if trouble is not None and not played:
        raise trouble
    silent = np.array([n not in played for n in rivals])
    failed = silent | [n in played and any(r.code == DIVERGED for r in played[n].refused) for n in rivals]
    present = np.unique(np.concatenate([p.present for p in played.values()]))
    shares, ends = problem.engine.sizes / problem.engine.sizes.sum(), [state.rivals[n] for n in rivals]
    views = [problem.view(settings, end.x, state.round, shares, 0.0) for end in ends]
    models = separate_candidates([problem.method.serve(v, e.method) for v, e in zip(views, ends, strict=True)])
    values, shown = race_values(problem, settings, models, present)
    leader = race.judge(values, shown, silent if failed.all() else failed)
    enter(problem, state, state.rivals[leader])
    state.rivals = {n: state.rivals[n] for n in race.rivals}
    refused = {(r.client, r.reason): r for p in played.values() for r in p.refused if r.code != DIVERGED}
    best = played[leader]
    cost = {"privacy": spent["privacy"]} if spent is not None and "privacy" in spent else {}
    return replace(best, refused=list(refused.values()), more={**best.more, **cost})


def leave(problem: Problem, state: State) -> Rival:
    """Return the part of the state that belongs to one model."""
    return Rival(state.x, state.method, state.server, dict(problem.engine.state()))


def enter(problem: Problem, state: State, rival: Rival) -> None:
    """Make a rival's model that of the state, and of the clients."""
    state.x, state.method, state.server = rival.x, rival.method, rival.server
    problem.engine.load_state(rival.clients)


LAST = 1e-4
"""Where ``cosine`` ends."""


def round_rate(kind: str, t: int, rounds: int, start: float, end: float = LAST, warmup: int = 0) -> float:
    """The rate of round ``t`` under a named schedule: ``constant``, or ``cosine``,
    end + (start - end)(1 + cos(pi t / (T - 1))) / 2 for t = 0..T-1 and ``start`` if T = 1.

    The first ``warmup`` rounds take 1/(warmup+1), 2/(warmup+1), ... of it: a large rate that serves well later can
    blow a fresh network up in its first steps, and plain SGD needs many rounds to come back from there.
    """
    rate = start
    if kind == "cosine" and rounds > 1:
        rate = end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * t / (rounds - 1)))
    return rate * min(1.0, (t + 1) / (warmup + 1))
