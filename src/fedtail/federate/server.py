"""The server's side of a real federation: handshake, job, the round loop over a transport, the run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtail.data.about import About
from fedtail.data.federation import Samples, Transform
from fedtail.errors import FedtailError
from fedtail.federate.engine import RemoteEngine
from fedtail.federate.protocol.handshake import Hello, agree, say_hello
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.preprocess import agree_on_preprocessing
from fedtail.federate.protocol.transport import Transport
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.models.flat import FlatModel
from fedtail.rates import RATES
from fedtail.rounds.loop import Problem
from fedtail.runs.config import Config
from fedtail.runs.execution import Result, RoundHook, drive, load_pooled, local_settings, round_plan, server_optimizer
from fedtail.runs.folder import choose_folder, claimed


def federate(
    config: Config,
    transport: Transport,
    names: Sequence[str],
    *,
    resume: bool = False,
    on_round: RoundHook | None = None,
    on_start: Callable[[Path, int], None] | None = None,
) -> Result:
    """Run a config over real sites and write its run folder. ``names[k]`` is the site behind client k."""
    torch.set_num_threads(1)  # the number of threads changes floating-point sums
    deploy = config.deploy
    schema = agree(*say_hello(transport, names, deploy.timeout), names)
    schema = agree_on_preprocessing(transport, schema, names, config.run.seed, deploy.timeout)
    folder = choose_folder(config, resume)
    job, architecture = make_job(config, schema, folder.name, transport.name)
    hellos, missing = say_hello(transport, names, deploy.timeout, job)
    agree(hellos, missing, names)
    test = server_test(config, schema)
    engine = RemoteEngine(
        transport=transport,
        job=job,
        sizes=np.array([h.n_train for h in hellos.values()]),
        test=test,
        timeout=deploy.timeout,
        quorum=config.run.quorum,
        candidates=deploy.candidates,
        models_per_message=deploy.models_per_message,
    )
    method = job.build_method()
    if method.needs_auxiliary:
        raise FedtailError(f"method {job.method!r} needs an auxiliary set, which a real server does not have")
    engine.model.load(initial_model(config, job))
    strategy = RATES.build(config.rates.name, len(names), **config.rates.options)
    problem = Problem(
        engine=engine,
        model=engine.model,
        method=method,
        rates=strategy,
        server=server_optimizer(config),
        n_classes=job.n_classes,
        background=schema.get("background"),
    )
    about = describe(schema, job, names, list(hellos.values()), test)

    plan = round_plan(config)
    secret = None if plan.privacy is None else replace(plan.privacy, seed=None)
    plan = replace(plan, validate_every=deploy.validate_every, privacy=secret)

    def amend(record: dict[str, Any]) -> None:
        record["faults"] = [{"client": r.client, "reason": r.reason} for r in engine.drain()]
        traffic, engine.traffic = engine.traffic, type(engine.traffic)()
        record["traffic"] = {"down": traffic.down, "up": traffic.up, "exchanges": traffic.exchanges}

    with claimed(config, folder, resume) as folder:
        return drive(config, folder, problem, about, architecture, resume, on_round, on_start, amend=amend, plan=plan)


def make_job(config: Config, schema: dict[str, Any], run: str, engine: str) -> tuple[Job, dict[str, Any]]:
    """The work order of a run, and the model's description for ``model.json``."""
    if config.run.metric != "accuracy" and config.deploy.reveal == "totals":
        raise FedtailError(
            f"run.metric = {config.run.metric!r} needs per-class counts; set deploy.reveal = 'classes' (sites must "
            "allow it in their policy), or run.metric = 'accuracy'"
        )
    if config.run.select == "best" and not config.deploy.validate_every:
        raise FedtailError("run.select = 'best' needs validation; set deploy.validate_every to 1 or more")
    beside = [name for name in config.run.diagnostics if name != "alignment"]
    if beside:
        raise FedtailError(f"run.diagnostics = {beside[0]!r} needs the simulator: it looks at the sites' data")
    name, options = config.model.name, config.model.options
    if name == "auto":
        name, options = schema["model"], {**schema["model_options"], **options}
    transform = schema["transform"]
    job = Job(
        run=run,
        model=name,
        input_shape=tuple(schema["input_shape"]),
        classes=tuple(schema["classes"]),
        method=config.method.name,
        rounds=config.run.rounds,
        model_options=options,
        method_options=METHODS.build(config.method.name, **config.method.options).config(),
        local=local_settings(config),
        transform=Transform(transform["scale"], tuple(transform["mean"]), tuple(transform["std"])),
        augment=schema["augment"],
        preprocessing=schema["preprocessing"],
        reveal=config.deploy.reveal,
        noise=config.privacy.noise if config.privacy.mode == "local" else 0.0,
        engine=engine,
    )
    return job, {"name": name, "options": options}


def initial_model(config: Config, job: Job) -> torch.Tensor:
    """(n,) the weights round 0 starts from: those of the simulator under the same seed."""
    module = build_model(job.model, job.input_shape, job.n_classes, seed=config.run.seed, **job.model_options)
    return FlatModel(module).vector


def server_test(config: Config, schema: dict[str, Any]) -> Samples | None:
    """The server's own test set: in a rehearsal that of the data set; otherwise none, sites test on theirs."""
    return load_pooled(config).test if schema["kind"] == "slice" else None


def describe(
    schema: dict[str, Any], job: Job, names: Sequence[str], hellos: Sequence[Hello], test: Samples | None
) -> About:
    """What the run folder may say of data the server has never seen."""
    return About(
        name=schema["name"],
        sites=tuple(names),
        classes=job.classes,
        input_shape=job.input_shape,
        sizes=np.array([h.n_train for h in hellos]),
        validation_sizes=tuple(h.n_validation for h in hellos),
        transform=job.transform,
        preprocessing=job.preprocessing,
        test_counts=None if test is None else test.counts(job.n_classes),
    )
