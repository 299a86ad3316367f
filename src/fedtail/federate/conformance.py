"""What every method must do, on every engine: for methods of the user's own, before they are trusted.

A small federation with a site that lacks classes and one with a handful of samples is trained on the simulator's paths
and over an in-process transport, through the messages that real sites get.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedtail.data.federation import Federation
from fedtail.federate.engine import RemoteEngine, Unmeasured
from fedtail.federate.protocol.job import job_of
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import InProcess
from fedtail.federate.site.prepared import FederationSlice
from fedtail.federate.site.site import Site
from fedtail.methods import Method
from fedtail.methods.optimizers import OPTIMIZERS, with_optimizer
from fedtail.models import build_model
from fedtail.rates import RATES
from fedtail.registry import in_words, is_own
from fedtail.rounds.checkpoint import load_checkpoint, save_checkpoint
from fedtail.rounds.loop import train_rounds
from fedtail.rounds.state import Problem, State
from fedtail.runs.build import assemble
from fedtail.settings import MethodSettings, ModelSettings, Settings
from fedtail.simulate.workers import one_thread

COUNTS = ((60, 20, 8), (40, 0, 6), (30, 12, 0), (5, 2, 1))
"""Samples per site and class."""
ROUNDS, CLOSE = 4, 2e-3
HIDDEN: dict[str, Any] = {"hidden": (12,)}


@dataclass(frozen=True)
class Check:
    """One requirement and what came of it; ``problem`` is empty where the method meets it."""

    claim: str
    problem: str = ""


def small_federation() -> Federation:
    """Four sites, three classes of Gaussian blobs, and a few auxiliary samples."""
    rng = np.random.default_rng(0)
    centres = rng.normal(0, 2, (len(COUNTS[0]), 6))

    def draw(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        y = np.repeat(np.arange(len(counts)), counts)
        return (centres[y] + rng.normal(0, 1, (len(y), 6))).astype(np.float32), y

    return Federation.from_arrays(
        [draw(c) for c in COUNTS], draw((40, 40, 40)), classes=["a", "b", "c"], validation=0.2, auxiliary=2
    )


def check_method(method: Method) -> Iterator[Check]:
    """Every requirement in turn, as it is tried; with one thread, like a run and a site: their number changes sums."""
    federation = small_federation()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, one_thread():
        warnings.simplefilter("ignore")
        tests: dict[str, Callable[[], str]] = {
            "three rounds stay finite and the loss falls": lambda: _learns(method, federation),
            "the same seed gives the same bits, with any number of workers": lambda: _repeats(method, federation),
            "a run resumed halfway ends with the same bits": lambda: _resumes(method, federation, Path(folder)),
            "the batched path agrees with the reference path": lambda: _agrees(method, federation, "batched"),
            "the graph path agrees with the reference path": lambda: _agrees(method, federation, "graph"),
            "it works with the joint rate search": lambda: _searches(method, federation),
            "real sites give the simulator's bits": lambda: _federates(method, federation, Path(folder)),
            "it works with client optimizers on every engine": lambda: _optimizes(method, federation, Path(folder)),
        }
        yield from (_tried(claim, test) for claim, test in tests.items())


def _tried(claim: str, test: Callable[[], str]) -> Check:
    try:
        return Check(claim, test())
    except Exception as error:  # code of the user's: whatever it raises is the finding
        return Check(claim, in_words(error))


def _settings(method: Method, path: str, workers: int = 1) -> Settings:
    return Settings.of(
        rounds=ROUNDS,
        optimizer=method.traits.optimizer,
        lr=0.005 if method.traits.optimizer == "adam" else 0.05,
        schedule="constant",
        batch_size=16,
        seed=5,
        path=path,
        workers=workers,
    )


def _problem(method: Method, federation: Federation, settings: Settings, rates: str = "uniform") -> Problem:
    module = build_model("mlp", federation.input_shape, federation.n_classes, seed=3, **HIDDEN)
    options = {"cold_rounds": 1} if rates == "fedhoo" else {}
    return assemble(federation, module, method, RATES.build(rates, federation.n_clients, **options), settings)


def _train(
    method: Method, federation: Federation, path: str = "reference", workers: int = 1, rates: str = "uniform"
) -> State:
    settings = _settings(method, path, workers)
    problem = _problem(method, federation, settings, rates)
    return train_rounds(problem, settings, problem.begin())


def _learns(method: Method, federation: Federation) -> str:
    state = _train(method, federation)
    if not bool(torch.isfinite(state.x).all()):
        return "the model is not finite"
    json.dumps(state.history)
    first, last = state.history[0]["train_loss"], state.history[-1]["train_loss"]
    return "" if last < first else f"the training loss went from {first:.4g} to {last:.4g}"


def _repeats(method: Method, federation: Federation) -> str:
    settings = _settings(method, "reference")
    problem = _problem(method, federation, settings)
    with Draws() as draws:
        first = train_rounds(problem, settings, problem.begin()).x
    if draws.found:  # it is seeded for each client's dropout, so one thread repeats it, and several by luck
        return f"it draws from torch's global generator ({draws.found}); draw numbers from core.random.generator only"
    same = all(torch.equal(first, _train(method, federation, workers=n).x) for n in (1, 2))
    return "" if same else "two runs with the same seed differ; draw numbers from core.random.generator only"


class Draws(TorchDispatchMode):
    """Notices operations of this thread that draw random numbers without a generator of their own."""

    found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("generator") is None:
            self.found = str(func)
        return func(*args, **given)


def _resumes(method: Method, federation: Federation, folder: Path) -> str:
    settings, expected = _settings(method, "reference"), _train(method, federation)
    first = _problem(method, federation, settings)

    def keep(state: State, record: dict[str, object], seconds: float) -> None:
        if state.round == ROUNDS // 2:
            save_checkpoint(folder, first.capture(state))

    history = train_rounds(first, settings, first.begin(), keep).history
    second = _problem(method, federation, settings)
    state = load_checkpoint(folder, second.model.vector, history[: ROUNDS // 2])
    assert state is not None
    resumed = train_rounds(second, settings, second.restore(state))
    same = torch.equal(resumed.x, expected.x)
    return "" if same else "it differs; all state must be returned by init_server, start and finish"


def _agrees(method: Method, federation: Federation, path: str) -> str:
    expected, found = _train(method, federation).x, _train(method, federation, path).x
    distance = float((found - expected).norm() / expected.norm())
    return "" if distance < CLOSE else f"the models differ by {distance:.2g} of their norm (allowed: {CLOSE:g})"


def _searches(method: Method, federation: Federation) -> str:
    x = _train(method, federation, rates="fedhoo").x
    return "" if bool(torch.isfinite(x).all()) else "the model is not finite"


def _federates(method: Method, federation: Federation, folder: Path) -> str:
    if method.traits.needs_auxiliary:
        return ""  # refused there in one line: a real server has no auxiliary set
    settings = _settings(method, "reference")
    named = {
        "method": MethodSettings(name=method.name, **method.config()),
        "model": ModelSettings(name="mlp", **HIDDEN),
    }
    schema = FederationSlice(federation, 0).schema()
    job = job_of(settings.model_copy(update=named), schema, "check", "in-process")
    policy = Policy(code=(method.name,) if is_own(method.name) else ())
    sites = {}
    for k in range(federation.n_clients):
        (home := folder / f"site {k}").mkdir(parents=True)
        sites[k] = Site(home.name, FederationSlice(federation, k), policy, home).handle
    held = [len(federation.client(k).validation) for k in range(federation.n_clients)]
    engine = RemoteEngine(InProcess(sites), job, federation.sizes, held, test=federation.test)
    module = job.build_model(seed=3)
    engine.model.load(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))
    rates = RATES.build("uniform", federation.n_clients)
    problem = Problem(engine=engine, method=method, rates=rates, n_classes=federation.n_classes)
    try:
        found = train_rounds(problem, settings, problem.begin()).x
    except Unmeasured:
        return ""  # refused there, too
    same = torch.equal(found, _train(method, federation).x)
    return "" if same else "sites compute a different model from the simulator's"


def _optimizes(method: Method, federation: Federation, folder: Path) -> str:
    """The same of the method with each of them; it may refuse all by saying why its steps must be plain."""
    if method.traits.plain_steps or method.traits.optimizer != "sgd":
        return ""
    for name in OPTIMIZERS:
        made = with_optimizer(method, name)
        found = (
            _learns(made, federation)
            or _resumes(made, federation, folder / name)
            or _agrees(made, federation, "batched")
            or _agrees(made, federation, "graph")
            or _federates(made, federation, folder / name)
        )
        if found:
            return f"with local.optimizer = {name!r}: {found}; set plain_steps if its steps must be plain"
    return ""
