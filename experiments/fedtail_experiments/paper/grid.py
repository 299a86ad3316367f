"""Grids: the paper's tables and figures declared as data (TOML), turned into cells.

A grid has blocks (K = 5, K = 20 ...), columns (data sets) and rows (methods); each adds settings, and each triple under
each seed is one cell. Recipes hold what belongs to a data set: model, local epochs, learning rate, rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedtail.errors import FedtailError, one_of
from fedtail.runs.config import REGISTRIES, changed, check_config, set_key, settled_later
from fedtail.settings import Named, Settings
from fedtail.study.cells import Cell, seeds_of
from fedtail_experiments.paper.recipes import load_recipes, load_tuned

SCALES = ("smoke", "cpu", "full")


@dataclass(frozen=True)
class Axis:
    """One block, column or row: a name and the settings it adds."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    only: tuple[str, ...] = ()
    """Blocks it belongs to; all if empty."""


@dataclass(frozen=True)
class Place:
    """Where a cell stands in its grid."""

    block: str
    column: str
    row: str
    seed: int

    def __str__(self) -> str:
        return f"{self.block}, {self.column}, {self.row}, seed {self.seed}"


@dataclass(frozen=True)
class Grid:
    """A table or figure of the paper."""

    name: str
    title: str
    kind: str
    """How it is drawn: ``table`` or the name of a figure."""
    metric: str
    blocks: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    base: Mapping[str, Any]
    scales: Mapping[str, Mapping[str, Any]]
    paper: Mapping[str, Mapping[str, list[Any]]]
    """block -> row -> the paper's number per column, in the order of ``columns``; nan where it gives none."""
    notes: str = ""

    def reported(self, block: str, row: str, column: str) -> float | None:
        """The paper's number, if it has one."""
        values = self.paper.get(block, {}).get(row)
        if values is None:
            return None
        value = float(values[[c.name for c in self.columns].index(column)])
        return None if value != value else value

    def cells(
        self, scale: str = "cpu", seeds: Iterable[int] = range(3), only: Iterable[str] = (), tuned: bool = False
    ) -> list[tuple[Place, Cell]]:
        """The cells of a scale; ``only`` keeps those whose block, column and row together contain every word."""
        if scale not in SCALES:
            raise one_of("scale", scale, SCALES)
        limits = self.scales.get(scale, {})
        if limits.get("columns") == []:
            raise FedtailError(
                f"{self.name!r} has nothing for scale {scale!r}: its models need a GPU; use --scale full --device cuda "
                "(or --scale smoke for a quick check)"
            )
        best = load_tuned() if tuned else {}
        out = []
        for block, column, row in self._places(limits, tuple(only)):
            layers = self.layers(block, column, row, scale, best)
            label = slug(f"{block.name}-{column.name}-{row.name}")
            for cell in seeds_of(check_config(layered(layers.values())), label, map(int, seeds)):
                out.append((Place(block.name, column.name, row.name, cell.config.run.seed), cell))
        if not out:
            raise FedtailError(
                f"no cell of {self.name!r} matches scale {scale!r} with --only {' '.join(only) or '(all)'}; "
                f"columns: {', '.join(c.name for c in self.columns)}"
            )
        return out

    def layers(
        self, block: Axis, column: Axis, row: Axis, scale: str, best: Mapping[str, Any]
    ) -> dict[str, Mapping[str, Any]]:
        """The settings of one cell by where they come from; each layer overrides those before it."""
        declared = column.recipe or block.recipe or ""
        name = "smoke" if declared and scale == "smoke" else declared
        recipe = self._recipe(name)
        kept = _without_data if name != declared else dict
        lower: dict[str, Mapping[str, Any]] = {
            "recipe": recipe.get("set", {}),
            "base": self.base,
            "column": kept(column.settings),
            "block": kept(block.settings),
        }
        return {
            **lower,
            "recipe for this many clients": recipe.get("clients", {}).get(_clients(lower.values()), {}),
            "row": row.settings,
            "scale": self.scales.get(scale, {}).get("set", {}),
            "tuned": self._tuned(_searched(best, name, lower.values()), row),
        }

    def _recipe(self, name: str) -> Mapping[str, Any]:
        recipes = {"": {}, **load_recipes()}
        if name not in recipes:
            raise one_of(f"recipe of {self.name!r}", name, load_recipes())
        return recipes[name]

    def _tuned(self, best: Mapping[str, Any], row: Axis) -> dict[str, Any]:
        """What a search found best for the row's method, except where the row is about that very setting."""
        method = row.settings.get("method.name", self.base.get("method.name", "fedcgnm"))
        return {key: value for key, value in best.get(method, {}).items() if key not in row.settings}

    def _places(self, limits: Mapping[str, Any], only: tuple[str, ...]) -> list[tuple[Axis, Axis, Axis]]:
        """(block, column, row) of every cell within the limits of a scale and the words of ``only``."""
        blocks, columns, rows = (
            [axis for axis in axes if axis.name in limits.get(kind, [axis.name])]
            for kind, axes in (("blocks", self.blocks), ("columns", self.columns), ("rows", self.rows))
        )
        return [
            (block, column, row)
            for block, column, row in itertools.product(blocks, columns, rows)
            if all(not axis.only or block.name in axis.only for axis in (row, column))
            and all(word.lower() in f"{block.name} {column.name} {row.name}".lower() for word in only)
        ]


