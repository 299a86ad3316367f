"""A run by totals: the document that sites sign, or take from a server that they trust, and the program it stands for.

Sites and relay run the same program. Nothing in it depends on who asks: settings come from the document, the seed from
all sites, and everything of the data from totals.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args

import numpy as np
import torch
from torch import nn

from fedtail.boosting.model import TreesModel
from fedtail.core.privacy import DELTA, gaussian_epsilon
from fedtail.core.totals import COUNTS, Totals
from fedtail.data.inspection import About
from fedtail.data.tables.schema import load_schema
from fedtail.errors import FedtailError
from fedtail.federate.exchanges import Exchanges
from fedtail.federate.protocol.agreement import LEAST, AgreementError, canonical
from fedtail.federate.protocol.job import Job, job_of, method_of
from fedtail.federate.site.own import image_schema, table_schema
from fedtail.federate.site.prepared import FederationSlice, SiteData, prepare
from fedtail.federate.statistics import common_preprocessing
from fedtail.federate.summed import SummedEngine, check_sums_only, groups_of
from fedtail.methods.trees import Trees
from fedtail.models.flat import FlatModel
from fedtail.rates import RATES, RateStrategy, Uniform
from fedtail.rounds.loop import RoundHook
from fedtail.rounds.plan import settled, settled_by_sizes
from fedtail.rounds.privacy import digest
from fedtail.rounds.race import racing
from fedtail.rounds.state import Problem, State
from fedtail.runs.build import Run, build_federation, load_pooled
from fedtail.runs.config import check_config
from fedtail.runs.encoding import choose_encoding, encoder_notes
from fedtail.runs.execution import play
from fedtail.runs.record import read_history
from fedtail.runs.result import Result
from fedtail.runs.saved import SavedModel, load_model, read_description
from fedtail.runs.trees import check_settings, forest_of
from fedtail.settings import Settings
from fedtail.version import VERSION

FORMAT = 1
HEAD: dict[str, type] = {"format": int, "fedtail": str, "run": str, "trust": str, "sites": list}
RUN: dict[str, type] = HEAD | {"schema": dict, "settings": dict}
AFTER = {"agreement", "model", "sites"}
"""Of a run that goes on from an earlier one: that one's name, model and sites."""
QUESTION: dict[str, type] = HEAD | {"what": str, "model": str, "reference": str}
"""What is in a document that asks for a run, and of one that asks for counts of a model (``federate.counted``)."""
What = Literal["evaluate", "reference", "look"]
WHATS: tuple[What, ...] = get_args(What)
SECTIONS = ("model", "method", "rates", "local", "run", "server", "privacy", "decision")
"""Of the settings, what sites sign; the rest is the server's own business."""
OWN_BUSINESS = ("name", "folder", "checkpoint_every", "seed")
"""Of ``[run]``, what they do not sign; the seed is theirs to draw."""
FILES = ("model.safetensors", "model.json")
DOCUMENT = "agreement.json"
"""In the run folder: the document that the sites have signed, the agreement's name, and the seed they have drawn."""


# -- the document --------------------------------------------------------------------------------------------------


def write_document(config: Settings, schema: Mapping[str, Any], names: Sequence[str], run: str) -> dict[str, Any]:
    """What all sites are asked to sign. ``names[k]`` is the site behind client k."""
    trust = config.deploy.trust
    if len(names) < LEAST and trust != "server":
        raise FedtailError(
            f"deploy.trust = {trust!r} needs at least {LEAST} sites, but there are {len(names)}; with two, each knows "
            "the other's part"
        )
    check_sums_only(config, method_of(config))
    groups_of(config, len(names))
    whole = config.model_dump(mode="json")
    sections = {name: whole[name] for name in SECTIONS}
    sections["run"] = {key: value for key, value in sections["run"].items() if key not in OWN_BUSINESS}
    after = {} if not config.deploy.after else {"after": predecessor(config)}
    return {**head_of(trust, names, run), "schema": dict(schema), "settings": sections, **after}


def head_of(trust: str, names: Sequence[str], run: str) -> dict[str, Any]:
    """What every document says."""
    return {"format": FORMAT, "fedtail": VERSION, "run": run, "trust": trust, "sites": list(names)}


def predecessor(config: Settings) -> dict[str, Any]:
    """What a document says of the run that it goes on from."""
    folder = Path(config.run.folder) / config.deploy.after
    if config.deploy.trust == "server" or config.method.name == "trees":
        raise FedtailError(
            "deploy.after goes on from a network that sites have agreed on; leave it out with deploy.trust = 'server' "
            "or method 'trees'"
        )
    if not all((folder / name).is_file() for name in (*FILES, DOCUMENT)):
        raise FedtailError(f"deploy.after: {str(folder)!r} is no run that sites have agreed on and that has ended")
    before = json.loads((folder / DOCUMENT).read_text())
    return {"agreement": before["agreement"], "model": digest_of(folder), "sites": before["document"]["sites"]}


