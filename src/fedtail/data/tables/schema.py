"""The schema of a table: its columns, their levels and scaling. JSON or TOML, so that sites can agree on one.

A *declared* schema has kinds and levels; a *fitted* one has means and deviations too and is all that is needed to
turn raw rows into model input, at a site or in prediction.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w

from fedtail.errors import FedtailError, one_of

KINDS = ("numeric", "category", "hashed")
FORMAT = 1


@dataclass(frozen=True)
class Column:
    """One input column and the features it becomes."""

    name: str
    kind: str
    levels: tuple[str, ...] = ()
    """``category``: one feature per level, in this order; a level not listed is all zeros."""
    buckets: int = 0
    """``hashed``: number of features that the levels are hashed into."""
    missing: bool = False
    """One more feature says that the value is missing."""
    mean: float | None = None
    std: float | None = None
    """``numeric``: scaling; None until it is fitted."""
    comma: bool = False
    """``numeric``: written with a decimal comma."""
    cuts: tuple[float, ...] = ()
    """``numeric``: where its piecewise-linear encoding bends, one more feature from 0 to 1 between each two."""
    marks: tuple[float, ...] = ()
    """``numeric``: values that mean "missing", such as 999."""

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


@dataclass(frozen=True)
class TableSchema:
    """What a table holds and how it becomes features."""

    label: str
    classes: tuple[str, ...]
    columns: tuple[Column, ...]
    site: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    """Columns not used, and why: ``date``, ``text``, ``id``, ``constant``, ``empty``, ``excluded``."""
    clip: float | None = 10.0
    """Standardized numbers are limited to +- this many deviations; None for no limit."""
    pieces: int | None = None
    """Pieces between the cuts of a numeric column, 0 for none; None leaves it to the number of columns."""
    strict: bool = False
    """A table that others published: what is no number, or outside the levels, is an error."""

    @property
    def width(self) -> int:
        return sum(c.width for c in self.columns)

    @property
    def fitted(self) -> bool:
        return all(c.mean is not None for c in self.columns if c.kind == "numeric")

    @property
    def numeric(self) -> tuple[Column, ...]:
        return tuple(c for c in self.columns if c.kind == "numeric")

    def features(self) -> list[str]:
        return [name for c in self.columns for name in c.features()]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; nothing that is at its default."""
        out: dict[str, Any] = {"kind": "table", "format": FORMAT, "label": self.label, "classes": list(self.classes)}
        if self.site is not None:
            out["site"] = self.site
        if self.clip is not None:
            out["clip"] = self.clip
        if self.strict:
            out["strict"] = True
        if self.pieces is not None:
            out["pieces"] = self.pieces
        if self.left_out:
            out["left_out"] = dict(self.left_out)
        out["columns"] = [_column_dict(c) for c in self.columns]
        return out

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "schema") -> TableSchema:
        """Read and check; every mistake is one line that names its place."""
        if not isinstance(raw, Mapping):
            raise FedtailError(f"{where}: expected a table of keys, got {type(raw).__name__}")
        if raw.get("format", FORMAT) != FORMAT:
            raise FedtailError(
                f"{where}: format {raw['format']!r} is not {FORMAT}; it was written by another version of fedtail"
            )
        known = {f.name for f in fields(cls)} | {"kind", "format"}
        for key in raw:
            if key not in known:
                raise one_of(f"{where}: key", key, known)
        label, classes = raw.get("label"), raw.get("classes")
        if not isinstance(label, str) or not label:
            raise FedtailError(f"{where}: 'label' must name the label column")
        if not isinstance(classes, list | tuple) or len(classes) < 2 or len({str(c) for c in classes}) < len(classes):
            raise FedtailError(f"{where}: 'classes' must list two or more different class names")
        columns = raw.get("columns")
        if not isinstance(columns, list | tuple) or not columns:
            raise FedtailError(f"{where}: 'columns' must list one column or more")
        parsed = tuple(_column(c, f"{where}: column {i + 1}") for i, c in enumerate(columns))
        names = [c.name for c in parsed]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            raise FedtailError(f"{where}: column {twice!r} is listed twice")
        for name in (label, raw.get("site")):
            if name in names:
                raise FedtailError(f"{where}: {name!r} cannot be an input column, it is the label or the site")
        strict = bool(raw.get("strict"))
        clip = raw.get("clip", None if strict else 10.0)
        if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
            raise FedtailError(f"{where}: clip = {clip!r} must be a number above 0")
        pieces = raw.get("pieces")
        if pieces is not None and (isinstance(pieces, bool) or not isinstance(pieces, int) or pieces < 0):
            raise FedtailError(f"{where}: pieces = {pieces!r} must be a whole number, 0 or more")
        return cls(
            label=label,
            classes=tuple(str(c) for c in classes),
            columns=parsed,
            site=raw.get("site"),
            left_out=dict(raw.get("left_out", {})),
            clip=None if clip is None else float(clip),
            pieces=pieces,
            strict=strict,
        )

    def unfitted(self) -> TableSchema:
        """The same schema without means, deviations and cuts: what sites may agree on beforehand."""
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


