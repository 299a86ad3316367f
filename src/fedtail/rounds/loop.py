"""THE ROUND LOOP: no I/O, no engine, no method in particular."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.candidates import Candidates, binary_candidates, uniform_candidates
from fedtail.core.metrics import gram_alignment, no_background, score, summarize
from fedtail.core.privacy import Privacy, epsilon, sensitivity
from fedtail.core.random import generator
from fedtail.core.records import Task, Tensors, Update
from fedtail.core.schedule import round_rate
from fedtail.errors import FedtailError, one_of
from fedtail.methods.base import Method, Server
from fedtail.models.flat import FlatModel, has_batchnorm
from fedtail.rates.base import RateStrategy, Setting
from fedtail.rounds.acceptance import accept
from fedtail.rounds.engine import Engine
from fedtail.rounds.plan import Plan
from fedtail.rounds.server import ServerOptimizer

PIECES = 256
"""Inner products of updates are summed in so many pieces, which a GPU computes at the same time."""


@dataclass(frozen=True)
class Best:
    """The model with the best validation metric so far; ``round`` counts rounds done."""

    round: int
    score: float
    x: Tensor


@dataclass
class State:
    """All that a run is, between two rounds; checkpoint it and nothing is lost."""

    round: int
    x: Tensor
    method: Tensors = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    best: Best | None = None
    rates: np.ndarray | None = None
    """(K,) the last record's rates, for the next record; not checkpointed, since history has them."""


@dataclass
class Problem:
    """What is trained and by whom; assembled by ``fedtail.runs.execution`` or ``fedtail.rounds.loop``."""

    engine: Engine
    model: FlatModel
    method: Method
    rates: RateStrategy
    server: ServerOptimizer
    n_classes: int
    train_counts: np.ndarray | None = None
    """(C,) global class counts, where they are known (simulation): for head / tail accuracy."""
    auxiliary: Callable[[Tensor], Tensor] | None = None
    """Model vector -> (C, rows, columns) output-layer gradients on the auxiliary set."""
    monitors: Sequence[Callable[[Task, Tensor], dict[str, Any]]] = ()
    """Measurements taken after each round; see ``rounds.diagnostics``."""
    background: int | None = None
    """The class that means "nothing found", where the data declare one."""
    holdout: Callable[[Candidates], np.ndarray] | None = None
    """Candidates -> (N, 3, C) per-class counts on the server's hold-out set, where it has one."""
    groups: tuple[str, ...] = ()
    """A label per client that the data names, for strategies that search over groups of clients."""

    def metrics(self, confusion: np.ndarray) -> dict[str, Any]:
        """Everything reported of a confusion matrix."""
        return summarize(confusion, self.train_counts, self.background)


