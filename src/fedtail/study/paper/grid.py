"""Grids: the paper's tables and figures declared as data (TOML), turned into cells.

A grid has blocks (K = 5, K = 20 ...), columns (data sets) and rows (methods); each adds settings, and each triple under
each seed is one cell. Recipes hold what belongs to a data set: model, local epochs, learning rate, rounds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from fedtail.errors import FedtailError, one_of
from fedtail.runs.config import changed, check_config, layered, options_of, takes
from fedtail.study.cells import Cell, seeds_of

SCALES = ("smoke", "cpu", "full")
PACKAGE = __package__


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
        """The cells of a scale. ``only`` keeps columns, rows or blocks whose name contains one of the words."""
        if scale not in SCALES:
            raise one_of("scale", scale, SCALES)
        limits = self.scales.get(scale, {})
        if limits.get("columns") == []:
            raise FedtailError(
                f"{self.name!r} has nothing for scale {scale!r}: its models need a GPU; use --scale full --device cuda "
                "(or --scale smoke to see that it works)"
            )
        recipes = load_recipes()
        best = load_tuned() if tuned else {}
        out = []
        for block, column, row in self._places(limits, tuple(only)):
            recipe = column.recipe or block.recipe
            if recipe is not None and scale == "smoke":
                recipe = "smoke"
            layers: list[Mapping[str, Any]] = [{**self.base}]
            if recipe is not None:
                if recipe not in recipes:
                    raise one_of(f"recipe of {self.name!r}", recipe, recipes)
                layers = [recipes[recipe].get("set", {}), *layers]
            own = "data.name" not in recipes.get(recipe or "", {}).get("set", {}) or recipe in (
                column.recipe,
                block.recipe,
            )
            layers += [settings if own else _without_data(settings) for settings in (column.settings, block.settings)]
            clients = str({k: v for layer in layers for k, v in layer.items()}.get("data.clients", 5))
            if recipe is not None:
                layers.append(recipes[recipe].get("clients", {}).get(clients, {}))
            layers.append(row.settings)
            layers.append(limits.get("set", {}))
            if recipe is not None:
                method = str(row.settings.get("method.name", self.base.get("method.name", "fedcgnm")))
                found = best.get(recipe, {}).get(method, {})
                layers.append({key: value for key, value in found.items() if key not in row.settings})
            label = slug(f"{block.name}-{column.name}-{row.name}")
            for cell in seeds_of(check_config(layered(layers)), label, map(int, seeds)):
                out.append((Place(block.name, column.name, row.name, cell.config.run.seed), cell))
        if not out:
            raise FedtailError(
                f"nothing of {self.name!r} is left at scale {scale!r} with --only {' '.join(only) or '(all)'}; "
                f"columns: {', '.join(c.name for c in self.columns)}"
            )
        return out

    def _places(self, limits: Mapping[str, Any], only: tuple[str, ...]) -> list[tuple[Axis, Axis, Axis]]:
        columns = [c for c in self.columns if c.name in limits.get("columns", [c.name])]
        rows = [r for r in self.rows if r.name in limits.get("rows", [r.name])]
        blocks = [b for b in self.blocks if b.name in limits.get("blocks", [b.name])]
        found = []
        for block in blocks:
            for column in columns:
                for row in rows:
                    if any(axis.only and block.name not in axis.only for axis in (row, column)):
                        continue
                    text = f"{block.name} {column.name} {row.name}".lower()
                    if all(word.lower() in text for word in only):
                        found.append((block, column, row))
        return found


def with_overrides(cells: Sequence[tuple[Place, Cell]], values: Mapping[str, Any]) -> list[tuple[Place, Cell]]:
    """The same places with other settings, each where it means something: ``rates.rate`` leaves FedHOO's cells alone.

    What tells the cells of a grid apart cannot be set, since they would become one.
    """
    if "run.seed" in values:
        raise FedtailError("run.seed is what the seeds of a cell differ in; --seeds says how many there are")
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
                "set what this grid does not vary"
            )
    return out


def load_recipes() -> dict[str, Any]:
    """Recipes by data set."""
    return load_toml("recipes.toml")


def load_tuned() -> dict[str, Any]:
    """recipe -> method -> the settings that a recorded search found best on validation."""
    return load_toml("tuned.toml")


def slug(text: str) -> str:
    """A folder name from a label."""
    return "".join(ch if ch.isalnum() or ch in ".-" else "-" for ch in text.replace(" ", "")).lower()


def _without_data(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those of a data set that a scale replaced by another."""
    kept = ("data.clients", "data.partition", "data.alpha")
    return {k: v for k, v in settings.items() if not k.startswith("data.") or k in kept}


def load_toml(path: str) -> dict[str, Any]:
    """A declaration that ships with the package."""
    return tomllib.loads((files(PACKAGE) / path).read_text(encoding="utf-8"))
