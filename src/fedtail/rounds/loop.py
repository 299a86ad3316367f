"""THE ROUND LOOP: no I/O, no engine, no method in particular."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from fedtail.core.evidence import Evidence
from fedtail.core.metrics import METRICS, Metric, check_known, signed
from fedtail.core.random import generator
from fedtail.core.records import DIVERGED, Deltas, Task, clients_of, pooled
from fedtail.core.schedule import round_rate
from fedtail.core.scores import Scores
from fedtail.errors import FedtailError, one_of
from fedtail.methods.base import Server
from fedtail.rates.base import RateStrategy, Setting
from fedtail.rounds.acceptance import accept
from fedtail.rounds.aggregation import Gathered, check_aggregate, limited
from fedtail.rounds.privacy import check_privacy, privatize
from fedtail.rounds.progress import Pace, ProgressHook
from fedtail.rounds.rivals import Played, play_rivals
from fedtail.rounds.search import RatesInForce, probes_of, race_values, reports_of, rewards_of, values_of
from fedtail.rounds.server import in_force, server_step
from fedtail.rounds.state import Best, Problem, State
from fedtail.rounds.validation import validate_model
from fedtail.settings import Local, Run, Settings

RoundHook = Callable[[State, dict[str, Any], float], bool | None]
"""Called after every round with the state, the round's record and its seconds; True ends the run."""


def train_rounds(
    problem: Problem,
    settings: Settings,
    state: State,
    on_round: RoundHook | None = None,
    on_progress: ProgressHook | None = None,
) -> State:
    """Run rounds ``state.round`` .. ``run.rounds - 1``, calling ``on_round(state, record, seconds)`` after each and
    ``on_progress`` now and then inside them.

    The record holds only what the settings determine, so that a resumed run has the history of an uninterrupted one.
    """
    engine, method, rates, run = problem.engine, problem.method, problem.rates, settings.run
    begin_search(problem, settings, state.round)
    in_force = RatesInForce(state.history)
    pace = Pace(run.rounds, on_progress) if on_progress is not None else None
    for t in range(state.round, run.rounds):
        if (run.search_only and rates.done) or exhausted(state, run):
            break
        began = time.perf_counter()
        # Of this round: a site may have joined after the last one.
        p_all = limited(engine.sizes / engine.sizes.sum(), settings.server, problem.real)
        one = partial(play, problem, settings, state, t, p_all, pace)
        played = play_rivals(problem, settings, state, one) if rates.rivals else one()
        task, server = played.task, played.server
        record = {
            "round": t,
            **played.record,
            **in_force.record(rates, p_all, t),
            "searching": not rates.done,
            "refused": [r.to_json() for r in played.refused],
            **({"race": rates.evidence} if rates.evidence else {}),
            **({"search": stats} if (stats := rates.stats()) else {}),
            **({"method": stats} if (stats := method.stats(state.method)) else {}),
            **played.more,
        }
        for monitor in problem.monitors:
            record |= monitor(task, state.x)
        state.round = t + 1
        last = state.round == run.rounds or (run.search_only and rates.done)
        test = last or state.round % run.evaluate_every == 0
        served = method.serve(replace(server, x=state.x), state.method)
        if test:  # before validation: a real federation answers both in one exchange
            record["test"] = problem.metrics(engine.confusion(served, "test"))
        if run.validate_every and (last or state.round % run.validate_every == 0):
            record["validation"], sites, samples = validate_model(problem, served, run.metric)
            if sites:
                record["sites"] = sites
            if run.select == "best" or run.patience:
                state.best = _better(state, served, record["validation"], samples, run.metric)
        state.history.append(record)
        if exhausted(state, run) and not test:
            record["test"] = problem.metrics(engine.confusion(served, "test"))
        if pace is not None:
            pace.end()
        if on_round is not None and on_round(state, record, time.perf_counter() - began) is True:
            break
    return state