def train_rounds(
    problem: Problem,
    plan: Plan,
    state: State,
    on_round: Callable[[State, dict[str, Any], float], None] | None = None,
) -> State:
    """Run rounds ``state.round`` .. ``plan.rounds - 1``, calling ``on_round(state, record, seconds)`` after each.

    The record holds only what the config determines, so that a resumed run has the history of an uninterrupted one.
    """
    engine, method, rates = problem.engine, problem.method, problem.rates
    begin_search(problem, plan, state.round)
    for t in range(state.round, plan.rounds):
        if plan.search_only and rates.done:
            break
        began = time.perf_counter()
        p_all = engine.sizes / engine.sizes.sum()  # of this round: a site may have joined after the last one
        lr = round_rate(plan.schedule, t, plan.rounds, plan.lr, plan.lr_min, plan.warmup)
        server = _server_view(problem, plan, state, t, p_all, lr)
        state.method = method.before_round(server, state.method)

        clients = sample_clients(engine.n_clients, plan.participation, plan.seed, t)
        probes = rates.ask()
        task = Task(
            t, state.x, clients, _probes(rates, probes, clients, lr / plan.lr), lr, method.broadcast(state.method),
            {k: m for k in clients if (m := method.message(state.method, k))}, rates.reports,
        )  # fmt: skip
        updates, refusals = accept(
            *engine.train(task), method, task, plan.quorum, problem.n_classes, problem.model.n_params, plan.privacy
        )
        present = np.array([u.client for u in updates])
        p = rates.weights(p_all, present)
        weights = method.weights(p, updates, state.method)
        rates.observe(present, [u.delta for u in updates])

        candidates = _candidates(rates, state.x, weights, updates, present)
        rewards = None
        if candidates is not None:
            rewards = _rewards(problem, plan, candidates, present)
        winner = rates.tell(
            rewards,
            reports=_reports(updates, engine.n_clients),
            present=_mask(engine.n_clients, present),
        )
        choice = rates.choice[present]
        aggregate = candidates.model(winner) if candidates else combine(state.x, weights, updates, choice)
        aggregate, cost = privatize(plan.privacy, aggregate, weights, updates, task, problem, state.history)
        state.x = problem.server.step(state.x, aggregate, problem.model.n_params)

        state.method = method.after_round(server, updates, choice.tolist(), state.method)
        engine.commit(dict(zip(present.tolist(), choice.tolist(), strict=True)))
        record = {
            "round": t,
            "lr": lr,
            "clients": present.tolist(),
            "train_loss": float(sum(a * u.loss[c] for a, u, c in zip(p, updates, choice, strict=True))),
            **_rates_in_force(rates, state, p_all, t),
            "searching": not rates.done,
            "refused": [{"client": r.client, "reason": r.reason} for r in refusals],
            **({"search": stats} if (stats := rates.stats()) else {}),
            **({"method": stats} if (stats := method.stats(state.method)) else {}),
            **cost,
            **({"alignment": _alignment(updates, choice, p)} if plan.alignment else {}),
        }
        if rewards is not None:
            record["reward"] = float(rewards[winner])
        for monitor in problem.monitors:
            record |= monitor(task, state.x)
        last = t == plan.rounds - 1 or (plan.search_only and rates.done)
        if last or (t + 1) % plan.evaluate_every == 0:
            record["test"] = problem.metrics(engine.confusion(state.x, "test"))
        if plan.validate_every and (last or (t + 1) % plan.validate_every == 0):
            record["validation"] = problem.metrics(engine.confusion(state.x, "validation"))
            now = record["validation"][plan.metric]
            if plan.keep_best and not np.isfinite(record["validation"]["accuracy"]):
                raise FedtailError(
                    "run.select = 'best' compares models, but there is no validation data at the clients; set "
                    "data.validation"
                )
            if plan.keep_best and (state.best is None or now > state.best.score):
                state.best = Best(t + 1, now, state.x)
        state.history.append(record)
        state.round = t + 1
        if on_round is not None:
            on_round(state, record, time.perf_counter() - began)
    return state


def sample_clients(n_clients: int, participation: float, seed: int, t: int) -> tuple[int, ...]:
    """The clients of round t, ascending."""
    if participation >= 1:
        return tuple(range(n_clients))
    n = max(1, round(participation * n_clients))
    picked = generator(seed, "participation", round=t).choice(n_clients, size=n, replace=False)
    return tuple(int(k) for k in np.sort(picked))


def combine(x: Tensor, weights: np.ndarray, updates: Sequence[Update], choice: np.ndarray) -> Tensor:
    """x + sum_k a_k delta_k[choice_k], summed in client order in float64."""
    total = x.double()
    for a, u, c in zip(weights, updates, choice, strict=True):
        total = total + float(a) * u.delta[int(c)].double()
    return total.to(x.dtype)


