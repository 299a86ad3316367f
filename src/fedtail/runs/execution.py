"""Config -> federation, model, method, rates, engine -> rounds -> run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedtail.core.candidates import Candidates
from fedtail.core.metrics import majority_floor
from fedtail.core.privacy import Privacy
from fedtail.data.about import About, describe
from fedtail.data.federation import Federation
from fedtail.data.partitions import federate
from fedtail.data.registry import DATASETS, Pooled
from fedtail.errors import FedtailError, one_of, writing
from fedtail.methods import METHODS, FedAvg, Method
from fedtail.models import FlatModel, build_model, choose_model
from fedtail.models.custom import check_output
from fedtail.rates import RATES, RateStrategy
from fedtail.rounds.auxiliary import auxiliary_monitor
from fedtail.rounds.checkpoint import load_checkpoint, save_checkpoint
from fedtail.rounds.diagnostics import Monitor, assumption_monitor, loss_monitor, shadow_monitor
from fedtail.rounds.engine import Engine, LocalSettings
from fedtail.rounds.evaluation import Split, count_candidates
from fedtail.rounds.loop import Problem, State, begin_search, train_rounds
from fedtail.rounds.plan import Plan
from fedtail.rounds.private import LocalNoise
from fedtail.rounds.server import ServerOptimizer
from fedtail.runs.config import Config, result_keys
from fedtail.runs.folder import append_round, begin_folder, choose_folder, claimed, end_folder, read_history, save_model
from fedtail.runs.tracking import Tracker, build_trackers, check_trackers
from fedtail.simulate import simulator
from fedtail.simulate.sharded import rank

AUXILIARY = 5
"""Auxiliary samples per class where a method needs them and the config does not say."""
RoundHook = Callable[[State, dict[str, Any], float], None]
"""Called after every round with the state, the round's record and its seconds."""


@dataclass
class Result:
    """What a finished run leaves in memory."""

    x: Tensor
    """(n,) the chosen model as a vector."""
    module: nn.Module
    """The chosen model, ready to use."""
    history: list[dict[str, Any]]
    test: dict[str, Any]
    confusion: np.ndarray
    rates: np.ndarray
    """(K,) the resampling rates in force; what else was searched is in the summary."""
    floor: dict[str, float]
    summary: dict[str, Any]
    folder: Path | None = None


# -- assembling ---------------------------------------------------------------------------------------


def load_pooled(config: Config) -> Pooled:
    """The data set a config names, before it is split."""
    options = dict(config.data.options)
    known = DATASETS.options(config.data.name)
    if "seed" in known:
        options.setdefault("seed", config.data_seed)
    if "data_dir" in known and config.data.dir is not None:
        options.setdefault("data_dir", config.data.dir)
    return DATASETS.build(config.data.name, **options)


def build_federation(config: Config, pooled: Pooled | None = None) -> Federation:
    """The data set a config names, split over its clients."""
    data = config.data
    return federate(
        pooled if pooled is not None else load_pooled(config), scheme=data.partition, clients=data.clients,
        alpha=data.alpha, min_samples=data.min_samples, validation=data.validation,
        auxiliary=auxiliary_size(config), holdout=data.holdout, augment=data.augment, seed=config.data_seed,
    )  # fmt: skip


def auxiliary_size(config: Config) -> int:
    """Auxiliary samples per class: as configured, else what the method needs."""
    if config.data.auxiliary is not None:
        return config.data.auxiliary
    return AUXILIARY if getattr(METHODS[config.method.name], "needs_auxiliary", False) else 0


def build_module(config: Config, federation: Federation, pooled: Pooled) -> tuple[nn.Module, dict[str, Any]]:
    """The model a config names, freshly initialised, and its description (name and options)."""
    name, options = config.model.name, config.model.options
    if name == "auto":
        name, options = pooled.model, {**pooled.model_options, **options}
    if name == "auto":  # the data has no model of its own; settled here, so that the run folder names it
        name, own = choose_model(federation.input_shape)
        options = {**own, **options}
    module = build_model(name, federation.input_shape, federation.n_classes, seed=config.run.seed, **options)
    return module, {"name": name, "options": options}


