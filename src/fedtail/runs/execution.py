"""Play a run: its rounds and what they leave, in memory (``fit``) or in a run folder (``run``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedtail.boosting.loop import run_rounds
from fedtail.data.federation import Federation
from fedtail.data.images.features import Progress as Encoded
from fedtail.data.registry import Pooled
from fedtail.errors import FedtailError, writing
from fedtail.methods import METHODS, Method
from fedtail.rates import RateStrategy
from fedtail.rounds.checkpoint import load_checkpoint, save_checkpoint
from fedtail.rounds.loop import RoundHook
from fedtail.rounds.privacy import count_undone
from fedtail.rounds.progress import ProgressHook
from fedtail.rounds.search import begin_search
from fedtail.rounds.state import State
from fedtail.rounds.validation import exhausted
from fedtail.runs.build import Run, build, build_federation, load_pooled
from fedtail.runs.config import check_fixed, result_keys, suggestions
from fedtail.runs.decide import check_decision
from fedtail.runs.folder import append_round, begin_folder, choose_folder, claimed
from fedtail.runs.record import read_history, read_timings
from fedtail.runs.result import Result, conclude, titles_of
from fedtail.settings import (
    KEYWORDS,
    WHOLE_SECTIONS,
    DataSettings,
    MethodSettings,
    RatesSettings,
    Settings,
    check_effects,
    flatten,
)

ON_DISK = ("name", "folder", "checkpoint_every")
"""Settings of a run that is written as it goes."""


def fit(
    federation: Federation,
    model: nn.Module | str | None = None,
    method: Method | str | None = None,
    rates: RateStrategy | str | float | Sequence[float] | None = None,
    *,
    sites: Any = None,
    on_round: RoundHook | Sequence[RoundHook] | None = None,
    on_progress: ProgressHook | None = None,
    **settings: Any,
) -> Result:
    """Train a federation and return the model and its results, without writing to disk.

    ``fit(X, y, sites=s)`` is short for ``fit(Federation.from_rows(X, y, s))``.

    Args:
        federation: see ``fedtail.partition``, ``Federation.from_rows``, ``from_tables``, ``from_images`` and
            ``from_arrays``.
        model: an ``nn.Module`` that maps a batch of inputs to logits, trained in place, or a name; defaults to
            the data's own, which is ``mlp`` for arrays, and to the ``head`` with an encoder. With an encoder, the
            model takes its features.
        method: a ``Method`` or its name; defaults to ``trees`` for your own tables, if nothing else is said that only
            networks have, and otherwise to ``fedcgnm``.
        rates: 0.6 for all clients unless said otherwise: a strategy (a new one for every run, since a search has
            state), its name, one rate for all clients, or one rate per client.
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
    if not isinstance(federation, Federation):
        if model is None or isinstance(model, nn.Module | str):
            raise FedtailError(
                f"fit() got a {type(federation).__name__}, not a Federation; pass fit(X, y, sites=...), or build one "
                "with Federation.from_rows, from_tables, from_images or from_arrays"
            )
        federation, model = Federation.from_rows(federation, model, sites), None
    elif sites is not None:
        raise FedtailError("sites go with rows, fit(X, y, sites=...); a federation has its own")
    if not isinstance(model, nn.Module | str | None):
        raise FedtailError(f"model = {model!r} is neither an nn.Module nor a name such as 'mlp'")
    if not isinstance(method, Method | str | None):
        raise FedtailError(f"method = {method!r} is neither a Method, such as FedProx(mu=0.1), nor a name")
    own = isinstance(model, nn.Module)
    chosen = Settings.of(**settings).replaced({"model.name": OWN_MODULE if own else model or "auto"})
    chosen = chosen.model_copy(
        update={
            "data": DataSettings(name=federation.name, clients=federation.n_clients),
            "method": _method_section(method),
            "rates": _rates_section(rates),
        }
    )
    given = said_keys(settings)
    if federation.own:
        beside = {"model.name", "model.channels"} if model is not None else set()
        beside |= {"method.name"} if method is not None else set()
        validates = any(len(rows) for rows in federation.validation)
        suggested = suggestions(federation.own, chosen, given | beside, validates=validates)
        chosen = chosen.replaced({key: value for key, value in suggested.items() if not key.startswith("data.")})
    check_fixed(chosen, {key: value for key, value in flatten(chosen.model_dump()).items() if key in given})
    chosen = chosen.replaced(METHODS[chosen.method.name].fixed)
    check_effects(chosen, given)
    made = build(
        chosen,
        federation,
        module=model if isinstance(model, nn.Module) else None,
        method=method if isinstance(method, Method) else None,
        rates=rates if isinstance(rates, RateStrategy) else None,
    )
    if own:  # what a name cannot say
        made = replace(made, settings=made.settings.replaced({"model.name": "auto"}))
    return play(made, on_round=on_round, on_progress=on_progress)


