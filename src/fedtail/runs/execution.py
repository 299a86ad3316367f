"""Run settings, or a federation in memory: the rounds, and what they leave."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedtail.data.about import About
from fedtail.data.federation import Federation
from fedtail.data.images.features import Progress as Encoded
from fedtail.data.registry import Pooled
from fedtail.errors import FedtailError, writing
from fedtail.methods import METHODS, Method
from fedtail.models import build_model
from fedtail.models.custom import check_output
from fedtail.models.encoders import Encoding
from fedtail.rates import RATES, RateStrategy
from fedtail.rounds.checkpoint import load_checkpoint, save_checkpoint
from fedtail.rounds.loop import RoundHook, begin_search, exhausted, train_rounds
from fedtail.rounds.privacy import count_undone
from fedtail.rounds.progress import ProgressHook
from fedtail.rounds.state import Problem, State
from fedtail.runs.config import changed, result_keys, suggestions
from fedtail.runs.decide import check_decision
from fedtail.runs.encoding import build_encoded
from fedtail.runs.folder import append_round, begin_folder, choose_folder, claimed, read_history, read_timings
from fedtail.runs.problem import assemble, build_federation, build_module, classifier_option, load_pooled, prepare
from fedtail.runs.result import Result, conclude, titles_of
from fedtail.runs.tracking import Tracker, build_trackers, check_trackers
from fedtail.settings import KEYWORDS, WHOLE_SECTIONS, Data, Rates, Settings, check_effects
from fedtail.settings import Method as MethodSection
from fedtail.simulate.sharded import rank

ON_DISK = ("name", "folder", "checkpoint_every", "trackers")
"""Settings of a run that is written as it goes."""


def fit(
    federation: Federation,
    model: nn.Module | str | None = None,
    method: Method | str = "fedcgnm",
    rates: RateStrategy | str | float | Sequence[float] = 0.6,
    *,
    on_round: RoundHook | Sequence[RoundHook] | None = None,
    on_progress: ProgressHook | None = None,
    **settings: Any,
) -> Result:
    """Train a federation and return the model and its results, without writing to disk.

    Args:
        federation: see ``fedtail.partition``, ``Federation.from_tables``, ``from_images`` and ``from_arrays``.
        model: an ``nn.Module`` that maps a batch of inputs to logits, trained in place, or a name; defaults to
            ``mlp``, to the ``head`` with an encoder, and to ``auto`` for your own data. With an encoder, the model
            takes its features.
        method: a ``Method`` or its name.
        rates: a strategy (a new one for every run, since a search has state), its name, one rate for all clients,
            ``auto`` (found by a race), or one rate per client.
        on_round: a callback, or several, called after every round with the state, the round's record and its seconds.
            If one returns True, the run stops and the current model is the result.
        on_progress: called a few times a second with the run's progress and the estimated time left;
            ``on_progress=print`` prints it.
        settings: any setting of the sections ``model``, ``local``, ``run`` and ``engine`` by name, and
            ``server``, ``privacy`` and ``decision`` as dictionaries; see docs/settings.md. For your own tables or
            images, defaults are those of ``fedtail run``: ``lr="auto"``, ``metric="macro_f1"`` and so on.
    """
    for key in ON_DISK:
        if key in settings:
            raise FedtailError(f"{key} has no effect in fit(), which does not write to disk; use result.save(folder)")
    chosen = Settings.of(**settings)
    if federation.own:
        model, chosen = _suggested(federation, model, rates, settings, chosen)
    check_effects(chosen, said_keys(settings))
    name = model if isinstance(model, str) else "auto" if model is None else "own"
    chosen = chosen.model_copy(update={"model": chosen.model.model_copy(update={"name": name})})
    federation, about, encoding = prepare(federation, chosen)
    built = METHODS.build(method) if isinstance(method, str) else method
    if not isinstance(built, Method):
        raise FedtailError(f"method = {method!r} is neither a Method, such as FedProx(mu=0.1), nor a name")
    module, named = _module(model, federation, chosen, encoding, type(built))
    strategy = _strategy(rates, federation.n_clients)
    chosen = chosen.model_copy(
        update={
            "data": Data(name=federation.name, clients=federation.n_clients),
            "model": chosen.model.model_copy(update={"name": named["name"] or "auto"}),
            "method": MethodSection(name=built.name, **({} if isinstance(method, str) else built.config())),
            "rates": Rates(name=strategy.name),
        }
    )
    check_decision(chosen.decision, federation.classes)
    problem = assemble(federation, module, built, strategy, chosen)
    seconds: list[float] = []

    hooks = [on_round] if callable(on_round) else list(on_round or ())

    def after(state: State, record: dict[str, Any], took: float) -> bool:
        seconds.append(took)
        said = [hook(state, record, took) for hook in hooks]  # all of them are called
        return True in said

    state = train_rounds(problem, chosen, problem.begin(), after, on_progress)
    result = conclude(problem, state, about, chosen, seconds)
    result.architecture = named
    return result


def said_keys(keywords: Mapping[str, Any]) -> set[str]:
    """The dotted keys of settings given to ``fit``; a whole section given as settings says nothing of single keys."""
    keys = {f"{KEYWORDS[name]}.{name}" for name in keywords if name in KEYWORDS}
    whole = {name: value for name, value in keywords.items() if name in WHOLE_SECTIONS}
    for section, value in whole.items():
        keys |= {f"{section}.{name}" for name in (value if isinstance(value, Mapping) else value.model_fields_set)}
    return keys


def _suggested(
    federation: Federation, model: nn.Module | str | None, rates: Any, said: Mapping[str, Any], chosen: Settings
) -> tuple[nn.Module | str, Settings]:
    """Model and settings with what the user's own data suggests for what the user has not said."""
    keys = said_keys(said)
    own = set() if model is None else {"model.name", "model.channels"}
    validates = any(len(rows) for rows in federation.validation)
    if model is not None:
        chosen = chosen.model_copy(update={"model": chosen.model.model_copy(update={"name": "own"})})
    found = suggestions(federation.own, chosen, keys | own, validates=validates)
    if getattr(rates, "searches", "rate") == "lr":
        found.pop("local.lr", None)
    chosen = changed(
        chosen.model_copy(update={"model": chosen.model.model_copy(update={"name": "auto"})}),
        {key: value for key, value in found.items() if not key.startswith("data.")},
    )
    return chosen.model.name if model is None else model, chosen