def assemble(
    federation: Federation,
    module: nn.Module,
    method: Method,
    rates: RateStrategy,
    settings: LocalSettings,
    server: ServerOptimizer,
    diagnostics: Sequence[str] = (),
    **engine: Any,
) -> Problem:
    """Everything the round loop needs, in the simulator."""
    if method.needs_auxiliary and not len(federation.auxiliary):
        raise FedtailError(
            f"method {method.name!r} needs an auxiliary set; set data.auxiliary (fedtail.partition: auxiliary) to e.g. "
            f"{AUXILIARY}"
        )
    runner: Engine = simulator(federation, module, method, settings, **engine)
    monitors: list[Monitor] = []
    if "losses" in diagnostics:
        monitors.append(loss_monitor(federation, runner.model))
    if "sgd_alignment" in diagnostics:
        plain = FedAvg(weight_decay=method.weight_decay)
        monitors.append(shadow_monitor(simulator(federation, runner.model.clone().module, plain, settings, **engine)))
    if "assumption" in diagnostics:
        monitors.append(assumption_monitor(federation, runner.model, method, settings))
    return Problem(
        runner, runner.model, method, rates, server, federation.n_classes, federation.label_map().sum(0),
        auxiliary=auxiliary_monitor(runner.model, federation) if method.needs_auxiliary else None,
        background=federation.background, holdout=_holdout(federation, runner.model), groups=federation.groups,
        monitors=monitors,
    )  # fmt: skip


def _holdout(federation: Federation, model: FlatModel) -> Callable[[Candidates], np.ndarray] | None:
    if not len(federation.holdout):
        return None
    split = Split.of(federation, federation.holdout)
    return lambda candidates: count_candidates(model, candidates, split)


# -- running ------------------------------------------------------------------------------------------


def fit(
    federation: Federation,
    model: nn.Module | str = "mlp",
    method: Method | str = "fedcgnm",
    rates: RateStrategy | str | float | Sequence[float] = 0.6,
    rounds: int = 50,
    *,
    engine: str = "simulator",
    lr: float = 0.1,
    batch_size: int = 64,
    epochs: int = 1,
    participation: float = 1.0,
    seed: int = 0,
    metric: str = "accuracy",
    select: str = "last",
    server: ServerOptimizer | None = None,
    path: str = "auto",
    device: str = "cpu",
    on_round: RoundHook | None = None,
    **local: Any,
) -> Result:
    """Train a federation and return the model, in a few lines and without touching the disk.

    Args:
        federation: see ``Federation.from_arrays`` and ``fedtail.partition``.
        model: an ``nn.Module`` that maps a batch of inputs to logits, trained in place, or a registered name.
        method: a ``Method`` or its name. rates: a strategy (a new one for every run: a search remembers), its name,
            one rate for all clients, or one for each.
        local: further ``LocalSettings`` (``epoch_length``, ``scale`` ...) and ``Plan`` settings.
    """
    if engine != "simulator":
        raise FedtailError(f"engine {engine!r} is not available in fit(); real federations start with `fedtail deploy`")
    if select not in ("last", "best"):
        raise one_of("select", select, ("last", "best"))
    if isinstance(model, nn.Module):
        module = model
        check_output(module, federation.input_shape, federation.n_classes, "the model")
    elif isinstance(model, str):
        module = build_model(model, federation.input_shape, federation.n_classes, seed=seed)
    else:
        raise FedtailError(f"model = {model!r} is neither an nn.Module nor a name such as 'mlp'")
    chosen = METHODS.build(method) if isinstance(method, str) else method
    if not isinstance(chosen, Method):
        raise FedtailError(f"method = {method!r} is neither a Method, such as FedProx(mu=0.1), nor a name")
    strategy = _strategy(rates, federation.n_clients)
    plan_keys = {k: local.pop(k) for k in list(local) if k in Plan.__dataclass_fields__}
    for key in local:
        if key not in LocalSettings.__dataclass_fields__:
            raise one_of("option of fit()", key, [*LocalSettings.__dataclass_fields__, *Plan.__dataclass_fields__])
    settings = LocalSettings(epochs=epochs, batch_size=batch_size, seed=seed, **local)
    problem = assemble(
        federation, module, chosen, strategy, settings, server or ServerOptimizer(), path=path, device=device
    )
    plan = Plan(
        rounds=rounds, lr=lr, participation=participation, seed=seed, metric=metric,
        keep_best=select == "best", **plan_keys,
    )  # fmt: skip
    with_local_noise(problem, plan.privacy)
    state = train_rounds(problem, plan, initial_state(problem), on_round)
    return conclude(problem, state, describe(federation), select)