def digest_of(folder: Path) -> str:
    """Return the hash of a model: its weights and all that leads from rows to answers, but no site's own decision."""
    _, about = read_description(folder)
    told = {name: value for name, value in about.items() if name not in ("sites", "data")}
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return hashlib.sha256(canonical({**told, "weights": weights})).hexdigest()


def declared_schema(config: Settings) -> dict[str, Any]:
    """What the config says of data that are at the sites: each compares it with its own before it signs."""
    options = config.data.options
    if config.data.name != "sites":  # a rehearsal, whose sites act as the clients of a data set
        pooled = load_pooled(config)
        return FederationSlice(build_federation(config, pooled), 0, pooled.model, pooled.model_options).schema()
    if options.get("schema"):
        return table_schema(load_schema(options["schema"]).unfitted())
    if options.get("classes"):
        size = options.get("size", 64)
        sides = [size, size] if isinstance(size, int) else [int(n) for n in size]
        shape = [int(options.get("channels", 3)), *sides]
        schema = image_schema(options["classes"], shape, options.get("augment", "flip"))
        encoding = choose_encoding(config.model, tuple(shape), images=True)
        return schema if encoding is None else {**schema, "encoder": encoding.to_dict()}
    raise FedtailError(
        "sites sign what their data are and tell nothing of it: set data.schema to the schema file that they share, or "
        "data.classes, data.size and data.channels for images"
    )


def settings_of(document: Mapping[str, Any], seed: int = 0) -> Settings:
    """The settings that a document stands for."""
    raw = {name: dict(section) for name, section in document["settings"].items()}
    raw["run"] |= {"seed": seed, "checkpoint_every": CHECKPOINTS}
    data = {} if document["schema"].get("kind") == "slice" else {"data": {"name": "sites"}}
    return check_config({**raw, **data, "deploy": {"trust": document["trust"]}})


def check_document(told: Any) -> None:
    """``AgreementError`` unless a document has the form of one, and is of this version."""
    forms = (RUN, RUN | {"after": dict}, QUESTION)
    form = next((f for f in forms if isinstance(told, dict) and set(told) == set(f)), None)
    if form is None or told["format"] != FORMAT:
        raise AgreementError("a document of another form; install the same fedtail everywhere")
    if told["fedtail"] != VERSION:
        raise AgreementError(f"a document of fedtail {told['fedtail']}, this site has {VERSION}; install the same one")
    if wrong := [name for name, kind in form.items() if not isinstance(told[name], kind)]:
        raise AgreementError(f"a document of another form: its {wrong[0]} is no {form[wrong[0]].__name__}")
    if form is QUESTION:
        if told["what"] not in WHATS or told["trust"] == "private":  # counts of a model carry no noise
            raise AgreementError("a question of another form; install the same fedtail everywhere")
    elif set(told.get("after", AFTER)) != AFTER:
        raise AgreementError("a document that goes on from a run of another form")
    elif set(told["settings"]) != set(SECTIONS) or not all(isinstance(s, dict) for s in told["settings"].values()):
        raise AgreementError("a document with other sections of settings")


def check_sites(told: Mapping[str, Any], me: str, roster: Sequence[str]) -> None:
    """``AgreementError`` unless a document is for the sites of a list."""
    if sorted(map(str, told["sites"])) != sorted(roster) or me not in roster:
        raise AgreementError("a document for other sites than sites.pub lists")
    if len(roster) < LEAST:
        raise AgreementError(f"sites.pub lists {len(roster)} sites, at least {LEAST} are needed")


# -- the program ---------------------------------------------------------------------------------------------------


CHECKPOINTS = 5
"""Rounds between two checkpoints of a site, which begins again from sums that it has on disk, without training."""
OnWait = Callable[[str], None]


class Hooks(TypedDict, total=False):
    """What a caller may listen to."""

    on_round: RoundHook
    on_start: Callable[[Path, int], None]
    on_wait: OnWait