def _signature() -> inspect.Signature:
    """``fit``'s parameters with every setting it takes, so that help and editors know them."""
    own = inspect.signature(fit)
    defaults = Settings()
    more = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(getattr(defaults, section), name),
            annotation=type(getattr(defaults, section)).model_fields[name].annotation,
        )
        for name, section in KEYWORDS.items()
        if name not in ON_DISK
    ]
    more += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default={}) for name in WHOLE_SECTIONS]
    kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    return own.replace(parameters=[*kept, *more])


fit.__signature__ = _signature()  # type: ignore[attr-defined]


def _module(
    model: nn.Module | str | None,
    federation: Federation,
    settings: Settings,
    encoding: Encoding | None,
    method: type[Method],
) -> tuple[nn.Module, dict[str, Any]]:
    if encoding is not None and model in (None, "auto"):
        model = settings.model.head
    if model is None:
        model = "mlp"
    if isinstance(model, nn.Module):
        check_output(model, federation.input_shape, federation.n_classes, "the model")
        return model, {"name": "", "options": {}}
    if isinstance(model, str):
        shape, n_classes, seed = federation.input_shape, federation.n_classes, settings.run.seed
        if encoding is not None:
            options = classifier_option(settings, method)
            return build_encoded(encoding, model, n_classes, seed=seed, **options), {"name": model, "options": options}
        options = {**settings.model.options, **classifier_option(settings, method)}
        return build_model(model, shape, n_classes, seed=seed, **options), {"name": model, "options": options}
    raise FedtailError(f"model = {model!r} is neither an nn.Module nor a name such as 'mlp'")


