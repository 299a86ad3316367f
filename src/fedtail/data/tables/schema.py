"""The schema of a table: its columns, their levels and scaling. JSON or TOML, so that sites can agree on one.

A *declared* schema has kinds and levels; a *fitted* one has means and deviations too and is all that is needed to
turn raw rows into model input, at a site or in prediction.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args

import tomli_w
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from fedtail.errors import FedtailError, one_of

Kind = Literal["numeric", "category", "hashed"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FORMAT, CLIP = 1, 10.0
RULES = ConfigDict(extra="forbid", allow_inf_nan=False)
Names = tuple[Annotated[str, BeforeValidator(str)], ...]


@dataclass(frozen=True, config=RULES)
class Column:
    """One input column and the features it becomes."""

    name: Annotated[str, Field(min_length=1)]
    kind: Kind
    levels: Names = ()
    """``category``: one feature per level, in this order; a level not listed is all zeros."""
    buckets: int = 0
    """``hashed``: number of features that the levels are hashed into."""
    missing: bool = False
    """One more feature says that the value is missing."""
    mean: float | None = None
    std: Annotated[float, Field(gt=0)] | None = None
    """``numeric``: scaling; None until it is fitted."""
    comma: bool = False
    """``numeric``: written with a decimal comma."""
    cuts: tuple[float, ...] = ()
    """``numeric``: where its piecewise-linear encoding bends, one more feature from 0 to 1 between each two."""
    marks: tuple[float, ...] = ()
    """``numeric``: values that mean "missing", such as 999."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind == "category" and (not self.levels or len(set(self.levels)) < len(self.levels)):
            raise ValueError("a category needs 'levels', all different")
        if self.kind == "hashed" and self.buckets < 2:
            raise ValueError(f"a hashed column needs 'buckets' of 2 or more, got {self.buckets!r}")
        if len(self.cuts) == 1 or any(a >= b for a, b in pairwise(self.cuts)):
            raise ValueError("cuts must be two or more increasing numbers")
        return self

    @property
    def width(self) -> int:
        own = {"numeric": 1 + self.pieces, "category": len(self.levels), "hashed": self.buckets}[self.kind]
        return own + self.missing

    @property
    def pieces(self) -> int:
        return max(len(self.cuts) - 1, 0)

    def features(self) -> list[str]:
        """Names of the features, in order."""
        own = {
            "numeric": [self.name, *(f"{self.name} {a:g} to {b:g}" for a, b in pairwise(self.cuts))],
            "category": [f"{self.name} = {v}" for v in self.levels],
            "hashed": [f"{self.name} # {b}" for b in range(self.buckets)],
        }[self.kind]
        return own + [f"{self.name} missing"] * self.missing


