"""The server's side of a federation that trusts it: handshake, job, the round loop over a transport, the run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from fedtail.errors import FedtailError
from fedtail.federate.agreed import Hooks, about_of
from fedtail.federate.engine import RemoteEngine
from fedtail.federate.protocol.handshake import agree, say_hello
from fedtail.federate.protocol.job import Job, job_of, method_of
from fedtail.federate.protocol.transport import Traffic, Transport
from fedtail.federate.relay import follow
from fedtail.federate.statistics import agree_on_preprocessing
from fedtail.files import write_atomically
from fedtail.methods.trees import Trees
from fedtail.models.encoders.base import Encoding
from fedtail.models.flat import FlatModel
from fedtail.rates import RATES
from fedtail.rounds.history import plain
from fedtail.rounds.plan import BATCHES, STEPS, settled, settled_by_sizes
from fedtail.rounds.race import racing
from fedtail.rounds.state import Problem
from fedtail.runs.build import Run, load_pooled
from fedtail.runs.encoding import encode_samples, encoder_notes
from fedtail.runs.execution import play
from fedtail.runs.folder import choose_folder, claimed, run_name
from fedtail.runs.result import Result
from fedtail.settings import Settings

TERMS = "federation.json"
"""In the run folder: what was settled before round 0."""


def roster(config: Settings, sites: Sequence[str], *, resume: bool = False) -> list[str]:
    """The site behind each client's number. A run goes on with the sites that it began with: one that has left is
    missing, and one that is new takes part in the next run."""
    file = Path(config.run.folder) / run_name(config) / TERMS
    return list(json.loads(file.read_text())["sites"]) if resume and file.is_file() else list(sites)


def federate(
    config: Settings, transport: Transport, names: Sequence[str], *, resume: bool = False, **hooks: Unpack[Hooks]
) -> Result:
    """Run a config over real sites and write its run folder. ``names[k]`` is the site behind client k."""
    if config.deploy.trust != "server" or isinstance(method_of(config), Trees):
        return follow(config, transport, names, resume=resume, **hooks)
    if config.privacy.mode in ("local", "shares"):
        raise FedtailError(
            f"privacy.mode = {config.privacy.mode!r} promises something against the server, which deploy.trust = "
            "'server' trusts; set deploy.trust = 'private' with privacy.mode = 'shares'"
        )
    torch.set_num_threads(1)  # the number of threads changes floating-point sums
    folder = choose_folder(config, resume)
    terms = (Terms.read(folder, names) if resume else None) or settle(config, transport, names, folder.name)
    schema, job = terms.schema, terms.job
    real = schema["kind"] != "slice"  # a rehearsal is the simulator's, bit by bit
    test = None
    if not real:
        test = load_pooled(config).test
        test = test if job.encoding is None else encode_samples(test, Encoding.from_dict(schema["encoder"]))
    timeout, quorum = config.deploy.timeout, config.run.quorum
    engine = RemoteEngine(transport, job, np.array(terms.sizes), terms.validation_sizes, timeout, quorum, test, real)
    engine.model.load(FlatModel(job.build_model(config.run.seed)).vector)
    method = job.build_method()
    if method.traits.needs_auxiliary:
        raise FedtailError(
            f"method {job.method!r} needs an auxiliary set, which the server of a real federation does not have"
        )
    found, notes = settled_by_sizes(config, terms.sizes)
    notes = (*encoder_notes(job.encoding, config.model, images=False), *notes)
    problem = Problem(
        engine=engine,
        method=method,
        rates=racing(RATES.build(config.rates.name, len(names), **config.rates.options), config),
        n_classes=job.n_classes,
        background=schema.get("background"),
        real=real,
        watched=True,
        settled=found,
    )
    about = replace(
        about_of(schema, job, names, np.array(terms.sizes), notes),
        validation_sizes=terms.validation_sizes,
        test_counts=None if test is None else test.counts(job.n_classes),
    )

    def begin(path: Path, done: int) -> None:
        terms.write(path)
        if "on_start" in hooks:
            hooks["on_start"](path, done)

    def amend(record: dict[str, Any]) -> None:
        """Add what a round cost and who was missing."""
        record |= {"faults": [r.to_json() for r in engine.faults], "traffic": vars(engine.traffic)}
        engine.faults, engine.traffic = [], Traffic()

    with claimed(config, folder, resume) as folder:
        run = Run(problem, config, about, {"name": job.model, "options": job.model_options})
        return play(run, folder, resume=resume, on_round=hooks.get("on_round"), on_start=begin, amend=amend)


@dataclass(frozen=True)
class Terms:
    """What was settled before round 0: a site that is away or other later does not change it."""

    sites: list[str]
    schema: dict[str, Any]
    """What the data are, with a common preprocessing."""
    job: Job
    sizes: list[int]
    """Training samples of each client ..."""
    validation_sizes: list[int]
    """... and validation samples: nobody is counted with others."""

    def write(self, folder: Path) -> None:
        """Write them into the run folder."""
        write_atomically(
            folder / TERMS, json.dumps({**vars(self), "schema": plain(self.schema), "job": self.job.to_json()})
        )

    @classmethod
    def read(cls, folder: Path, names: Sequence[str]) -> Terms | None:
        """None if the run has not begun; ``FedtailError`` where the numbers are not those of the run, since its state
        is kept by them."""
        if not (folder / TERMS).is_file():
            return None
        told = json.loads((folder / TERMS).read_text())
        if told["sites"] != list(names):
            raise FedtailError(
                f"{str(folder)!r} has the sites {', '.join(told['sites'])}, in this order, and not {', '.join(names)}; "
                "start a new run"
            )
        return cls(**{**told, "job": Job.from_json(told["job"])})


def settle(config: Settings, transport: Transport, names: Sequence[str], run: str) -> Terms:
    """Greet the sites, of which all must be there: what their data are, and how many samples each has."""
    clients, timeout = range(len(names)), config.deploy.timeout
    agreed = agree(*say_hello(transport, clients, timeout, model=config.model), names)
    schema = agree_on_preprocessing(transport, agreed, names, config.run.seed, timeout)
    most = settled(config, [STEPS * BATCHES[-1]])  # of memory: that of the largest batch
    job = job_of(most, schema, run, transport.name)
    hellos, missing = say_hello(transport, clients, timeout, job)
    agree(hellos, missing, names, agreed)
    sizes = [hellos[k].n_train for k in clients]
    job = replace(job, local=settled(config, sizes).local)
    return Terms(list(names), schema, job, sizes, [hellos[k].n_validation for k in clients])