def _column_dict(column: Column) -> dict[str, Any]:
    out: dict[str, Any] = {"name": column.name, "kind": column.kind}
    if column.kind == "category":
        out["levels"] = list(column.levels)
    if column.kind == "hashed":
        out["buckets"] = column.buckets
    if column.missing:
        out["missing"] = True
    if column.comma:
        out["comma"] = True
    if column.marks:
        out["marks"] = list(column.marks)
    if column.mean is not None and column.std is not None:
        out |= {"mean": column.mean, "std": column.std}
    if column.cuts:
        out["cuts"] = list(column.cuts)
    return out


def _column(raw: Any, where: str) -> Column:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("name"), str) or not raw["name"]:
        raise FedtailError(f"{where} needs a name and a kind ({', '.join(KINDS)})")
    name, kind = raw["name"], raw.get("kind")
    where = f"{where} ({name!r})"
    allowed = [f.name for f in fields(Column)]
    for key in raw:
        if key not in allowed:
            raise one_of(f"{where}: key", key, allowed)
    if kind not in KINDS:
        raise one_of(f"{where}: kind", kind, KINDS)
    levels = raw.get("levels", ())
    if not isinstance(levels, list | tuple):
        raise FedtailError(f"{where}: 'levels' must be a list")
    levels = tuple(str(v) for v in levels)
    if kind == "category" and (not levels or len(set(levels)) < len(levels)):
        raise FedtailError(f"{where}: a category needs 'levels', all different")
    buckets = raw.get("buckets", 0)
    if isinstance(buckets, bool) or not isinstance(buckets, int) or (kind == "hashed" and buckets < 2):
        raise FedtailError(f"{where}: a hashed column needs 'buckets' of 2 or more, got {buckets!r}")
    scale = []
    for key in ("mean", "std"):
        value = raw.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise FedtailError(f"{where}: {key} = {value!r} is not a number")
        scale.append(None if value is None else float(value))
    if scale[1] is not None and not scale[1] > 0:
        raise FedtailError(f"{where}: std = {scale[1]!r} must be above 0")
    cuts, marks = (_numbers(raw.get(key, ()), f"{where}: {key}") for key in ("cuts", "marks"))
    if len(cuts) == 1 or any(a >= b for a, b in pairwise(cuts)):
        raise FedtailError(f"{where}: cuts must be two or more increasing numbers")
    return Column(
        name=name,
        kind=kind,
        levels=levels,
        buckets=buckets,
        missing=bool(raw.get("missing")),
        mean=scale[0],
        std=scale[1],
        comma=bool(raw.get("comma")),
        cuts=cuts,
        marks=marks,
    )


def _numbers(raw: Any, where: str) -> tuple[float, ...]:
    numbers = isinstance(raw, list | tuple) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in raw)
    if not numbers or not all(math.isfinite(v) for v in raw):
        raise FedtailError(f"{where} must be a list of numbers, got {raw!r}")
    return tuple(float(v) for v in raw)
