"""Where grids are declared: TOML files that ship with the package, and those of the user."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedtail.core.metrics import METRICS
from fedtail.errors import FedtailError, one_of
from fedtail_experiments.paper.grid import Axis, Grid
from fedtail_experiments.paper.recipes import FOLDER, load_toml


def grid_names() -> list[str]:
    """All declared grids."""
    files = (entry.name for entry in (FOLDER / "grids").iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def load_grid(name: str) -> Grid:
    """A declared grid by name, or one of the user's own from a TOML file."""
    if name.endswith(".toml"):
        return _declare(Path(name).stem, _read(Path(name)), name)
    if name not in grid_names():
        raise one_of("experiment", name, grid_names())
    return _declare(name, load_toml(f"grids/{name}.toml"), name)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FedtailError(f"grid file {str(path)!r} does not exist; `fedtail reproduce` lists those that are built in")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedtailError(f"grid file {str(path)!r} is not valid TOML: {error}") from None


class AxisFile(BaseModel):
    """A ``[[block]]``, ``[[column]]`` or ``[[row]]``."""

    model_config = ConfigDict(extra="forbid")
    name: str
    set: dict[str, Any] = {}
    recipe: str | None = None
    only: tuple[str, ...] = ()


class GridFile(BaseModel):
    """The format of a grid's file. Settings are dotted keys (``"local.lr" = 0.1``) or tables (``[base.local]``)."""

    model_config = ConfigDict(extra="forbid")
    title: str | None = None
    kind: Literal["table", "curves", "losses", "threshold", "rates", "alignment", "per-class", "assumption"] = "table"
    metric: str = "macro_f1"
    notes: str = ""
    base: dict[str, Any] = {}
    block: tuple[AxisFile, ...] = (AxisFile(name="all"),)
    column: tuple[AxisFile, ...] = (AxisFile(name="all"),)
    row: tuple[AxisFile, ...] = Field(min_length=1)
    scale: dict[Literal["smoke", "cpu", "full"], dict[str, Any]] = {}
    paper: dict[str, dict[str, list[float]]] = {}


def _declare(name: str, raw: Mapping[str, Any], source: str) -> Grid:
    try:
        file = GridFile.model_validate(raw)
    except ValidationError as error:
        raise _explained(error, source) from None
    if file.metric not in METRICS:
        raise one_of(f"{source}: metric", file.metric, METRICS)
    blocks, columns, rows = (
        tuple(Axis(a.name, _dotted(a.set), a.recipe, a.only) for a in axes)
        for axes in (file.block, file.column, file.row)
    )
    for kind, axes in (("block", blocks), ("column", columns), ("row", rows)):
        names = [a.name for a in axes]
        if twice := [n for n in names if names.count(n) > 1]:
            raise FedtailError(f"{source}: two entries of {kind} are named {twice[0]!r}; names must differ")
    for block, numbers in file.paper.items():
        if block not in {b.name for b in blocks}:
            raise one_of(f"{source}: block of paper", block, [b.name for b in blocks])
        for row, values in numbers.items():
            if row not in {r.name for r in rows}:
                raise one_of(f"{source}: row of paper.{block}", row, [r.name for r in rows])
            if len(values) != len(columns):
                raise FedtailError(
                    f"{source}: paper.{block}.{row} has {len(values)} numbers for {len(columns)} columns"
                )
    return Grid(
        name=name,
        title=file.title or name,
        kind=file.kind,
        metric=file.metric,
        blocks=blocks,
        columns=columns,
        rows=rows,
        base=_dotted(file.base),
        scales={k: {**v, "set": _dotted(v.get("set", {}))} for k, v in file.scale.items()},
        paper=file.paper,
        notes=file.notes,
    )


def _explained(error: ValidationError, source: str) -> FedtailError:
    """Unknown keys first: the field they were meant for is then missing too."""
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    *place, key = map(str, first["loc"])
    if first["type"] == "extra_forbidden":
        fields = AxisFile.model_fields if place else GridFile.model_fields
        return one_of(f"{source}: key" + (f" of {'.'.join(place)}" if place else ""), key, fields)
    return FedtailError(f"{source}: {'.'.join([*place, key])}: {first['msg'][:1].lower()}{first['msg'][1:]}")


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``{"local": {"lr": 0.1}}`` and ``{"local.lr": 0.1}`` are the same settings."""
    out = {}
    for name, value in settings.items():
        table = isinstance(value, Mapping) and "." not in name
        out.update({f"{name}.{key}": v for key, v in value.items()} if table else {name: value})
    return out