def _strategy(rates: RateStrategy | str | float | Sequence[float], n_clients: int) -> RateStrategy:
    if isinstance(rates, RateStrategy):
        return rates
    if isinstance(rates, str) and rates != "auto":
        return RATES.build(rates, n_clients)
    if isinstance(rates, (int, float, str)):
        return RATES.build("uniform", n_clients, rate=rates)
    return RATES.build("fixed", n_clients, rates=list(rates))


def run(
    settings: Settings,
    *,
    resume: bool = False,
    on_round: RoundHook | None = None,
    on_start: Callable[[Path, int], None] | None = None,
    on_encode: Encoded | None = None,
    on_progress: ProgressHook | None = None,
    trackers: Sequence[Tracker] = (),
    load: Callable[[Settings], Pooled] = load_pooled,
) -> Result:
    """Run settings and write their run folder. With ``resume`` an interrupted run of the same settings goes on.

    ``on_encode`` is called with the images done and all of them while an encoder is at work, ``on_progress`` inside a
    round with how far it is. ``trackers`` are
    listeners of the caller's own, beside those that ``run.trackers`` names. ``load`` reads the data set.
    """
    check_trackers(settings.run.trackers)
    if rank():  # every process runs the whole loop; the first one's folder is the result
        settings = changed(settings, {"run.folder": f"{settings.run.folder}/.rank{rank()}", "run.trackers": []})
    torch.set_num_threads(1)  # the number of threads changes floating-point sums; clients run in parallel instead
    folder = choose_folder(settings, resume)
    pooled = load(settings)
    federation, about, encoding = prepare(build_federation(settings, pooled), settings, on_encode)
    module, architecture = build_module(settings, federation, pooled, encoding)
    method = METHODS.build(settings.method.name, **settings.method.options)
    strategy = RATES.build(settings.rates.name, federation.n_clients, **settings.rates.options)
    problem = assemble(federation, module, method, strategy, settings)
    with claimed(settings, folder, resume) as folder:
        return drive(
            problem,
            settings,
            folder,
            about,
            architecture,
            resume=resume,
            on_round=on_round,
            on_start=on_start,
            on_progress=on_progress,
            trackers=trackers,
        )


def drive(
    problem: Problem,
    settings: Settings,
    folder: Path,
    about: About,
    architecture: dict[str, Any],
    *,
    resume: bool = False,
    on_round: RoundHook | None = None,
    on_start: Callable[[Path, int], None] | None = None,
    on_progress: ProgressHook | None = None,
    trackers: Sequence[Tracker] = (),
    amend: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """All rounds of an assembled problem, with history, checkpoints and the run folder; the same on every engine.

    ``amend`` may add to a round's record before it is written.
    """
    every = settings.run.checkpoint_every
    keys = {**result_keys(settings), "encoder": about.encoder.get("digest", "none")}
    history = read_history(folder) if resume else []
    state = load_checkpoint(folder / "checkpoint", problem.model.vector, history, keys) if resume else None
    state = problem.begin() if state is None else problem.restore(state)
    problem.undone = count_undone(history, state.history)
    begin_search(problem, settings, state.round)
    check_decision(settings.decision, about.classes)
    with writing(folder):
        begin_folder(folder, settings, about, titles_of(problem), state.history)
    if on_start is not None:
        on_start(folder, state.round)
    tracked = build_trackers(settings.run.trackers, folder, trackers)
    tracked.on_start(settings.model_dump(), state.round)
    outcome: dict[str, Any] | None = None

    def after(now: State, record: dict[str, Any], seconds: float) -> bool:
        if amend is not None:
            amend(record)
        append_round(folder, now.history, seconds)
        if now.round % every == 0 or now.round == settings.run.rounds or exhausted(now, settings.run):
            save_checkpoint(folder / "checkpoint", problem.capture(now), keys)
        tracked.on_round({**record, "seconds": seconds})
        return on_round is not None and on_round(now, record, seconds) is True

    try:
        state = train_rounds(problem, settings, state, after, on_progress)
        result = conclude(problem, state, about, settings, read_timings(folder))
        result.architecture = architecture
        result.finish_folder(folder)
        outcome = result.outcome()
    finally:
        problem.engine.close()
        tracked.on_end(outcome)
    return result
