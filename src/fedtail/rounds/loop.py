"""THE ROUND LOOP: no I/O, no engine, no method in particular."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from fedtail.core.random import generator
from fedtail.core.records import Task, clients_of, pooled
from fedtail.rounds.acceptance import accept
from fedtail.rounds.aggregation import Gathered, in_force, limited, server_step
from fedtail.rounds.privacy import noised, privatize
from fedtail.rounds.progress import Pace, ProgressHook
from fedtail.rounds.race import race_of
from fedtail.rounds.search import (
    Played,
    RatesInForce,
    begin_search,
    play_rivals,
    probes_of,
    scheduled_lr,
    select,
    starting_lr,
)
from fedtail.rounds.state import Problem, State
from fedtail.rounds.validation import better, exhausted, validate_model
from fedtail.settings import Settings

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
    engine, run = problem.engine, settings.run
    begin_search(problem, settings, state.round)
    rates_in_force, pace = RatesInForce(state.history), Pace(run.rounds, on_progress)
    for t in range(state.round, run.rounds):
        if problem.searched or exhausted(state, run):
            break
        began = time.perf_counter()
        # Of this round: a site may have joined after the last one.
        shares = limited(engine.sizes / engine.sizes.sum(), settings.server, problem.real)
        played = play_rivals(problem, settings, state, partial(play, problem, settings, state, t, shares, pace))
        record = describe(problem, state, played, rates_in_force.record(problem.rates, shares, t))
        state.round = t + 1
        evaluate(problem, settings, state, record, played)
        if on_round is not None and on_round(state, record, time.perf_counter() - began) is True:
            break
    return state


def play(
    problem: Problem,
    settings: Settings,
    state: State,
    t: int,
    shares: np.ndarray,
    pace: Pace,
    spent: dict[str, Any] | None = None,
) -> Played:
    """Play round t of one model, that of ``state``, which is moved on.

    shares: (K,) of all clients in the aggregate. ``spent``: the last record of what privacy has cost, where it is not
    that of the history.
    """
    engine, method, rates = problem.engine, problem.method, problem.rates
    lr, left = scheduled_lr(rates, settings, t)
    server = problem.view(settings, state.x, t, shares, lr)
    state.method = method.before_round(server, state.method)

    race = race_of(rates)
    task = pace.follow(plan(problem, settings, state, t, shares, lr, left), race.rivals if race else ())
    updates, refused = engine.train(task)
    updates, refused = accept(noised(problem, settings.privacy, task, updates), refused, problem, task, settings)

    present, clients = clients_of(updates), np.array([u.client for u in updates])
    p = pooled(rates.weights(shares, present), updates)
    rates.observe(clients, [u.delta for u in updates])
    gathered = Gathered(problem, settings, updates, method.weights(p, updates, state.method))
    updates = gathered.updates
    candidates = gathered.candidates(state.x, rates, clients)
    winner, reward = select(problem, settings, candidates, updates, present)
    choice = rates.choice[clients]

    aggregate = candidates.model(winner) if candidates else gathered.combine(state.x, choice)
    history = state.history if spent is None else [spent]
    aggregate, cost = privatize(problem, settings.privacy, task, aggregate, gathered.weights, updates, history)
    aggregate, state.method = method.advance(server, aggregate, state.method)
    rule = in_force(settings.server, problem.settled)
    state.x, state.server = server_step(rule, state.x, aggregate, state.server, problem.model.n_params)

    state.method = method.after_round(server, updates, choice.tolist(), state.method)
    engine.commit(dict(zip(present.tolist(), rates.choice[present].tolist(), strict=True)))
    return Played(
        task=task,
        server=server,
        present=present,
        refused=refused,
        record={
            "lr": left * starting_lr(rates, settings.local) if race and race.evidence else lr,
            "clients": present.tolist(),
            "train_loss": float(sum(a * u.loss[c] for a, u, c in zip(p, updates, choice, strict=True))),
        },
        more={
            **cost,
            **gathered.diagnostics(choice, p, problem.watched, settings.run.diagnostics),
            **({} if reward is None else {"reward": reward}),
        },
    )


def plan(
    problem: Problem, settings: Settings, state: State, t: int, shares: np.ndarray, lr: float, left: float
) -> Task:
    """Return the work order of round t. ``left``: the part that the schedule has left of the first learning rate."""
    method, rates, run, race = problem.method, problem.rates, settings.run, race_of(problem.rates)
    clients = sample_clients(problem.engine.n_clients, run.participation, run.seed, t)
    return Task(
        round=t,
        rival=0 if race is None else race.rival,
        x=state.x,
        clients=clients,
        probes=probes_of(rates, clients, left),
        lr=lr,
        broadcast=method.broadcast(state.method),
        messages={k: m for k in clients if (m := method.message(state.method, k))},
        reports=rates.reports,
        weights=shares[list(clients)],
        axes=rates.axes[list(clients)] if rates.patterns() == "binary" else None,
    )


def sample_clients(n_clients: int, participation: float, seed: int, t: int) -> tuple[int, ...]:
    """Return the clients of round t, ascending."""
    if participation >= 1:
        return tuple(range(n_clients))
    n = max(1, round(participation * n_clients))
    picked = generator(seed, "participation", round=t).choice(n_clients, size=n, replace=False)
    return tuple(int(i) for i in np.sort(picked))


def describe(problem: Problem, state: State, played: Played, in_force: dict[str, Any]) -> dict[str, Any]:
    """Return the round's record before anything is evaluated. ``in_force``: its part on rates."""
    method, rates, race = problem.method, problem.rates, race_of(problem.rates)
    record = {
        "round": state.round,
        **played.record,
        **in_force,
        "searching": not rates.done,
        "refused": [r.to_json() for r in played.refused],
        **({"race": race.evidence} if race is not None and race.evidence else {}),
        **({"search": stats} if (stats := rates.stats()) else {}),
        **({"method": stats} if (stats := method.stats(state.method)) else {}),
        **played.more,
    }
    for monitor in problem.monitors:
        record |= monitor(played.task, state.x)
    return record


def evaluate(problem: Problem, settings: Settings, state: State, record: dict[str, Any], played: Played) -> None:
    """Test and validate the model after a round where that is due, and add the record to the history."""
    engine, run = problem.engine, settings.run
    served: Tensor = problem.method.serve(replace(played.server, x=state.x), state.method)
    last = state.round == run.rounds or problem.searched
    test = last or state.round % run.evaluate_every == 0
    if test:  # before validation: a real federation answers both in one exchange
        record["test"] = problem.metrics(engine.confusion(served, "test"))
    if run.validate_every and (last or state.round % run.validate_every == 0):
        metric = problem.method.compares_by or run.metric
        told, samples = validate_model(problem, served, metric)
        record |= told
        if run.select == "best" or run.patience:
            state.best = better(state, served, record["validation"], samples, metric)
    state.history.append(record)
    if exhausted(state, run) and not test:
        record["test"] = problem.metrics(engine.confusion(served, "test"))
