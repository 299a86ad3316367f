"""Hyper-parameter search as the paper does it: on validation, over one declared space shared by all methods.

Coordinates are searched one after another (learning rate, weight decay, batch size, then a method's own), each with
the earlier choices fixed; a full product would be thirty times the runs for the same ranges. Every trial is a cell, so
the search can be stopped and continued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedtail.errors import one_of
from fedtail.methods import METHODS
from fedtail.runs.config import check_config, layered
from fedtail.study.cells import Cell, Outcome
from fedtail.study.compare import validation_score
from fedtail.study.paper.grid import slug
from fedtail.study.paper.recipes import load_recipes, load_toml

Runner = Callable[[Sequence[Cell]], list[Outcome]]
COMPARED = ("fedavg", "fedprox", "weighted_ce", "ratio_loss", "climb", "fedgrab", "fedcgn", "fedcgnm")
"""Methods searched where none is named: those of the paper's main tables."""


@dataclass(frozen=True)
class Trial:
    """One value of one setting, and its validation metric averaged over seeds; minus infinity if a run failed."""

    method: str
    key: str
    value: Any
    score: float


@dataclass(frozen=True)
class Found:
    """The best settings of a method on one recipe, and their validation metric."""

    recipe: str
    method: str
    settings: dict[str, Any]
    score: float


def reproduce_search(
    scale: str, seeds: int, only: Sequence[str], run: Callable[[str, Sequence[Cell]], list[Outcome]], **extra: Any
) -> list[Found]:
    """Search the recipes and methods that ``only`` names; without a recipe Adult, without a method those compared.

    ``run`` takes the recipe's name and the cells to run; ``extra`` is for ``search``.
    """
    recipes = [recipe for recipe in load_recipes() if recipe != "smoke"]
    for word in only:
        if word not in METHODS and word not in load_recipes():
            raise one_of("--only", word, [*METHODS, *recipes])
    searched = ["smoke"] if scale == "smoke" else [r for r in recipes if r in only] or ["adult"]
    methods = [m for m in only if m in METHODS] or COMPARED
    found = []
    for recipe in searched:
        best, trials = search(recipe, methods, range(seeds), partial(run, recipe), {"data.partition": "iid", **extra})
        for method, settings in best.items():
            scores = [t.score for t in trials if t.method == method and settings.get(t.key) == t.value]
            found.append(Found(recipe, method, settings, scores[-1]))
    return found


def search(
    recipe: str, methods: Sequence[str], seeds: Sequence[int], run: Runner, extra: Mapping[str, Any] | None = None
) -> tuple[dict[str, dict[str, Any]], list[Trial]]:
    """Best settings per method of one recipe, and every trial.

    ``extra`` are settings that all trials share, on top of the recipe (the partition, the number of clients ...).
    """
    space = load_toml("search.toml")
    base = {**load_recipes()[recipe].get("set", {}), **(extra or {})}
    best: dict[str, dict[str, Any]] = {}
    trials: list[Trial] = []
    for method in methods:
        chosen: dict[str, Any] = {}
        for key, values in {**space["order"], **space.get("own", {}).get(method, {})}.items():
            cells = [cell_of(base, recipe, method, {**chosen, key: value}, seed) for value in values for seed in seeds]
            scores = [validation_score(outcome, outcome.cell.config.run.metric) for outcome in run(cells)]
            means = [sum(scores[i * len(seeds) : (i + 1) * len(seeds)]) / len(seeds) for i in range(len(values))]
            trials += [Trial(method, key, v, m) for v, m in zip(values, means, strict=True)]
            chosen[key] = values[max(range(len(values)), key=lambda i: means[i])]
        best[method] = chosen
    return best, trials


def cell_of(base: Mapping[str, Any], recipe: str, method: str, settings: Mapping[str, Any], seed: int) -> Cell:
    """The run of one trial."""
    config = check_config(layered([base, {"method.name": method}, settings, {"run.seed": seed}]))
    return Cell(slug(f"search-{recipe}-{method}-s{seed}"), config)
