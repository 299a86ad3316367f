"""Hyper-parameter search with the same effort for every method, per data set and partition.

Trials are points of a declared grid: learning rate, weight decay, batch size, and one setting of the method's own. All
methods get the same points in what they share; the first is the recipe itself. They race on validation (successive
halving): every trial runs a quarter of the rounds, the better half runs half of them, the better half of these all, and
the best of the last is taken. A race of 16 trials costs twelve whole runs. Every run is a cell, so the search can be
stopped and continued.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedtail.core.halving import halving, lengths
from fedtail.core.random import generator
from fedtail.errors import one_of, writing
from fedtail.methods import METHODS
from fedtail.runs.config import check_config
from fedtail.study.cells import Cell, Outcome
from fedtail.study.compare import validation_score
from fedtail_experiments.paper.grid import layered, slug
from fedtail_experiments.paper.recipes import load_recipes, load_toml

Runner = Callable[[Sequence[Cell]], list[Outcome]]
COMPARED = ("fedavg", "fedprox", "weighted_ce", "ratio_loss", "climb", "fedgrab", "fedcgn", "fedcgnm")
"""Methods searched where none is named: those of the paper's main tables."""
PARTITIONS = ("iid", "dirichlet")
RUNGS, KEEP = 3, 2
"""Rungs of the race, each with twice the rounds of the one before and half of its trials."""
TRIALS = "trials.jsonl"
DEFAULT_ROUNDS = 50


@dataclass(frozen=True)
class Trial:
    """A point of the grid at one rung, and its validation metric over seeds; minus infinity if a run failed."""

    method: str
    settings: dict[str, Any]
    rounds: int
    score: float
    seeds: int = 1
    """How many the score is the mean of."""


@dataclass(frozen=True)
class Found:
    """The best settings of a method on one recipe and partition, their validation metric, and the race."""

    recipe: str
    partition: str
    method: str
    settings: dict[str, Any]
    score: float
    trials: tuple[Trial, ...]

    @property
    def key(self) -> str:
        """How ``tuned.toml`` calls recipe and partition; IID goes without saying."""
        return self.recipe if self.partition == "iid" else f"{self.recipe}/{self.partition}"

    @property
    def seeds(self) -> int:
        """How many seeds every score is the mean of."""
        return self.trials[0].seeds

    @property
    def tried(self) -> int:
        """Points of the grid, each of which ran at least the shortest rung."""
        return sum(t.rounds == min(t.rounds for t in self.trials) for t in self.trials)


def reproduce_search(
    scale: str, seeds: int, only: Sequence[str], run: Callable[[str, Sequence[Cell]], list[Outcome]], **extra: Any
) -> list[Found]:
    """Search the recipes, partitions and methods that ``only`` names; without a recipe Adult, without a partition both,
    without a method those compared.

    ``run`` takes the recipe's name and the cells to run; ``extra`` is for ``race``.
    """
    recipes = [recipe for recipe in load_recipes() if recipe != "smoke"]
    for word in only:
        if word not in METHODS and word not in load_recipes() and word not in PARTITIONS:
            raise one_of("--only", word, [*METHODS, *recipes, *PARTITIONS])
    smoke = scale == "smoke"
    searched = ["smoke"] if smoke else [r for r in recipes if r in only] or ["adult"]
    methods = [m for m in only if m in METHODS] or COMPARED
    found = []
    for recipe in searched:
        for partition in [p for p in PARTITIONS if p in only] or PARTITIONS[: 1 if smoke else 2]:
            shared = {"data.partition": partition, **extra}
            for method in methods:
                trials = race(recipe, method, range(seeds), partial(run, recipe), shared, 4 if smoke else None)
                found.append(found_in(recipe, partition, method, trials))
    return found


def race(
    recipe: str,
    method: str,
    seeds: Sequence[int],
    run: Runner,
    extra: Mapping[str, Any] | None = None,
    n_trials: int | None = None,
) -> list[Trial]:
    """Every trial of a method on one recipe, rung by rung; the last rung has all the rounds.

    ``extra`` are settings that all trials share, on top of the recipe (the partition, the number of clients ...).
    """
    recipes = load_recipes()[recipe].get("set", {})
    space = search_space(method)
    field = draw_trials(recipe, recipes, method, space, n_trials or int(load_toml("search.toml")["trials"]))
    return race_trials(recipe, {**recipes, **(extra or {})}, method, field, seeds, run)