OWN_MODULE = "own:module"
"""Stands for the name of a model that the caller passes as a module."""


def said_keys(keywords: Mapping[str, Any]) -> set[str]:
    """The dotted keys of settings given to ``fit``."""
    keys = {f"{KEYWORDS[name]}.{name}" for name in keywords if name in KEYWORDS}
    for section in set(WHOLE_SECTIONS) & keywords.keys():
        value = keywords[section]
        keys |= {f"{section}.{name}" for name in (value if isinstance(value, Mapping) else value.model_fields_set)}
    return keys


def _method_section(method: Method | str | None) -> MethodSettings:
    """The section ``method`` of what ``fit`` was given."""
    if isinstance(method, Method):
        return MethodSettings(name=method.name, **method.config())
    return MethodSettings() if method is None else MethodSettings(name=METHODS.canonical(method))


def _rates_section(rates: RateStrategy | str | float | Sequence[float] | None) -> RatesSettings:
    """The section ``rates`` of what ``fit`` was given."""
    if rates is None:
        return RatesSettings()
    if isinstance(rates, RateStrategy):
        return RatesSettings(name=rates.name, **({} if rates.searches == "rate" else {"searches": rates.searches}))
    if isinstance(rates, str):
        return RatesSettings(name=rates)
    if isinstance(rates, (int, float)):
        return RatesSettings(name="uniform", rate=rates)
    return RatesSettings(name="fixed", rates=[float(rate) for rate in rates])


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


def run(
    settings: Settings,
    *,
    resume: bool = False,
    search_only: bool = False,
    on_round: RoundHook | Sequence[RoundHook] | None = None,
    on_start: Callable[[Path, int], None] | None = None,
    on_encode: Encoded | None = None,
    on_progress: ProgressHook | None = None,
    load: Callable[[Settings], Pooled] = load_pooled,
) -> Result:
    """Run settings and write their run folder. With ``resume`` an interrupted run of the same settings goes on.

    Args:
        search_only: end the run when the rate search does.
        on_round: one or several, called after every round with the state, the round's record and its seconds.
        on_start: called before the first round with the run's folder and the rounds that were done before.
        on_encode: called with the images done and all of them while an encoder is at work.
        on_progress: called inside a round with how far it is.
        load: reads the data set.
    """
    torch.set_num_threads(1)  # the number of threads changes floating-point sums; clients run in parallel instead
    folder = choose_folder(settings, resume)
    made = build(settings, build_federation(settings, load(settings)), progress=on_encode)
    made.problem.search_only = search_only
    with claimed(settings, folder, resume) as folder:
        return play(made, folder, resume=resume, on_round=on_round, on_start=on_start, on_progress=on_progress)


def play(
    made: Run,
    folder: Path | None = None,
    *,
    resume: bool = False,
    on_round: RoundHook | Sequence[RoundHook] | None = None,
    on_start: Callable[[Path, int], None] | None = None,
    on_progress: ProgressHook | None = None,
    amend: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """All rounds of a run, on any engine; with a ``folder`` also its history, checkpoints and results.

    ``amend`` may add to a round's record before it is written.
    """
    problem, settings, about = made.problem, made.settings, made.about
    hooks = [on_round] if callable(on_round) else list(on_round or ())
    seconds: list[float] = []
    try:
        history: list[dict[str, Any]] = []
        saved, depends = None, {**result_keys(settings), "encoder": about.encoder.get("digest", "none")}
        if folder is not None and resume:
            history = read_history(folder)
            saved = load_checkpoint(folder / "checkpoint", problem.model.vector, history, depends)
        state = problem.begin() if saved is None else problem.restore(saved)
        problem.undone = count_undone(history, state.history)
        begin_search(problem, settings, state.round)
        check_decision(settings.decision, about.classes)
        if folder is not None:
            with writing(folder):
                begin_folder(folder, settings, about, titles_of(problem), state.history)
            seconds = read_timings(folder)
            if on_start is not None:
                on_start(folder, state.round)

        def after(now: State, record: dict[str, Any], took: float) -> bool:
            seconds.append(took)
            if amend is not None:
                amend(record)
            if folder is not None:
                append_round(folder, now.history, took)
                last = now.round == settings.run.rounds or exhausted(now, settings.run)
                if last or now.round % settings.run.checkpoint_every == 0:
                    save_checkpoint(folder / "checkpoint", problem.capture(now), depends)
            return True in [hook(now, record, took) for hook in hooks]  # all of them are called

        state = run_rounds(problem, settings, state, after, on_progress)
        result = conclude(problem, state, about, settings, seconds)
        result.architecture = made.architecture
        if folder is not None:
            result.finish_folder(folder)
        return result
    finally:
        problem.engine.close()