def _strategy(rates: RateStrategy | str | float | Sequence[float], n_clients: int) -> RateStrategy:
    if isinstance(rates, RateStrategy):
        return rates
    if isinstance(rates, str):
        return RATES.build(rates, n_clients)
    if isinstance(rates, (int, float)):
        return RATES.build("uniform", n_clients, rate=float(rates))
    return RATES.build("fixed", n_clients, rates=list(rates))


def with_local_noise(problem: Problem, privacy: Privacy | None) -> None:
    """In simulation, local privacy is an engine around the engine; at real sites it is their own doing."""
    if privacy is not None and privacy.mode == "local":
        problem.engine = cast(Engine, LocalNoise(problem.engine, problem.method, privacy, problem.n_classes))


def initial_state(problem: Problem) -> State:
    """Round 0 from the model's own initial weights; a server optimizer that served another run starts anew."""
    problem.server.state = {}
    method = problem.method.init_server(problem.engine.n_clients, problem.n_classes, problem.model.n_params)
    return State(0, problem.model.vector.clone(), method)


def conclude(problem: Problem, state: State, about: About, select: str) -> Result:
    """The final model and its test metrics."""
    x = state.best.x if select == "best" and state.best is not None else state.x
    confusion = problem.engine.confusion(x, "test")
    problem.model.load(x)
    problem.model.module.eval()
    last, rates = state.history[-1] if state.history else {}, problem.rates
    floor = {}
    if about.test_counts is not None:
        counts = about.train_counts
        majority = None if counts is None else int(counts.argmax())
        floor = majority_floor(about.test_counts, majority, problem.background)
    summary: dict[str, Any] = {
        "rounds": state.round,
        "selected_round": state.best.round if select == "best" and state.best is not None else state.round,
        **{key: last.get(key, 0.0) for key in ("path_variation", "path_variation_per_root_round")},
        "refused": sum(len(r["refused"]) for r in state.history),
        **{key: last[key] for key in ("searched", "privacy") if key in last},
    }
    return Result(
        x, problem.model.module, state.history, problem.metrics(confusion), confusion,
        rates.rates if rates.searches == "rate" else rates.base_rates, floor, summary,
    )  # fmt: skip


def run(
    config: Config,
    *,
    resume: bool = False,
    on_round: RoundHook | None = None,
    on_start: Callable[[Path, int], None] | None = None,
    trackers: Sequence[Tracker] = (),
) -> Result:
    """Run a config and write its run folder. With ``resume`` an interrupted run of the same config goes on.

    ``trackers`` are listeners of the caller's own, beside those that ``run.trackers`` names.
    """
    check_trackers(config.run.trackers)
    if rank():  # every process runs the whole loop; the first one's folder is the result
        config = config.model_copy(deep=True)
        config.run.folder, config.run.trackers = f"{config.run.folder}/.rank{rank()}", ()
    torch.set_num_threads(1)  # the number of threads changes floating-point sums; clients run in parallel instead
    folder = choose_folder(config, resume)
    pooled = load_pooled(config)
    federation = build_federation(config, pooled)
    module, architecture = build_module(config, federation, pooled)
    method = METHODS.build(config.method.name, **config.method.options)
    strategy = RATES.build(config.rates.name, federation.n_clients, **config.rates.options)
    problem = assemble(
        federation, module, method, strategy, local_settings(config), server_optimizer(config),
        config.run.diagnostics, path=config.engine.path, device=config.engine.device, workers=config.engine.workers,
        precision=config.engine.precision, threads=config.engine.threads, compile=config.engine.compile,
        rounds=config.run.rounds,
    )  # fmt: skip
    with_local_noise(problem, round_plan(config).privacy)
    with claimed(config, folder, resume) as folder:
        return drive(config, folder, problem, describe(federation), architecture, resume, on_round, on_start, trackers)


