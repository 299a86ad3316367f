"""The rounds of a run with trees: what the round loop is for networks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from fedtail.boosting.grower import LOSS_BITS, best_round, boost, ended, lowest_round
from fedtail.boosting.model import TreesModel
from fedtail.boosting.predictor import Forest, Plan
from fedtail.methods.trees import Trees
from fedtail.rounds.loop import RoundHook, train_rounds
from fedtail.rounds.progress import Pace, ProgressHook
from fedtail.rounds.search import RatesInForce
from fedtail.rounds.state import Best, Problem, State
from fedtail.rounds.validation import validate_model
from fedtail.settings import Settings


def run_rounds(
    problem: Problem,
    settings: Settings,
    state: State,
    on_round: RoundHook | None = None,
    on_progress: ProgressHook | None = None,
) -> State:
    """All rounds that are left, of networks or of trees."""
    loop = train_trees if isinstance(problem.method, Trees) else train_rounds
    return loop(problem, settings, state, on_round, on_progress)


def train_trees(
    problem: Problem,
    settings: Settings,
    state: State,
    on_round: RoundHook | None = None,
    on_progress: ProgressHook | None = None,
) -> State:
    """Run the rounds that are left, each with its trees, as ``rounds.loop.train_rounds`` does for networks.

    The model to keep goes by the weighted log loss on held-out rows: it tells forests apart that answer alike.
    """
    engine: Any = problem.engine
    model: TreesModel = engine.model
    assert isinstance(problem.method, Trees)
    run, shape = settings.run, model.shape
    plan = Plan(shape.columns, shape.n_classes, run.rounds, problem.method, run.seed, run.patience)
    in_force, began = RatesInForce(state.history), time.perf_counter()
    pace = Pace(run.rounds, on_progress)
    pace.begin(state.round, 1)

    def after(forest: Forest) -> bool:
        nonlocal began
        t = forest.rounds - 1
        state.round, state.x = forest.rounds, shape.pack(forest)
        check = forest.checks[t]
        counts = check[3:].reshape(problem.n_classes, -1)
        weight = forest.start.counts @ forest.start.weights
        record: dict[str, Any] = {
            "round": t,
            "lr": plan.method.lr,
            "clients": list(range(engine.n_clients)),
            "train_loss": float(np.ldexp(float(check[0]), -LOSS_BITS) / weight),
            **in_force.record(problem.rates, engine.sizes / engine.sizes.sum(), t),
            "searching": False,
            "refused": [],
        }
        last = ended(plan, forest)
        if last or state.round % run.evaluate_every == 0:
            record["test"] = problem.metrics(engine.confusion(state.x, "test"))
        if counts.sum() and run.validate_every and (last or state.round % run.validate_every == 0):
            record |= validate_model(problem, state.x, run.metric, counts)[0]
            record["validation"]["weighted_loss"] = float(np.ldexp(float(check[1]), -LOSS_BITS) / counts.sum())
        if counts.sum() and (run.select == "best" or run.patience) and best_round(forest) == forest.rounds:
            least = lowest_round(forest)
            score = -float(np.ldexp(float(forest.checks[least - 1][1]), -LOSS_BITS))
            state.best = Best(round=forest.rounds, score=score, x=state.x, since=least)
        state.history.append(record)
        pace.advance(1.0)
        pace.begin(state.round, 1)
        took, began = time.perf_counter() - began, time.perf_counter()
        return on_round is not None and on_round(state, record, took) is True

    forest = shape.unpack(state.x)
    boost(plan, engine.asking(forest), forest, after)
    return state
