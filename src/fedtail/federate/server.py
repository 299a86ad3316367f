"""The server's side of a real federation: handshake, job, the round loop over a transport, the run folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtail.data.about import About
from fedtail.data.federation import Samples, Transform
from fedtail.errors import FedtailError
from fedtail.federate.agreed import Hooks, declared_schema, run_document, write_document
from fedtail.federate.engine import RemoteEngine
from fedtail.federate.journal import Journal
from fedtail.federate.metrics import Metrics, served
from fedtail.federate.protocol.faults import log
from fedtail.federate.protocol.handshake import Hello, agree, say_hello, settle
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.preprocess import IDENTITY, agree_on_preprocessing
from fedtail.federate.protocol.transport import Transport
from fedtail.federate.relay import Relay, RelayTotals
from fedtail.federate.replies import refused
from fedtail.federate.summed import groups_of
from fedtail.federate.sums import LEAST, Sums, check_masked, choose_reveal, need_masks
from fedtail.files import write_atomically
from fedtail.methods import METHODS
from fedtail.models.encoders import Encoding
from fedtail.models.flat import FlatModel
from fedtail.rates import RATES
from fedtail.rounds.batches import BATCHES, batch_notes, batch_of, follow, settle_batch
from fedtail.rounds.checkpoint import save_checkpoint
from fedtail.rounds.growth import WithNewcomers
from fedtail.rounds.history import plain
from fedtail.rounds.loop import RoundHook
from fedtail.rounds.race import racing
from fedtail.rounds.server import FOUND, follow_sites, server_notes
from fedtail.rounds.state import Problem, State
from fedtail.runs.build import Run, classifier_option, load_pooled
from fedtail.runs.config import result_keys
from fedtail.runs.encoding import encode_samples, encoder_notes
from fedtail.runs.execution import play
from fedtail.runs.folder import choose_folder, claimed, run_name, write_clients
from fedtail.runs.result import Result, titles_of
from fedtail.settings import Settings

AGREEMENT = "federation.json"
"""In the run folder: the sites, in the order of their numbers, what they agreed on, and the preprocessing."""


class SitesJoined(Exception):
    """There are new sites, and a checkpoint: the run goes on with them once it is resumed."""


def roster(config: Settings, sites: Sequence[str], *, resume: bool = False) -> list[str]:
    """The site behind each client's number. A number is a site's own for the whole run: one that has left keeps it, and
    one that is new takes the next."""
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

    ``members`` says which sites take part, and is asked after every round: one that has left for good is not asked any
    more; with new ones the run ends in ``SitesJoined``.
    """
    if config.deploy.trust != "server":
        return federate_agreed(config, transport, names, resume=resume, on_round=on_round, on_start=on_start)
    torch.set_num_threads(1)  # the number of threads changes floating-point sums
    deploy = config.deploy
    folder = choose_folder(config, resume)
    here = names if members is None else members()
    gone = {k for k, name in enumerate(names) if name not in here}
    everybody, quorum = [k for k in range(len(names)) if k not in gone], config.run.quorum
    before = read_agreement(folder, names) if resume else None
    began_with = len(names) if before is None else before.began_with
    reveal, told_less = "totals" if before is None else before.reveal, ""
    if before is None:
        hellos, missing = say_hello(transport, everybody, deploy.timeout, model=config.model)
        settle(hellos, missing, names, quorum)
        agreed = agree(hellos, missing, names, quorum)
        there = {k: names[k] for k in hellos}
        schema = agree_on_preprocessing(transport, agreed, there, config.run.seed, deploy.timeout, quorum)
        reveal, told_less = choose_reveal(config, hellos, names, len(everybody))
    else:
        agreed, schema = before.agreed, before.schema
    follows = config.local.batch_size == "auto"
    first = settle_batch(config, BATCHES[-1] if before is None else before.batch_size) if follows else config
    job, architecture = make_job(first, schema, folder.name, transport.name, reveal)
    sizes = known_sizes(folder) if resume else []

    def greet(job: Job) -> tuple[dict[int, Hello], dict[int, str]]:
        """Who takes part in a job, and why the others do not."""
        found, reasons = say_hello(transport, everybody, deploy.timeout, job)
        settle(found, reasons, names, quorum, agreed, sizes)
        agree(found, reasons, names, quorum, agreed)
        return found, reasons

    hellos, missing = greet(job)
    if follows and before is None and (batch := follow([h.n_train for h in hellos.values()])) != BATCHES[-1]:
        job = replace(job, local=job.local.model_copy(update={"batch_size": batch}))
        hellos, missing = greet(job)  # a site's policy may say no to batches that small
    chooses = config.server.optimizer == "auto"
    applied = follow_sites([h.n_train for h in hellos.values()]) if before is None else before.optimizer
    test = server_test(config, schema)

    def meet(clients: list[int]) -> tuple[dict[int, int], dict[int, str]]:
        """Sites that come late must agree with those that were there."""
        found, reasons = say_hello(transport, clients, deploy.timeout, job)
        joined = dict(found)
        settle(joined, reasons, names, agreed=agreed, sizes=sizes)
        sums.learn(joined)
        for k, hello in joined.items():
            about.sizes[k], held_out[k] = hello.n_train, hello.n_validation
        if joined:
            write_clients(folder, about, titles_of(problem))
        return {k: hello.n_train for k, hello in joined.items()}, reasons

    sums = Sums.of(hellos, names)
    held_out = [hellos[k].n_validation if k in hellos else 0 for k in range(len(names))]
    engine = RemoteEngine(
        transport=transport,
        job=job,
        sizes=np.array([hellos[k].n_train if k in hellos else 0 for k in range(len(names))]),
        absent={**missing, **dict.fromkeys(gone, "has left")},
        gone=gone,
        meet=meet,
        faults=[refused(k, 0, reason, "hello: ") for k, reason in missing.items()],
        test=test,
        timeout=deploy.timeout,
        quorum=quorum,
        validation_sizes=held_out,
        real=schema["kind"] != "slice",  # a rehearsal is the simulator's, bit by bit
        candidates=deploy.candidates,
        models_per_message=deploy.models_per_message,
        memory_mb=deploy.memory_mb,
        sums=sums,
    )
    method = job.build_method()
    if method.traits.needs_auxiliary:
        raise FedtailError(
            f"method {job.method!r} needs an auxiliary set, which the server of a real federation does not have"
        )
    engine.model.load(initial_model(config, job))
    options = config.rates.options
    if deploy.updates == "masked":
        need_masks(hellos, names, len(everybody))
        if config.rates.name == "fedhoo_clusters":
            options = {"least": LEAST, **options}
    rates = RATES.build(config.rates.name, began_with, **options)
    problem = Problem(
        engine=engine,
        method=method,
        rates=racing(rates if began_with == len(names) else WithNewcomers(rates, len(names)), config),
        n_classes=job.n_classes,
        background=schema.get("background"),
        gone=gone,
        real=engine.real,
        watched=True,
        found={**({"batch_size": batch_of(job.local)} if follows else {}), **({FOUND: applied} if chooses else {})},
    )
    if deploy.updates == "masked":
        check_masked(config, method, problem.rates)
    notes = (
        *encoder_notes(job.encoding, config.model, images=False),
        *batch_notes(config.local, batch_of(job.local), engine.sizes),
        *server_notes(config.server, applied, engine.sizes),
        *([told_less] if told_less else []),
    )
    about = describe(schema, job, names, hellos, test, held_out, notes)

    def amend(record: dict[str, Any]) -> None:
        record["faults"] = [r.to_json() for r in engine.drain()]
        traffic, engine.traffic = engine.traffic, type(engine.traffic)()
        record["traffic"] = {"down": traffic.down, "up": traffic.up, "exchanges": traffic.exchanges}

    def begin(folder: Path, done: int) -> None:
        said = {"sites": list(names), "began_with": began_with, "agreed": agreed, "schema": plain(schema)}
        said |= {"reveal": reveal, "batch_size": batch_of(job.local), FOUND: applied}
        write_atomically(folder / AGREEMENT, json.dumps(said))
        if on_start is not None:
            on_start(folder, done)

    metrics = Metrics(folder.name, names, config.run.rounds, engine.seen)

    def after(state: State, record: dict[str, Any], seconds: float) -> None:
        metrics.round(state, record, seconds)
        if on_round is not None:
            on_round(state, record, seconds)
        if members is None or state.round == config.run.rounds:
            return
        now = members()
        gone.update(k for k, name in enumerate(names) if name not in now)
        gone.difference_update([k for k, name in enumerate(names) if name in now])
        if any(name not in names for name in now):
            save_checkpoint(folder / "checkpoint", problem.capture(state), result_keys(config))
            raise SitesJoined

    with served(metrics, deploy.metrics_port), claimed(config, folder, resume) as folder:
        engine.spool = folder
        return play(
            Run(problem, config, about, architecture),
            folder,
            resume=resume,
            on_round=after,
            on_start=begin,
            amend=amend,
        )


