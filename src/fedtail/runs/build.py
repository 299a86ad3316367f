"""Build a run from settings and a federation: data, model, method, rates and the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fedtail.data.federation import Federation, Transform
from fedtail.data.images.features import Progress
from fedtail.data.inspection import About, describe
from fedtail.data.own import whole
from fedtail.data.partitions import federate
from fedtail.data.registry import DATASETS, Pooled
from fedtail.errors import FedtailError
from fedtail.methods import METHODS, Method
from fedtail.methods.optimizers import with_optimizer
from fedtail.methods.trees import Trees
from fedtail.models import build_model, choose_model
from fedtail.models.custom import check_output
from fedtail.models.encoders.base import Encoding
from fedtail.models.registry import with_classifier
from fedtail.rates import RATES, RateStrategy
from fedtail.rounds.evaluation import Split
from fedtail.rounds.plan import settled, settled_by_sizes
from fedtail.rounds.race import racing
from fedtail.rounds.state import DIAGNOSTICS, Engine, Problem
from fedtail.runs.encoding import HEAD, build_encoded, choose_encoding, encode_federation, encoder_notes
from fedtail.runs.trees import assemble_trees
from fedtail.settings import DIAGNOSTICS_OF_UPDATES, Settings
from fedtail.simulate import simulator
from fedtail.words import listing, plural

AUXILIARY = 63
"""Auxiliary samples per class where a method needs them and the settings do not say."""


def load_pooled(settings: Settings) -> Pooled:
    """The data set that the settings name, before it is split."""
    data = settings.data
    options, known = data.options, DATASETS.options(data.name)
    if "seed" in known:
        options.setdefault("seed", settings.data_seed)
    if "data_dir" in known and data.dir is not None:
        options.setdefault("data_dir", data.dir)
    return whole(data.name, DATASETS.build(data.name, **options))


def build_federation(settings: Settings, pooled: Pooled | None = None) -> Federation:
    """The data set that the settings name, split over its clients."""
    data = settings.data.model_copy(update={"auxiliary": auxiliary_size(settings), "seed": settings.data_seed})
    return federate(load_pooled(settings) if pooled is None else pooled, data)


def is_images(preprocessing: Mapping[str, Any]) -> bool:
    """Whether data are pictures that came as files, or stand for such: what an encoder is chosen for by itself."""
    return preprocessing.get("kind") == "images"


SMALL_SITE = 100
"""Training rows below which what is chosen and measured at a site alone is mostly luck."""


def site_notes(federation: Federation) -> list[str]:
    """Warn of sites of the user's own that are too small to be judged by themselves."""
    own = federation.preprocessing.get("kind") in ("table", "images") and not federation.sites[0].startswith("client ")
    small = [name for name, n in zip(federation.sites, federation.sizes, strict=True) if n < SMALL_SITE]
    if not own or not small:
        return []
    held = sum(len(rows) for rows in federation.validation)
    who = f"{len(small)} of {plural(federation.n_clients, 'site')} {'has' if len(small) == 1 else 'have'}"
    return [
        f"warning: {who} fewer than {SMALL_SITE} training rows "
        f"({listing(small, 3)}): figures of one such site are mostly luck, and all choices rest on {held:,} "
        "validation rows; join sites that belong together, or compare over seeds (fedtail compare --seeds 5)"
    ]


@dataclass(frozen=True)
class Prepared:
    """Data as they are trained on: features, where the run has an encoder."""

    federation: Federation
    about: About
    """What the run folder says of the data."""
    encoding: Encoding | None = None


def prepare(federation: Federation, settings: Settings, progress: Progress | None = None) -> Prepared:
    """Encode the data if the settings ask for it, and note what follows from the data."""
    images = is_images(federation.preprocessing)
    encoding = choose_encoding(settings.model, federation.input_shape, images=images)
    notes = [*encoder_notes(encoding, settings.model, images=images), *site_notes(federation)]
    if settings.method.name != "trees":
        notes += settled_by_sizes(settings, federation.sizes)[1]
    about = describe(federation)
    about = replace(about, notes=(*about.notes, *notes))
    if encoding is not None:
        about = replace(about, encoder=encoding.to_dict(), transform=Transform())
        cache = bool(settings.data.options.get("cache", True))
        federation = encode_federation(federation, encoding, cache=cache, progress=progress)
    return Prepared(federation, about, encoding)


@dataclass(frozen=True)
class Run:
    """A run that is ready to begin, in the simulator or over real sites."""

    problem: Problem
    settings: Settings
    """Those that the user asked for."""
    about: About
    architecture: dict[str, Any]
    """Name and options of the model, by which ``load_model`` builds it again; no name for a module of the user's."""