@dataclass(frozen=True, config=RULES)
class TableSchema:
    """What a table holds and how it becomes features."""

    label: Annotated[str, Field(min_length=1)]
    classes: Names
    columns: Annotated[tuple[Column, ...], Field(min_length=1)]
    site: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    """Columns not used, and why: ``date``, ``text``, ``id``, ``constant``, ``empty``, ``excluded``."""
    clip: Annotated[float, Field(gt=0)] | None = CLIP
    """Standardized numbers are limited to +- this many deviations; None for no limit."""
    pieces: Annotated[int, Field(ge=0)] | None = None
    """Pieces between the cuts of a numeric column, 0 for none; None leaves it to the number of columns."""
    strict: bool = False
    """A table that others published: what is no number, or outside the levels, is an error."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise ValueError("'classes' must list two or more different class names")
        names = [c.name for c in self.columns]
        if len(set(names)) < len(names):
            raise ValueError(f"column {max(names, key=names.count)!r} is listed twice")
        if taken := {self.label, self.site} & set(names):
            raise ValueError(f"{taken.pop()!r} cannot be an input column, it is the label or the site")
        return self

    @property
    def width(self) -> int:
        return sum(c.width for c in self.columns)

    @property
    def fitted(self) -> bool:
        return all(c.mean is not None for c in self.columns if c.kind == "numeric")

    @property
    def numeric(self) -> tuple[Column, ...]:
        return tuple(c for c in self.columns if c.kind == "numeric")

    def with_numeric(self, columns: Iterable[Column]) -> TableSchema:
        """The schema with other numeric columns, in their order."""
        given = iter(columns)
        return replace(self, columns=tuple(next(given) if c.kind == "numeric" else c for c in self.columns))

    def features(self) -> list[str]:
        return [name for c in self.columns for name in c.features()]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; nothing that is at its default but the clip, whose absence means no limit where
        ``strict``."""
        out = {"kind": "table", "format": FORMAT, **_stated(self)}
        if self.clip is not None:
            out["clip"] = self.clip
        return {**out, "columns": [_stated(c) for c in self.columns]}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "schema") -> TableSchema:
        """Read and check; every mistake is one line that names its place."""
        if not isinstance(raw, Mapping):
            raise FedtailError(f"{where}: expected a table of keys, got {type(raw).__name__}")
        if raw.get("format", FORMAT) != FORMAT:
            raise FedtailError(f"{where}: format {raw['format']!r} is not {FORMAT} but of another version of fedtail")
        own = {key: value for key, value in raw.items() if key not in ("kind", "format")}
        try:
            return _SCHEMA.validate_python({"clip": None if raw.get("strict") else CLIP, **own})
        except ValidationError as error:
            raise _explained(error, where) from None

    def unfitted(self) -> TableSchema:
        """Return the schema without means, deviations and cuts: what sites may agree on beforehand."""
        return replace(self, columns=tuple(replace(c, mean=None, std=None, cuts=()) for c in self.columns))


def load_schema(path: str | Path) -> TableSchema:
    """Read a schema file: ``.toml`` or ``.json``."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise FedtailError(f"schema {str(path)!r} does not exist") from None
    except (OSError, ValueError) as error:
        raise FedtailError(f"schema {str(path)!r} cannot be read: {' '.join(str(error).split())}") from error
    return TableSchema.from_dict(raw, f"schema {str(path)!r}")


NEEDS_LABEL = "needs --label (data.label), the column that holds the class, or --schema (data.schema) that names it"


def agreed_label(label: str, schema: TableSchema | None = None) -> str:
    """The label column: as given, else the schema's; the two may not differ. Empty if neither names it."""
    if schema is not None and label and label != schema.label:
        raise FedtailError(f"data.label = {label!r}, but the schema's label is {schema.label!r}; leave one out")
    return label or (schema.label if schema is not None else "")


def schema_text(schema: TableSchema, suffix: str = ".toml") -> str:
    """A schema as TOML or JSON text, ready for a person to edit."""
    if suffix == ".json":
        return json.dumps(schema.to_dict(), indent=2, ensure_ascii=False) + "\n"
    return tomli_w.dumps(schema.to_dict(), multiline_strings=False)


_SCHEMA = TypeAdapter(TableSchema)


def _stated(record: Column | TableSchema) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    values = {f.name: getattr(record, f.name) for f in fields(record) if getattr(record, f.name) != f.default}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items() if v not in (None, {})}


def _explained(error: ValidationError, where: str) -> FedtailError:
    """The first mistake in one line."""
    first = error.errors()[0]
    place, owner = list(first["loc"]), cast(Any, TableSchema)
    if place[:1] == ["columns"] and len(place) > 1:
        where, place, owner = f"{where}: column {int(place[1]) + 1}", place[2:], Column
        if isinstance(first["input"], Mapping) and "name" in first["input"]:
            where += f" ({first['input']['name']!r})"
    key = ".".join(map(str, place))
    if first["type"] == "unexpected_keyword_argument":
        return one_of(f"{where}: key", key, [f.name for f in fields(owner)])
    if first["type"] == "literal_error":
        return one_of(f"{where}: {key}", first["input"], KINDS)
    if first["type"] == "missing":
        return FedtailError(f"{where} needs {key!r}")
    if first["type"] == "value_error":
        return FedtailError(f"{where}: {first['ctx']['error']}")
    return FedtailError(f"{where}: {key} = {first['input']!r} is not allowed: {first['msg'].lower()}")