DOCUMENT = "agreement.json"
"""In the run folder: the document that the sites have signed, the agreement's name, and the seed they have drawn."""


def federate_agreed(
    config: Settings,
    transport: Transport,
    names: Sequence[str],
    *,
    resume: bool = False,
    on_round: RoundHook | None = None,
    on_start: Callable[[Path, int], None] | None = None,
) -> Result:
    """Relay a run that the sites agree on, and follow it: the same program as theirs, without data."""
    held = Path(config.run.folder) / run_name(config) / DOCUMENT
    before = json.loads(held.read_text()) if resume and held.is_file() else None
    if before is not None:
        config = with_seed(config, before["seed"])
    folder = held.parent if before is not None else choose_folder(config, resume)
    relay = Relay(transport, names, config.deploy.timeout)
    metrics = Metrics(folder.name, names, config.run.rounds, relay.seen)

    def amend(record: dict[str, Any]) -> None:
        record["traffic"], relay.traffic = relay.traffic, dict.fromkeys(relay.traffic, 0)

    def after(state: State, record: dict[str, Any], seconds: float) -> bool | None:
        metrics.round(state, record, seconds)
        return None if on_round is None else on_round(state, record, seconds)

    with served(metrics, config.deploy.metrics_port), claimed(config, folder, resume) as folder:
        if before is None:
            document = write_document(config, declared_schema(config), names, folder.name)
            agreement, seed = relay.agree(document)
            before = {"document": document, "agreement": agreement, "seed": seed}
            write_atomically(folder / DOCUMENT, json.dumps(before))
            config = with_seed(config, seed)
        elif before["document"] != write_document(config, declared_schema(config), names, folder.name):
            raise FedtailError(f"{str(folder)!r} was agreed on with other settings or sites; start a new run")
        journal = Journal(folder / "exchanges")
        groups = groups_of(config, len(names), LEAST, "deploy.trust")
        totals = RelayTotals(relay, before["agreement"], groups, journal)
        result, digest = run_document(
            before["document"],
            before["seed"],
            totals,
            {},
            folder,
            journal,
            settings=config,
            engine=transport.name,
            hooks=Hooks(after, on_start, amend),
        )
        for client, found in totals.finish().items():
            if found != digest:
                log.warning("%s has come to another model than this server", names[client])
    return result