def with_overrides(cells: Sequence[tuple[Place, Cell]], values: Mapping[str, Any]) -> list[tuple[Place, Cell]]:
    """The same places with other settings, each where it means something: ``rates.rate`` leaves FedHOO's cells alone.

    What tells the cells of a grid apart cannot be set, since they would become one.
    """
    if "run.seed" in values:
        raise FedtailError("run.seed varies within a cell and cannot be set; use --seeds for the number of seeds")
    for key in values:
        if not any(takes(cell.config, key) for _, cell in cells):
            allowed = {name for _, cell in cells for name in options_of(cell.config, key.partition(".")[0])}
            raise one_of("override", key, sorted(allowed))
    out = []
    for place, cell in cells:
        mine = {key: value for key, value in values.items() if takes(cell.config, key)}
        out.append((place, Cell(cell.label, changed(cell.config, mine))))
    owner: dict[str, tuple[Place, str]] = {}
    for (place, before), (_, after) in zip(cells, out, strict=True):
        other, was = owner.setdefault(after.digest, (place, before.digest))
        if was != before.digest:
            raise FedtailError(
                f"{' '.join(values)} cannot be set: two cells would be the same run ({other}; {place}); "
                "set only what this grid does not vary"
            )
    return out


def takes(config: Settings, key: str) -> bool:
    """Whether a dotted key means anything to what a config names: ``rates.rate`` does to uniform, not to FedHOO."""
    section = key.partition(".")[0]
    part = getattr(config, section, None)
    if not isinstance(part, Named) or settled_later(section, part.name) or part.name not in REGISTRIES[section]:
        return True  # nothing is chosen there yet; the key is checked when it is set, or when the model is built
    return key in options_of(config, section)


def options_of(config: Settings, section: str) -> list[str]:
    """The dotted keys of a section that names a registered entry: its own and that entry's options."""
    part = getattr(config, section)
    own = REGISTRIES[section].options(part.name) if part.name in REGISTRIES[section] else {}
    return [f"{section}.{name}" for name in (*type(part).model_fields, *own)]


def layered(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Nested dictionaries from layers of dotted keys, later ones on top."""
    raw: dict[str, Any] = {}
    for layer in layers:
        for key in sorted(layer, key=lambda k: not k.endswith(".name")):  # names first: they clear options
            set_key(raw, key, layer[key])
    return raw


def slug(text: str) -> str:
    """A folder name from a label."""
    return "".join(ch if ch.isalnum() or ch in ".-" else "-" for ch in text.replace(" ", "")).lower()


def _clients(layers: Iterable[Mapping[str, Any]]) -> str:
    """How many clients these layers ask for, as recipes write it."""
    return str({key: value for layer in layers for key, value in layer.items()}.get("data.clients", 5))


def _searched(best: Mapping[str, Any], recipe: str, layers: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What was found best on a recipe with the partition that these layers ask for, or else with IID clients."""
    partition = {key: value for layer in layers for key, value in layer.items()}.get("data.partition", "iid")
    return {**best.get(recipe, {}), **best.get(f"{recipe}/{partition}", {})}


def _without_data(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that still make sense when a small stand-in replaces the data set they were written for."""
    kept = ("data.clients", "data.partition", "data.alpha")
    return {k: v for k, v in settings.items() if not k.startswith("data.") or k in kept}