def race_trials(
    name: str,
    base: Mapping[str, Any],
    method: str,
    field: list[dict[str, Any]],
    seeds: Sequence[int],
    run: Runner,
) -> list[Trial]:
    """Successive halving of the points ``field`` on the problem that ``base`` describes; ``name`` is for people."""
    rounds = lengths(int(base.get("run.rounds", DEFAULT_ROUNDS)), RUNGS, KEEP)
    trials: list[Trial] = []

    def play(standing: Sequence[dict[str, Any]], rung: int) -> list[float]:
        length, n = rounds[rung], len(seeds)
        plan = {**base, "run.rounds": length}
        # seed by seed: the data of one are read once
        cells = [cell_of(plan, name, method, s, seed) for seed in seeds for s in standing]
        found = [validation_score(outcome, outcome.cell.config.run.metric) for outcome in run(cells)]
        scores = [sum(found[i :: len(standing)]) / n for i in range(len(standing))]
        trials.extend(Trial(method, s, length, score, n) for s, score in zip(standing, scores, strict=True))
        return scores

    halving(field, rounds, play, keep=KEEP)  # of equals the earlier draw goes on, so the recipe first
    return trials


@dataclass(frozen=True)
class Space:
    """What is searched: what every method has, and settings of the method's own."""

    common: dict[str, list[Any]]
    own: dict[str, list[Any]]


def search_space(method: str, without: Sequence[str] = ()) -> Space:
    """The declared space of a method, where it is the user's own that of its class (``searched``); ``without`` some of
    what methods share."""
    space = load_toml("search.toml")
    own = {f"method.{key}": list(values) for key, values in getattr(METHODS[method], "searched", {}).items()}
    common = {key: values for key, values in space["common"].items() if key not in without}
    return Space(common, space.get("own", {}).get(method, own))


def draw_trials(name: str, base: Mapping[str, Any], method: str, space: Space, n: int) -> list[dict[str, Any]]:
    """n different points. What methods share is drawn from the same generator for all of them, and point 0 is what
    ``base`` says; a method's own setting is drawn beside it, its default first."""
    shared, mine = generator(0, f"search/{name}"), generator(0, f"search/{name}/{method}")
    start = {key: base.get(key, values[len(values) // 2]) for key, values in space.common.items()}
    start |= {key: METHODS.options(method)[key.partition(".")[2]] for key in space.own}
    points: list[dict[str, Any]] = [start]
    taken = {tuple(start[key] for key in space.common)}
    while len(points) < n:
        point = {key: values[int(shared.integers(len(values)))] for key, values in space.common.items()}
        if tuple(point.values()) in taken:
            continue
        taken.add(tuple(point.values()))
        points.append(point | {key: values[int(mine.integers(len(values)))] for key, values in space.own.items()})
    return points


def cell_of(base: Mapping[str, Any], recipe: str, method: str, settings: Mapping[str, Any], seed: int) -> Cell:
    """The run of one trial."""
    config = check_config(layered([base, {"method.name": method}, settings, {"run.seed": seed}]))
    return Cell(slug(f"search-{recipe}-{method}-s{seed}"), config)


def read_trials(path: Path) -> list[Found]:
    """The races of a file that ``write_trials`` wrote; none if there is no file."""
    races: dict[tuple[str, str, str, int], list[Trial]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        told = json.loads(line)
        recipe, partition, trial = told.pop("recipe"), told.pop("partition"), Trial(**told)
        races.setdefault((recipe, partition, trial.method, trial.seeds), []).append(trial)
    return [found_in(*key[:3], trials) for key, trials in races.items()]


def found_in(recipe: str, partition: str, method: str, trials: Sequence[Trial]) -> Found:
    """What a race found: the best of the trials that ran all the rounds."""
    best = max((t for t in trials if t.rounds == max(t.rounds for t in trials)), key=lambda t: t.score)
    return Found(
        recipe=recipe,
        partition=partition,
        method=method,
        settings=best.settings,
        score=best.score,
        trials=tuple(trials),
    )


def write_trials(path: Path, found: Sequence[Found]) -> None:
    """Append every trial of some races, one line each; those that the file has are left alone."""
    there = set(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else set()
    lines = [_line(f, t) for f in found for t in f.trials]
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines if line not in there)


def _line(found: Found, trial: Trial) -> str:
    told = {**asdict(trial), "score": round(trial.score, 5)}
    if trial.seeds == 1:
        del told["seeds"]
    return json.dumps({"recipe": found.recipe, "partition": found.partition, **told})