def with_seed(config: Settings, seed: int) -> Settings:
    return config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What was settled when a run began: a site that is away now, or is new, does not change it."""

    agreed: dict[str, Any]
    """What the sites agreed on, without the preprocessing ..."""
    schema: dict[str, Any]
    """... and with it."""
    began_with: int
    """How many sites there were."""
    reveal: str
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
        reveal=str(about.get("reveal", "totals")),
        batch_size=int(about.get("batch_size", BATCHES[-1])),
        optimizer=str(about.get(FOUND, "none")),
    )


def known_sizes(folder: Path) -> list[int]:
    """Training samples of each client, as the run began with them; 0 of one that has not been there."""
    file = folder / "clients.json"
    return [int(n) for n in json.loads(file.read_text()).get("sizes", [])] if file.is_file() else []


def make_job(
    config: Settings, schema: dict[str, Any], run: str, engine: str, reveal: str
) -> tuple[Job, dict[str, Any]]:
    """The work order of a run, and the model's description for ``model.json``."""
    if config.run.metric != "accuracy" and reveal == "totals":
        raise FedtailError(
            f"run.metric = {config.run.metric!r} needs per-class counts; set deploy.reveal = 'sums' or 'classes' "
            "(sites must allow it in their policy), or run.metric = 'accuracy'"
        )
    if config.deploy.compress != "none" and config.privacy.mode == "local":
        raise FedtailError(
            f"deploy.compress = {config.deploy.compress!r}: noisy updates do not compress without loss of the privacy "
            "that was promised; use deploy.compress = 'none' with privacy.mode = 'local'"
        )
    if config.deploy.updates == "masked" and config.deploy.compress != "none":
        raise FedtailError("deploy.updates = 'masked': masked updates do not compress; set deploy.compress = 'none'")
    if config.deploy.updates == "masked" and config.privacy.mode in ("local", "central"):
        raise FedtailError(
            f"deploy.updates = 'masked' works with privacy.mode = 'shares', not with {config.privacy.mode!r}: "
            "sites add "
            "their shares of the noise under masks"
        )
    if config.deploy.updates == "plain" and config.privacy.mode == "shares":
        raise FedtailError("privacy.mode = 'shares' hides shares of noise under masks; set deploy.updates = 'masked'")
    beside = [name for name in config.run.diagnostics if name not in ("alignment", "influence")]
    if beside:
        raise FedtailError(f"run.diagnostics = {beside[0]!r} needs the simulator: it looks at the sites' data")
    name, options = (
        config.model.name,
        {**config.model.options, **classifier_option(config, METHODS[config.method.name])},
    )
    encoding = Encoding.from_dict(schema["encoder"]) if schema.get("encoder") else None
    if encoding is not None:
        name = config.model.head if name == "auto" else name
    elif name == "auto":
        name, options = schema["model"], {**schema["model_options"], **options}
    transform = IDENTITY if encoding is not None else schema["transform"]
    job = Job(
        run=run,
        model=name,
        input_shape=tuple(schema["input_shape"]) if encoding is None else encoding.shape,
        classes=tuple(schema["classes"]),
        method=config.method.name,
        rounds=config.run.rounds,
        model_options=options,
        method_options=METHODS.build(config.method.name, **config.method.options).config(),
        local=config.local,
        seed=config.run.seed,
        metric=config.run.metric,
        transform=Transform(transform["scale"], tuple(transform["mean"]), tuple(transform["std"])),
        augment=schema["augment"] if encoding is None else None,
        encoder={} if encoding is None else encoding.to_dict(),
        preprocessing=schema["preprocessing"],
        reveal=reveal,
        noise=config.privacy.noise if config.privacy.mode == "local" else 0.0,
        updates=config.deploy.updates,
        shares=config.privacy.noise if config.privacy.mode == "shares" else 0.0,
        clip=(config.privacy.clip or 0.0) if config.privacy.mode == "shares" else 0.0,
        dropouts=config.privacy.dropouts if config.privacy.mode == "shares" else 0.0,
        compress=config.deploy.compress,
        engine=engine,
    )
    return job, {"name": name, "options": options}


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