def privatize(
    privacy: Privacy | None,
    aggregate: Tensor,
    weights: np.ndarray,
    updates: Sequence[Update],
    task: Task,
    problem: Problem,
    history: Sequence[dict[str, Any]] = (),
) -> tuple[Tensor, dict[str, Any]]:
    """The aggregate with central noise where asked, and what the rounds so far have cost, for history.

    Releases are counted up over the records: a search sends several updates a round and, once it is done, one.
    """
    if privacy is None or privacy.mode == "none":
        return aggregate, {}
    record: dict[str, Any] = {"mode": privacy.mode, "noise": privacy.noise, "delta": privacy.delta}
    if privacy.mode == "central":
        bounds = [problem.method.bound(task.lr, u.steps[0], problem.n_classes) or 0.0 for u in updates]
        record["sensitivity"] = sensitivity(weights, bounds)
        n = problem.model.n_params
        noise = privacy.draw(n, privacy.noise * record["sensitivity"], "privacy", 0, task.round)
        aggregate = torch.cat([aggregate[:n] + noise.to(aggregate.device), aggregate[n:]])
    before = history[-1]["privacy"]["releases"] if history else 0
    record["releases"] = before + task.n_probes
    record["epsilon"] = epsilon(privacy.noise, record["releases"], privacy.delta)
    return aggregate, {"privacy": record}


def check_privacy(problem: Problem, plan: Plan) -> None:
    """Refuse a promise that cannot be kept: no norm bound, or more than updates leaves a site."""
    privacy, method, rates = plan.privacy, problem.method, problem.rates
    if privacy is None or privacy.mode == "none":
        return
    where = f"privacy.mode = {privacy.mode!r}"
    if has_batchnorm(problem.model.module):
        raise FedtailError(f"{where}: BatchNorm's statistics have no norm bound; use model.batchnorm='groupnorm'")
    if method.bound(1.0, 1, problem.n_classes) is None or rates.searches == "weight_decay":
        raise FedtailError(
            f"{where} needs a method whose updates are bounded, e.g. 'fedcgnm' with weight_decay = 0; {method.name!r} "
            "as set has no bound"
        )
    if method.wire != "nothing":
        raise FedtailError(f"{where} covers updates only, but {method.name!r} sends more: {method.wire}")
    if privacy.mode == "central" and (rates.patterns() is not None or rates.reports or rates.searches == "lr"):
        raise FedtailError(
            f"{where} covers one aggregate per round, but rates {rates.name!r} release more; use rates 'uniform' or "
            "'fixed', or privacy.mode = 'local'"
        )
    epsilon(privacy.noise, 1, privacy.delta)


def _server_view(problem: Problem, plan: Plan, state: State, t: int, p_all: np.ndarray, lr: float) -> Server:
    x = state.x

    def auxiliary() -> Tensor:
        if problem.auxiliary is None:
            raise FedtailError(f"method {problem.method.name!r} needs an auxiliary set; set data.auxiliary to e.g. 20")
        return problem.auxiliary(x)

    def output_weight(vector: Tensor) -> Tensor:
        offset, shape = problem.model.output_layer()
        return vector[offset : offset + shape[0] * shape[1]].view(shape)

    return Server(
        t, plan.rounds, x, problem.engine.n_clients, problem.n_classes, p_all,
        lambda what: problem.engine.measure(x, what), auxiliary, output_weight, lr,
    )  # fmt: skip


def begin_search(problem: Problem, plan: Plan, round: int) -> None:
    """Tell the rate strategy of the run, and refuse a search that cannot work with this method, this data or this
    participation. Safe to repeat; a caller that leaves traces on disk calls it before it does."""
    searches = problem.rates.searches
    allowed = ("rate", "lr", *problem.method.tunable)
    if searches not in allowed:
        raise one_of(f"rates.searches (with method {problem.method.name!r})", searches, allowed)
    if plan.search_only and round == 0 and problem.rates.done:
        raise FedtailError(f"rates {problem.rates.name!r} does not search; to tune, use one that does, e.g. 'fedhoo'")
    if plan.metric == "defect_score" and problem.background is None:
        raise no_background("run.metric = 'defect_score'")
    if plan.validate_on == "server" and problem.holdout is None:
        raise FedtailError("run.validate_on = 'server' needs a hold-out set at the server; set data.holdout, e.g. 0.05")
    check_privacy(problem, plan)
    sizes = np.asarray(problem.engine.sizes)
    problem.rates.begin(Setting(plan.rounds, plan.participation, sizes, problem.groups))