def play(
    problem: Problem,
    settings: Settings,
    state: State,
    t: int,
    p_all: np.ndarray,
    pace: Pace | None,
    spent: dict[str, Any] | None = None,
) -> Played:
    """Round t of one model, that of ``state``, which is moved on. ``spent``: the last record of what privacy has cost,
    where it is not that of the history."""
    engine, method, rates = problem.engine, problem.method, problem.rates
    local, run = settings.local, settings.run
    first = starting_lr(rates, local)
    lr = round_rate(local.schedule, t, run.rounds, first, min(local.lr_min, first), local.warmup)
    server = _server_view(problem, settings, state.x, t, p_all, lr)
    state.method = method.before_round(server, state.method)

    clients = sample_clients(engine.n_clients, run.participation, run.seed, t, problem.gone)
    task = Task(
        round=t,
        rival=rates.rival,
        x=state.x,
        clients=clients,
        probes=probes_of(rates, clients, lr / first),
        lr=lr,
        broadcast=method.broadcast(state.method),
        messages={k: m for k in clients if (m := method.message(state.method, k))},
        reports=rates.reports,
        weights=p_all[list(clients)],
        axes=rates.axes[list(clients)] if rates.patterns() == "binary" else None,
    )
    if pace is not None:
        rivals = rates.rivals or (task.rival,)
        if task.rival == rivals[0]:
            pace.begin(t, task.n_probes * len(rivals))
        task = replace(task, advance=lambda part: pace.advance(part / len(rivals)))
    updates, refusals = accept(*engine.train(task), problem, task, settings)
    present, first_of = clients_of(updates), np.array([u.client for u in updates])
    p = pooled(rates.weights(p_all, present), updates)
    summed = len(present) > len(updates)  # under masks there is nothing to say of single clients
    rates.observe(first_of, Deltas(updates))
    gathered = Gathered(problem, settings, updates, method.weights(p, updates, state.method))
    updates, weights = gathered.updates, gathered.weights

    candidates = gathered.candidates(state.x, rates, first_of)
    rewards, winner = None, 0
    reports = reports_of(updates, engine.n_clients)
    if candidates is not None and rates.racing:
        rewards, told = race_values(problem, settings, candidates, present)
        failed = np.nan_to_num(reports.get(DIVERGED, np.zeros((1, len(candidates))))).max(axis=0) > 0
        winner, rewards = rates.judge(rewards, told, failed), told["reward"]
    elif not rates.rivals:
        rewards = None if candidates is None else rewards_of(problem, settings, candidates, present)
        winner = rates.tell(rewards, reports=reports, present=_mask(engine.n_clients, present))
    choice = rates.choice[first_of]
    aggregate = candidates.model(winner) if candidates else gathered.combine(state.x, choice)
    history = state.history if spent is None else [spent]
    aggregate, cost = privatize(problem, settings.privacy, task, aggregate, weights, updates, history)
    applied = in_force(settings.server, problem.found)
    state.x, state.server = server_step(applied, state.x, aggregate, state.server, problem.model.n_params)

    state.method = method.after_round(server, updates, choice.tolist(), state.method)
    engine.commit(dict(zip(present.tolist(), rates.choice[present].tolist(), strict=True)))
    return Played(
        task=task,
        server=server,
        present=present,
        refused=refusals,
        record={
            "lr": lr / first * starting_lr(rates, local) if rates.evidence else lr,
            "clients": present.tolist(),
            "train_loss": float(sum(a * u.loss[c] for a, u, c in zip(p, updates, choice, strict=True))),
        },
        more={
            **cost,
            **({} if summed else gathered.diagnostics(choice, p, problem.watched, run.diagnostics)),
            **({} if rewards is None else {"reward": float(rewards[winner])}),
        },
    )


def begin_search(problem: Problem, settings: Settings, round: int) -> None:
    """Tell the rate strategy of the run, and refuse a search that cannot work with this method, this data or this
    participation. Safe to repeat; a caller that leaves traces on disk calls it before it does."""
    rates, run = problem.rates, settings.run
    allowed = ("rate", "lr", *problem.method.tunable)
    if rates.searches not in allowed:
        raise one_of(f"rates.searches (with method {problem.method.name!r})", rates.searches, allowed)
    if run.search_only and round == 0 and rates.done:
        raise FedtailError(f"rates {rates.name!r} does not search; to tune, use one that does, e.g. 'fedhoo'")
    _check_metric(problem, METRICS[run.metric])
    if run.validate_on == "server" and problem.holdout is None:
        raise FedtailError("run.validate_on = 'server' needs a hold-out set at the server; set data.holdout, e.g. 0.05")
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