def run_document(
    document: Mapping[str, Any],
    seed: int,
    totals: Exchanges,
    data: Mapping[int, SiteData],
    folder: Path,
    *,
    settings: Settings | None = None,
    begun: Path | None = None,
    device: str = "cpu",
    engine: str = "",
    amend: Callable[[dict[str, Any]], None] | None = None,
    **hooks: Unpack[Hooks],
) -> tuple[Result, str]:
    """(the result, the digest of the model). ``data``: what this process has of the sites, by client; ``settings``: the
    document's with the process's own folder; ``begun``: the run folder whose model the run goes on from."""
    torch.set_num_threads(1)  # the number of threads changes floating-point sums
    names = list(document["sites"])
    asked = settings_of(document, seed) if settings is None else settings
    noise = asked.privacy.noise if asked.privacy.mode == "shares" else 0.0
    data = {k: one.unstratified() for k, one in data.items()} if noise else data
    start = None if begun is None else load_model(begun)
    if start is None:
        schema = common_preprocessing(totals, document["schema"], data, seed, noise)
    else:
        known = {"preprocessing": start.preprocessing, "input_shape": list(start.input_shape)}
        plain = {"augment": None, "model_options": {}, **document["schema"]}
        schema = {**plain, **known, "transform": asdict(start.transform)}
    first = job_of(asked, schema, document["run"], engine)
    home, where = folder.parent, torch.device(device)
    owned = {k: prepare(one, first, k, home, where, home / "rows.sha256") for k, one in data.items()}
    sizes = group_sizes(totals, {k: len(here.client.train) for k, here in owned.items()}, noise)
    mean = np.full(len(names), sizes.sum() / len(names))
    settings = settled(asked, mean)
    job = job_of(settings, schema, document["run"], engine)
    method, module = job.build_method(), job.build_model(seed)
    if start is not None:
        take_weights(module, start)
    model = FlatModel(module)
    architecture: dict[str, Any] = {"name": job.model, "options": job.model_options}
    rates: RateStrategy = RATES.build(settings.rates.name, len(names), **settings.rates.options)
    if isinstance(method, Trees):
        check_settings(settings)
        sites = names if document["trust"] == "server" else []  # sums by site are no sums over sites
        model, architecture = forest_of(method, job.input_shape, job.n_classes, job.preprocessing, sites, settings)
        rates = Uniform(len(names), 0.0)
    for k, here in owned.items():
        here.method = job.build_method()
        here.model = model.at(k) if isinstance(model, TreesModel) else here.model

    def spent() -> dict[str, Any]:
        done = totals.number  # every exchange is a release
        cost = {"releases": done, "epsilon": gaussian_epsilon({noise: done}, DELTA)}
        return {"privacy": {"mode": "shares", "noise": noise, "delta": DELTA, **cost}} if noise else {}

    summed = SummedEngine(totals, owned, model, method, settings, job.n_classes, sizes, engine, spent)
    found, notes = settled_by_sizes(asked, mean)
    problem = Problem(
        engine=summed,
        method=method,
        rates=racing(rates, settings),
        n_classes=job.n_classes,
        background=schema.get("background"),
        settled=found,
    )
    prepared = totals.number

    def begin(path: Path, done: int) -> None:
        if done:
            totals.number = int(read_history(path)[done - 1]["exchange"])
        if "on_start" in hooks:
            hooks["on_start"](path, done)

    def amended(record: dict[str, Any]) -> None:
        summed.end_round()
        record["exchange"] = totals.number
        record |= spent()
        if amend is not None:
            amend(record)

    def after(state: State, record: dict[str, Any], seconds: float) -> bool | None:
        if state.round % asked.run.checkpoint_every == 0:
            totals.forget(prepared, record["exchange"])
        return hooks["on_round"](state, record, seconds) if "on_round" in hooks else None

    sums_only = "sites have told sums only; the sizes shown are means over sites"
    if isinstance(method, Trees) and document["trust"] != "server":
        sums_only += ", and trees do not know a row's site"
    notes = (sums_only, *encoder_notes(job.encoding, asked.model, images=False), *notes)
    about = about_of(schema, job, names, mean.astype(np.int64), notes)
    folder.mkdir(parents=True, exist_ok=True)
    made, resume = Run(problem, asked, about, architecture), (folder / "config.toml").is_file()
    result = play(made, folder, resume=resume, on_round=after, on_start=begin, amend=amended)
    return result, digest(result.x)


def take_weights(module: nn.Module, model: SavedModel) -> None:
    """Begin with the weights of a model; ``FedtailError`` if it is another network."""
    try:
        module.load_state_dict(model.module.state_dict())
    except RuntimeError:
        raise FedtailError("deploy.after: that run's model is another network; leave [model] as it was") from None


def group_sizes(totals: Totals, own: Mapping[int, int], noise: float) -> np.ndarray:
    """(groups,) training samples of each group."""
    found = totals.group_totals(1, lambda k: np.array([own[k]]), limit=COUNTS, reach=1.0)[:, 0]
    if not noise and not found.all():
        raise FedtailError("a group of sites has no training samples")
    return np.maximum(found, 1).astype(np.float64)


def about_of(
    schema: Mapping[str, Any], job: Job, names: Sequence[str], sizes: np.ndarray, notes: tuple[str, ...]
) -> About:
    """What the run folder may say of data that are at sites."""
    return About(
        name=schema["name"],
        sites=tuple(names),
        classes=job.classes,
        input_shape=tuple(schema["input_shape"]),
        sizes=sizes,
        validation_sizes=[0] * len(names),
        transform=job.transform,
        preprocessing=job.preprocessing,
        encoder=job.encoder,
        notes=notes,
    )