def local_settings(config: Config) -> LocalSettings:
    local = config.local
    return LocalSettings(
        local.epochs, local.batch_size, local.epoch_length, local.replication, local.scale, config.run.seed
    )


def server_optimizer(config: Config) -> ServerOptimizer:
    server = config.server
    return ServerOptimizer(server.optimizer, server.lr, server.beta1, server.beta2, server.tau)


def round_plan(config: Config) -> Plan:
    """The round loop's settings."""
    local, run = config.local, config.run
    privacy = Privacy(config.privacy.mode, config.privacy.noise, config.privacy.delta, run.seed)
    return Plan(
        rounds=run.rounds, lr=local.lr, lr_min=local.lr_min, schedule=local.schedule, warmup=local.warmup,
        participation=run.participation, seed=run.seed, metric=run.metric, quorum=run.quorum,
        validate_on=run.validate_on, evaluate_every=run.evaluate_every, keep_best=run.select == "best",
        alignment="alignment" in run.diagnostics, search_only=run.search_only,
        privacy=privacy,
    )  # fmt: skip


def drive(
    config: Config,
    folder: Path,
    problem: Problem,
    about: About,
    architecture: dict[str, Any],
    resume: bool = False,
    on_round: RoundHook | None = None,
    on_start: Callable[[Path, int], None] | None = None,
    trackers: Sequence[Tracker] = (),
    amend: Callable[[dict[str, Any]], None] | None = None,
    plan: Plan | None = None,
) -> Result:
    """All rounds of an assembled problem, with history, checkpoints and the run folder; the same on every engine.

    ``amend`` may add to a round's record before it is written.
    """
    plan = plan or round_plan(config)
    settings = result_keys(config)
    history = read_history(folder) if resume else []
    state = load_checkpoint(folder / "checkpoint", problem, history, settings) if resume else None
    if state is None:
        state = initial_state(problem)
    begin_search(problem, plan, state.round)
    with writing(folder):
        begin_folder(folder, config, about, state.history)
    if on_start is not None:
        on_start(folder, state.round)
    tracked = build_trackers(config.run.trackers, folder, trackers)
    tracked.on_start(config.model_dump(), state.round)
    outcome: dict[str, Any] | None = None

    def after(now: State, record: dict[str, Any], seconds: float) -> None:
        if amend is not None:
            amend(record)
        append_round(folder, now.history, seconds)
        if now.round % config.run.checkpoint_every == 0 or now.round == config.run.rounds:
            save_checkpoint(folder / "checkpoint", now, problem, settings)
        tracked.on_round({**record, "seconds": seconds})
        if on_round is not None:
            on_round(now, record, seconds)

    try:
        state = train_rounds(problem, plan, state, after)
        result = conclude(problem, state, about, config.run.select)
        result.folder = folder
        save_model(folder, result.x, problem.model, about, architecture)
        outcome = {
            "test": result.test,
            "confusion": result.confusion,
            "floor": result.floor,
            "rates": result.rates,
            **result.summary,
            "engine": problem.engine.info(),
        }
        end_folder(folder, config, about, result.history, outcome)
    finally:
        problem.engine.close()
        tracked.on_end(outcome)
    return result