def _check_metric(problem: Problem, metric: Metric) -> None:
    """Refuse a metric that the engine cannot tell, or by which the rate strategy could not compare."""
    nobody = Scores.of(np.empty((0, problem.n_classes)), np.empty(0, dtype=np.int64))
    evidence = Evidence(
        counts=np.zeros((3, problem.n_classes)),
        background=problem.background,
        scores=nobody if problem.engine.tells_scores else None,
        sites=np.empty(0) if problem.rates.done else None,
    )
    check_known(metric, evidence)


def starting_lr(rates: RateStrategy, local: Local) -> float:
    """The learning rate that the schedule starts from: the settings' own, or what the race has found so far."""
    return float(local.lr) if rates.lr is None else rates.lr


def sample_clients(
    n_clients: int, participation: float, seed: int, t: int, gone: Collection[int] = ()
) -> tuple[int, ...]:
    """The clients of round t, ascending, without those that have left for good."""
    there = [k for k in range(n_clients) if k not in gone] if gone else range(n_clients)
    if participation >= 1:
        return tuple(there)
    n = max(1, round(participation * len(there)))
    picked = generator(seed, "participation", round=t).choice(len(there), size=n, replace=False)
    return tuple(there[int(i)] for i in np.sort(picked))


def exhausted(state: State, run: Run) -> bool:
    """Whether validation has not improved for ``run.patience`` rounds; never while something is still searched."""
    if not run.patience or state.best is None or state.history[-1]["searching"]:
        return False
    found = next(r["round"] for r in state.history if not r["searching"])
    return state.round - max(state.best.since, found) >= run.patience


def _better(state: State, x: Tensor, validation: dict[str, Any], samples: int, metric: str) -> Best:
    """The model to keep by validation after one more round."""
    if not np.isfinite(validation["accuracy"]):
        raise FedtailError(
            "run.select = 'best' and run.patience compare models, but there is no validation data at the clients; set "
            "data.validation"
        )
    now, done, best = signed(metric, validation.get(metric)), state.round, state.best
    if best is None or now > best.score:
        return Best(round=done, score=now, x=x, since=done)
    peak = best.score
    error = 0.5 * np.sqrt(peak * (1 - peak) / samples) if samples and 0 < peak < 1 else 0.0
    return replace(best, round=done, x=x) if now >= peak - error else best


def kept_model(problem: Problem, settings: Settings, state: State) -> Tensor:
    """The model that a run ends with, by ``run.select`` and what its method does after the last round."""
    sizes, method = problem.engine.sizes, problem.method
    view = _server_view(problem, settings, state.x, state.round, sizes / sizes.sum(), 0.0)
    best = state.best if settings.run.select == "best" else None
    x = method.serve(view, state.method) if best is None else best.x
    return method.conclude(replace(view, x=x), state.method)


def _server_view(problem: Problem, settings: Settings, x: Tensor, t: int, p_all: np.ndarray, lr: float) -> Server:
    def auxiliary() -> Tensor:
        if problem.auxiliary is None:
            raise FedtailError(f"method {problem.method.name!r} needs an auxiliary set; set data.auxiliary to e.g. 20")
        return problem.auxiliary(x)

    def output_weight(vector: Tensor) -> Tensor:
        offset, shape = problem.model.output_layer()
        return vector[offset : offset + shape[0] * shape[1]].view(shape)

    return Server(
        round=t,
        rounds=settings.run.rounds,
        x=x,
        n_clients=problem.engine.n_clients,
        n_classes=problem.n_classes,
        weights=p_all,
        measure=lambda what, other=None: problem.engine.measure(x if other is None else other, what),
        auxiliary_gradients=auxiliary,
        output_weight=output_weight,
        classifier=problem.model.classifier,
        compare=lambda models: values_of(problem, settings, models),
        lr=lr,
        seed=settings.run.seed,
    )


def _mask(n: int, index: np.ndarray) -> np.ndarray:
    """(n,) bool, true at ``index``."""
    out = np.zeros(n, dtype=bool)
    out[index] = True
    return out
