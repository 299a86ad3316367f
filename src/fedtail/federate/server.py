"""The server's side of a federation that trusts it: handshake, job, the round loop over a transport, the run folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtail.data.about import About
from fedtail.data.federation import Samples
from fedtail.errors import FedtailError
from fedtail.federate.engine import RemoteEngine
from fedtail.federate.protocol.handshake import Hello, agree, say_hello, settle
from fedtail.federate.protocol.job import Job, job_of
from fedtail.federate.protocol.preprocess import agree_on_preprocessing
from fedtail.federate.protocol.transport import Transport
from fedtail.federate.relay import follow
from fedtail.federate.replies import refused
from fedtail.federate.sites import Sites, Traffic
from fedtail.files import write_atomically
from fedtail.models.encoders import Encoding
from fedtail.models.flat import FlatModel
from fedtail.rates import RATES
from fedtail.rounds.batches import BATCHES, batch_notes, batch_of, settle_batch
from fedtail.rounds.batches import follow as follow_sizes
from fedtail.rounds.checkpoint import save_checkpoint
from fedtail.rounds.growth import WithNewcomers
from fedtail.rounds.history import plain
from fedtail.rounds.loop import RoundHook
from fedtail.rounds.race import racing
from fedtail.rounds.server import FOUND, follow_sites, server_notes
from fedtail.rounds.state import Problem, State
from fedtail.runs.build import Run, load_pooled
from fedtail.runs.config import result_keys
from fedtail.runs.encoding import encode_samples, encoder_notes
from fedtail.runs.execution import play
from fedtail.runs.folder import choose_folder, claimed, write_clients
from fedtail.runs.result import Result, titles_of
from fedtail.settings import Settings

AGREEMENT = "federation.json"
"""In the run folder: the sites, in the order of their numbers, what they agreed on, and the preprocessing."""


class SitesJoined(Exception):
    """There are new sites, and a checkpoint: the run goes on with them once it is resumed."""


def roster(config: Settings, sites: Sequence[str], *, resume: bool = False) -> list[str]:
    """The site behind each client's number. A number is a site's own for the whole run: one that has left keeps it, and
    one that is new takes the next."""
    if config.deploy.trust != "server":
        return list(sites)
    file = choose_folder(config, resume) / AGREEMENT
    before = json.loads(file.read_text())["sites"] if resume and file.is_file() else []
    return [*before, *(site for site in sites if site not in before)]


def federate(
    config: Settings,
    transport: Transport,
    names: Sequence[str],
    *,
    resume: bool = False,
    on_round: RoundHook | None = None,
    on_start: Callable[[Path, int], None] | None = None,
    members: Callable[[], Collection[str]] | None = None,
) -> Result:
    """Run a config over real sites and write its run folder. ``names[k]`` is the site behind client k (see ``roster``).

    ``members`` says which sites take part, and is asked after every round: where the server is trusted, one that has
    left for good is not asked any more, and with new ones the run ends in ``SitesJoined``.
    """
    if config.deploy.trust != "server":
        return follow(config, transport, names, resume=resume, on_round=on_round, on_start=on_start)
    check_trusted(config)
    torch.set_num_threads(1)  # the number of threads changes floating-point sums
    folder = choose_folder(config, resume)
    here = names if members is None else members()
    run = TrustedRun(
        config=config,
        transport=transport,
        names=names,
        folder=folder,
        gone={k for k, name in enumerate(names) if name not in here},
        members=members,
        on_round=on_round,
        on_start=on_start,
        before=read_agreement(folder, names) if resume else None,
        known=known_sizes(folder) if resume else [],
    )
    return run.go(resume)


def check_trusted(config: Settings) -> None:
    """Refuse settings that this level cannot keep."""
    if config.privacy.mode in ("local", "shares"):
        raise FedtailError(
            f"privacy.mode = {config.privacy.mode!r} promises something against the server, which deploy.trust = "
            "'server' trusts; set deploy.trust = 'private' with privacy.mode = 'shares'"
        )


@dataclass
class TrustedRun:
    """One run under ``deploy.trust = "server"``, and what its parts must know of each other."""

    config: Settings
    transport: Transport
    names: Sequence[str]
    folder: Path
    gone: set[int]
    members: Callable[[], Collection[str]] | None
    on_round: RoundHook | None
    on_start: Callable[[Path, int], None] | None
    before: Agreement | None
    """What was settled when an interrupted run began."""
    known: list[int]
    """Training samples of each client then; 0 of one that has not been there."""
    agreed: dict[str, Any] = field(default_factory=dict)

    def go(self, resume: bool) -> Result:
        """Greet the sites, and play all rounds with those that are there."""
        config, names, before = self.config, self.names, self.before
        schema = self.settle_schema()
        job, hellos, missing = self.settle_job(schema)
        sizes = [hellos[k].n_train for k in hellos]
        self.began_with = len(names) if before is None else before.began_with
        self.optimizer = follow_sites(sizes) if before is None else before.optimizer
        self.job, self.schema = job, schema
        self.held_out = [hellos[k].n_validation if k in hellos else 0 for k in range(len(names))]
        self.sites = Sites(
            transport=self.transport,
            job=job,
            sizes=np.array([hellos[k].n_train if k in hellos else 0 for k in range(len(names))]),
            timeout=config.deploy.timeout,
            quorum=config.run.quorum,
            absent={**missing, **dict.fromkeys(self.gone, "has left")},
            gone=self.gone,
            faults=[refused(k, 0, reason, "hello: ") for k, reason in missing.items()],
        )
        test = server_test(config, schema)
        self.problem = self.assemble(test)
        notes = (
            *encoder_notes(job.encoding, config.model, images=False),
            *batch_notes(config.local, batch_of(job.local), self.sites.sizes),
            *server_notes(config.server, self.optimizer, self.sites.sizes),
        )
        self.about = describe(schema, job, names, hellos, test, self.held_out, notes)
        with ExitStack() as stack:
            self.folder = stack.enter_context(claimed(config, self.folder, resume))
            return play(
                Run(self.problem, config, self.about, {"name": job.model, "options": job.model_options}),
                self.folder,
                resume=resume,
                on_round=self.after,
                on_start=self.begin,
                amend=self.amend,
            )

    def settle_schema(self) -> dict[str, Any]:
        """What the sites' data are, with a common preprocessing."""
        config, timeout, quorum = self.config, self.config.deploy.timeout, self.config.run.quorum
        if self.before is not None:
            self.agreed = self.before.agreed
            return self.before.schema
        hellos, missing = say_hello(self.transport, self.asked, timeout, model=config.model)
        settle(hellos, missing, self.names, quorum)
        self.agreed = agree(hellos, missing, self.names, quorum)
        there = {k: self.names[k] for k in hellos}
        return agree_on_preprocessing(self.transport, self.agreed, there, config.run.seed, timeout, quorum)

    def settle_job(self, schema: dict[str, Any]) -> tuple[Job, dict[int, Hello], dict[int, str]]:
        """The work order, who takes part in it, and why the others do not."""
        config, before = self.config, self.before
        follows = config.local.batch_size == "auto"
        first = settle_batch(config, BATCHES[-1] if before is None else before.batch_size) if follows else config
        job = job_of(first, schema, self.folder.name, self.transport.name)
        hellos, missing = self.greet(job)
        batch = follow_sizes([h.n_train for h in hellos.values()])
        if follows and before is None and batch != BATCHES[-1]:
            job = replace(job, local=job.local.model_copy(update={"batch_size": batch}))
            hellos, missing = self.greet(job)
        return job, hellos, missing

    @property
    def asked(self) -> list[int]:
        return [k for k in range(len(self.names)) if k not in self.gone]

    def greet(self, job: Job) -> tuple[dict[int, Hello], dict[int, str]]:
        """Who takes part in a job, and why the others do not."""
        quorum = self.config.run.quorum
        found, reasons = say_hello(self.transport, self.asked, self.config.deploy.timeout, job)
        settle(found, reasons, self.names, quorum, self.agreed, self.known)
        agree(found, reasons, self.names, quorum, self.agreed)
        return found, reasons

    def assemble(self, test: Samples | None) -> Problem:
        """Everything the round loop needs."""
        config, job, names = self.config, self.job, self.names
        real = self.schema["kind"] != "slice"  # a rehearsal is the simulator's, bit by bit
        engine = RemoteEngine(
            sites=self.sites,
            meet=self.meet,
            test=test,
            validation_sizes=self.held_out,
            real=real,
        )
        method = job.build_method()
        if method.traits.needs_auxiliary:
            raise FedtailError(
                f"method {job.method!r} needs an auxiliary set, which the server of a real federation does not have"
            )
        engine.model.load(initial_model(config, job))
        rates = RATES.build(config.rates.name, self.began_with, **config.rates.options)
        return Problem(
            engine=engine,
            method=method,
            rates=racing(rates if self.began_with == len(names) else WithNewcomers(rates, len(names)), config),
            n_classes=job.n_classes,
            background=self.schema.get("background"),
            gone=self.gone,
            real=real,
            watched=True,
            found={
                **({"batch_size": batch_of(job.local)} if config.local.batch_size == "auto" else {}),
                **({FOUND: self.optimizer} if config.server.optimizer == "auto" else {}),
            },
        )

    def meet(self, clients: list[int]) -> tuple[dict[int, int], dict[int, str]]:
        """Sites that come late must agree with those that were there."""
        joined, reasons = say_hello(self.transport, clients, self.config.deploy.timeout, self.job)
        settle(joined, reasons, self.names, agreed=self.agreed, sizes=self.known)
        for k, hello in joined.items():
            self.about.sizes[k], self.held_out[k] = hello.n_train, hello.n_validation
        if joined:
            write_clients(self.folder, self.about, titles_of(self.problem))
        return {k: hello.n_train for k, hello in joined.items()}, reasons

    # -- between rounds ------------------------------------------------------------------------------------------

    def begin(self, folder: Path, done: int) -> None:
        """Write down what was settled."""
        settled = {"sites": list(self.names), "began_with": self.began_with, "agreed": self.agreed}
        settled |= {"schema": plain(self.schema), "batch_size": batch_of(self.job.local), FOUND: self.optimizer}
        write_atomically(folder / AGREEMENT, json.dumps(settled))
        if self.on_start is not None:
            self.on_start(folder, done)

    def amend(self, record: dict[str, Any]) -> None:
        """Add what a round cost and who was missing."""
        record["faults"] = [r.to_json() for r in self.sites.drain()]
        traffic, self.sites.traffic = self.sites.traffic, Traffic()
        record["traffic"] = {"down": traffic.down, "up": traffic.up, "exchanges": traffic.exchanges}

    def after(self, state: State, record: dict[str, Any], seconds: float) -> None:
        """Look who has left and who is new."""
        if self.on_round is not None:
            self.on_round(state, record, seconds)
        if self.members is None or state.round == self.config.run.rounds:
            return
        now = self.members()
        self.gone.update(k for k, name in enumerate(self.names) if name not in now)
        self.gone.difference_update([k for k, name in enumerate(self.names) if name in now])
        if any(name not in self.names for name in now):
            save_checkpoint(self.folder / "checkpoint", self.problem.capture(state), result_keys(self.config))
            raise SitesJoined


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What was settled when a run began: a site that is away now, or is new, does not change it."""

    agreed: dict[str, Any]
    """What the sites agreed on, without the preprocessing ..."""
    schema: dict[str, Any]
    """... and with it."""
    began_with: int
    """How many sites there were."""
    batch_size: int
    optimizer: str
    """The server's, if it is ``auto``."""