def build(
    settings: Settings,
    data: Federation | Prepared,
    *,
    module: nn.Module | None = None,
    method: Method | None = None,
    rates: RateStrategy | None = None,
    progress: Progress | None = None,
) -> Run:
    """Make everything that a run needs: model, method and rates from the settings, or as they are given."""
    ready = data if isinstance(data, Prepared) else prepare(data, settings, progress)
    federation, about, encoding = ready.federation, ready.about, ready.encoding
    method = METHODS.build(settings.method.name, **settings.method.options) if method is None else method
    if rates is None:
        rates = RATES.build(settings.rates.name, federation.n_clients, **settings.rates.options)
    if isinstance(method, Trees):
        if module is not None:
            raise FedtailError("method 'trees' is its own model; leave the model out")
        check_validation(federation, settings)
        problem, architecture = assemble_trees(federation, method, settings)
        return Run(problem, settings, about, architecture)
    architecture = {"name": "", "options": {}}
    if module is None:
        module, architecture = build_module(settings, federation, encoding, type(method))
    else:
        check_output(module, federation.input_shape, federation.n_classes, "the model")
    return Run(assemble(federation, module, method, rates, settings), settings, about, architecture)


def auxiliary_size(settings: Settings) -> int:
    """Auxiliary samples per class: as set, else what the method needs."""
    if settings.data.auxiliary is not None:
        return settings.data.auxiliary
    return AUXILIARY if METHODS[settings.method.name].traits.needs_auxiliary else 0


def build_module(
    settings: Settings, federation: Federation, encoding: Encoding | None, method: type[Method]
) -> tuple[nn.Module, dict[str, Any]]:
    """The model that the settings name, freshly initialised, and its description (name and options)."""
    name, options = settings.model.name, {**settings.model.options, **classifier_option(settings, method)}
    n_classes, seed = federation.n_classes, settings.run.seed
    if encoding is not None:
        name = HEAD if name == "auto" else name
        return build_encoded(encoding, name, n_classes, seed=seed, **options), {"name": name, "options": options}
    if name == "auto":
        name, options = federation.model, {**federation.model_options, **options}
    if name == "auto":  # the data has no model of its own; settled here, so that the run folder names it
        name, own = choose_model(federation.input_shape)
        options = {**own, **options}
    return build_model(name, federation.input_shape, n_classes, seed=seed, **options), {
        "name": name,
        "options": options,
    }


def classifier_option(settings: Settings, method: type[Method]) -> dict[str, str]:
    """The output layer as an option of ``build_model``; empty for the model's own."""
    asked, needed = settings.model.classifier, method.traits.classifier
    if needed == "sparse_etf" and asked != "auto":
        raise FedtailError(
            f"model.classifier = {asked!r}: method {method.name!r} needs its own output layer; use 'auto'"
        )
    kind = needed if asked == "auto" else asked
    return {} if kind == "linear" else {"classifier": kind}


def check_validation(federation: Federation, settings: Settings) -> None:
    """``FedtailError`` where models are to be compared and no client has a row to compare them on."""
    if len(federation.holdout) or any(len(rows) for rows in federation.validation):
        return
    run, instead = settings.run, {}
    if run.select == "best":
        instead["run.select = 'best'"] = "run.select=last"
    if run.patience:
        instead[f"run.patience = {run.patience}"] = "run.patience=0"
    if settings.local.lr == "auto":
        instead["local.lr = 'auto'"] = "local.lr=0.1"
    for name, plain in (("calibrate", "none"), ("goal", "argmax"), ("scope", "global")):
        if (chosen := getattr(settings.decision, name)) != plain:
            instead[f"decision.{name} = {chosen!r}"] = f"decision.{name}={plain}"
    if instead:
        raise FedtailError(
            f"{', '.join(instead)}: this needs validation data, but the clients have none; "
            f"add rows, raise data.validation, or set {' '.join(instead.values())}"
        )


def assemble(
    federation: Federation, module: nn.Module, method: Method, rates: RateStrategy, settings: Settings
) -> Problem:
    """Everything the round loop needs, in the simulator."""
    check_validation(federation, settings)
    found, _ = settled_by_sizes(settings, federation.sizes)
    settings = settled(settings, federation.sizes)
    method = with_optimizer(method, settings.local.optimizer)
    if method.traits.needs_auxiliary and not len(federation.auxiliary):
        raise FedtailError(
            f"method {method.name!r} needs an auxiliary set; set data.auxiliary (fedtail.partition: auxiliary) to e.g. "
            f"{AUXILIARY}"
        )
    module = with_classifier(module, classifier_option(settings, type(method)).get("classifier", "linear"))
    engine: Engine = simulator(federation, module, method, settings)
    measured = [name for name in settings.run.diagnostics if name not in DIAGNOSTICS_OF_UPDATES]
    monitors = [DIAGNOSTICS[name](federation, engine.model, method, settings) for name in measured]
    seed, privacy = settings.run.seed, settings.privacy
    if privacy.mode == "shares":
        raise FedtailError(
            "privacy.mode = 'shares' needs sites that mask their updates (fedtail deploy); in the simulator, use "
            "'central', which adds the same amount of noise"
        )
    return Problem(
        engine=engine,
        method=method,
        rates=racing(rates, settings),
        n_classes=federation.n_classes,
        train_counts=federation.label_map().sum(0),
        auxiliary=method.auxiliary_gradients(engine.model, federation) if method.traits.needs_auxiliary else None,
        background=federation.background,
        holdout=Split.of(federation, federation.holdout) if len(federation.holdout) else None,
        labels=federation.clusters,
        monitors=monitors,
        noise_seed=seed,
        settled=found,
    )