def _probes(rates: RateStrategy, probes: np.ndarray, clients: tuple[int, ...], decay: float) -> dict[str, np.ndarray]:
    """A searched learning rate is the schedule's first value; ``decay`` is what the schedule has made of it."""
    rows = probes[list(clients)]
    if rates.searches == "rate":
        return {"rate": rows}
    held = np.broadcast_to(rates.base_rates[list(clients)][:, None], rows.shape)
    return {"rate": held, rates.searches: rows * decay if rates.searches == "lr" else rows}


def _candidates(
    rates: RateStrategy, x: Tensor, weights: np.ndarray, updates: Sequence[Update], present: np.ndarray
) -> Candidates | None:
    wanted = rates.patterns()
    if wanted is None:
        return None
    deltas = [u.delta for u in updates]
    if wanted == "uniform":
        return uniform_candidates(x, weights, deltas)
    return binary_candidates(x, weights, deltas, rates.axes[present], rates.n_axes)


def _rewards(problem: Problem, plan: Plan, candidates: Candidates, present: np.ndarray) -> np.ndarray:
    """(N,) the metric of every candidate, from counts summed over all validating clients or from the server's set."""
    if plan.validate_on == "server" and problem.holdout is not None:
        counts = problem.holdout(candidates)
    else:
        counts = problem.engine.validate(candidates, present.tolist())
    if not counts[:, 1].sum(axis=-1).all():
        where = "at the clients; set data.validation" if plan.validate_on == "clients" else "at the server"
        raise FedtailError(f"rates {problem.rates.name!r} compares models, but there is no validation data {where}")
    return score(counts, plan.metric, problem.background)


def _rates_in_force(rates: RateStrategy, state: State, p: np.ndarray, t: int) -> dict[str, Any]:
    """The round's resampling rates, and V_t = sum of p_k |r_k^t - r_k^(t-1)| with V_t / sqrt(t) (paper 3.3).

    Rounds of equal rates share one list, so that a history over a million clients stays small.
    """
    own = rates.searches == "rate"
    now = np.array(rates.rates if own else rates.base_rates, dtype=np.float64)
    searched = {} if own else {"searched": {rates.searches: rates.rates.tolist()}}
    if not state.history:
        state.rates = now
        return {"rates": now.tolist(), **searched, "path_variation": 0.0, "path_variation_per_root_round": 0.0}
    before = state.history[-1]
    last = np.array(before["rates"], dtype=np.float64) if state.rates is None else state.rates
    same = np.array_equal(now, last)
    variation = float(before.get("path_variation", 0.0)) + (0.0 if same else float(np.abs(now - last) @ p))
    state.rates = now
    if searched.get("searched") == before.get("searched"):
        searched = {key: before[key] for key in searched}
    return {
        "rates": before["rates"] if same else now.tolist(),
        **searched,
        "path_variation": variation,
        "path_variation_per_root_round": variation / float(np.sqrt(t + 1)),
    }


def _mask(n: int, index: np.ndarray) -> np.ndarray:
    """(n,) bool, true at ``index``."""
    out = np.zeros(n, dtype=bool)
    out[index] = True
    return out


def _reports(updates: Sequence[Update], n_clients: int) -> dict[str, np.ndarray]:
    names = {name for u in updates for name in u.reports}
    out = {}
    for name in sorted(names):
        probes = max(len(u.reports[name]) for u in updates if name in u.reports)
        out[name] = np.full((n_clients, probes), np.nan)
        for u in updates:
            if name in u.reports:
                out[name][u.client] = u.reports[name]
    return out


def _alignment(updates: Sequence[Update], choice: np.ndarray, p: np.ndarray) -> float:
    u = torch.stack([u.delta[int(c)] for u, c in zip(updates, choice, strict=True)]).double()
    pieces = torch.nn.functional.pad(u, (0, -u.shape[1] % PIECES)).view(len(u), PIECES, -1).transpose(0, 1)
    return gram_alignment((pieces @ pieces.mT).sum(0).cpu().numpy(), p)