def read_agreement(folder: Path, names: Sequence[str]) -> Agreement | None:
    """None if the run has not begun; ``FedtailError`` where the numbers are not those of the run, since its state is
    kept by them."""
    if not (folder / AGREEMENT).is_file():
        return None
    about = json.loads((folder / AGREEMENT).read_text())
    before = about["sites"]
    if before != list(names[: len(before)]):
        raise FedtailError(
            f"{str(folder)!r} has the sites {', '.join(before)}, in this order, and not {', '.join(names)}; "
            "new sites come after them, or start a new run"
        )
    return Agreement(
        agreed=about["agreed"],
        schema=about["schema"],
        began_with=int(about.get("began_with", len(before))),
        batch_size=int(about.get("batch_size", BATCHES[-1])),
        optimizer=str(about.get(FOUND, "none")),
    )


def known_sizes(folder: Path) -> list[int]:
    """Training samples of each client, as the run began with them; 0 of one that has not been there."""
    file = folder / "clients.json"
    return [int(n) for n in json.loads(file.read_text()).get("sizes", [])] if file.is_file() else []


def initial_model(config: Settings, job: Job) -> torch.Tensor:
    """(n,) the weights round 0 starts from: those of the simulator under the same seed."""
    return FlatModel(job.build_model(config.run.seed)).vector


def server_test(config: Settings, schema: dict[str, Any]) -> Samples | None:
    """The server's own test set: in a rehearsal that of the data set; otherwise none, sites test on theirs."""
    if schema["kind"] != "slice":
        return None
    test = load_pooled(config).test
    return encode_samples(test, Encoding.from_dict(schema["encoder"])) if schema.get("encoder") else test


def describe(
    schema: dict[str, Any],
    job: Job,
    names: Sequence[str],
    hellos: Mapping[int, Hello],
    test: Samples | None,
    held_out: Sequence[int],
    notes: tuple[str, ...] = (),
) -> About:
    """What the run folder may say of data the server has never seen; nothing of sites that are not there yet."""
    there = [hellos.get(k) for k in range(len(names))]
    return About(
        name=schema["name"],
        sites=tuple(names),
        classes=job.classes,
        input_shape=tuple(schema["input_shape"]),
        sizes=np.array([h.n_train if h else 0 for h in there]),
        validation_sizes=held_out,
        transform=job.transform,
        preprocessing=job.preprocessing,
        encoder=job.encoder,
        notes=notes,
        test_counts=None if test is None else test.counts(job.n_classes),
    )
