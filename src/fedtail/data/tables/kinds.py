"""What a column is: a number, a category, or something a classifier should not see."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fedtail.data.tables.columns import DATE, Levels, Numbers, as_numbers, decimal_comma, level_numbers

MOSTLY = 0.95
"""Share of a text column's fields that must be numbers (dates) for it to count as numbers (dates)."""
ID_NAME = re.compile(r"(^|[_\W])(id|ids|uuid|guid|key|index|idx|nr|no|number|row|row name|case|serial)([_\W]|$)", re.I)


@dataclass(frozen=True)
class Kind:
    """The use made of a column."""

    name: str
    """``numeric``, ``category`` or, left out: ``date``, ``text``, ``id``, ``constant``, ``empty``."""
    data: Numbers | Levels
    note: str | None = None

    @property
    def used(self) -> bool:
        return self.name in ("numeric", "category")


def infer_kind(name: str, column: Numbers | Levels, *, max_levels: int, category: bool = False) -> Kind:
    """Decide from all rows of the file; nothing is fitted here. ``category`` forces names, whatever they look like."""
    if isinstance(column, Numbers):
        return _numeric(name, column)
    present = column.codes[column.codes >= 0]
    if column.dates:
        return Kind("date", column)
    if not len(present):
        return Kind("empty", column)
    counts = np.bincount(present, minlength=len(column.levels))
    if (counts > 0).sum() == 1 and len(present) == len(column.codes):
        return Kind("constant", column)
    if category:
        return Kind("category", column)
    comma = decimal_comma(column.levels)
    numbers = level_numbers(column.levels, comma)
    if counts[~np.isnan(numbers)].sum() >= MOSTLY * len(present):
        kind = _numeric(name, as_numbers(column, numbers, comma))
        data = kind.data
        if kind.used and isinstance(data, Numbers) and data.not_numbers:
            note = f"{name!r}: {data.not_numbers} fields that are no numbers count as missing"
            return Kind("numeric", data, note)
        return kind
    return _names(name, column, counts, numbers, max_levels)


def _numeric(name: str, column: Numbers) -> Kind:
    known = column.values[~np.isnan(column.values)]
    if not len(known):
        return Kind("empty", column)
    if len(known) == len(column.values) and known.min() == known.max():
        return Kind("constant", column)
    if column.integer and len(known) >= 20 and _looks_like_id(name, known):
        return Kind("id", column)
    note = f"{name!r}: {column.infinite} infinite values count as missing" if column.infinite else None
    return Kind("numeric", column, note)


def _looks_like_id(name: str, values: np.ndarray) -> bool:
    """Whole numbers, (nearly) all different, and either in file order or called an id."""
    steps = np.diff(values)
    if (steps > 0).all() or (steps < 0).all():
        return True
    return bool(ID_NAME.search(name)) and len(np.unique(values)) > 0.9 * len(values)


def _names(name: str, column: Levels, counts: np.ndarray, numbers: np.ndarray, max_levels: int) -> Kind:
    n = int(counts.sum())
    used = [level for level, c in zip(column.levels, counts, strict=True) if c]
    sample = used[:2000]
    if sum(bool(DATE.fullmatch(v)) for v in sample) >= MOSTLY * len(sample):
        return Kind("date", column)
    words = float(np.mean([len(v.split()) for v in sample]))
    length = float(np.mean([len(v) for v in sample]))
    distinct = len(used) / n
    if len(used) > max_levels and (words >= 8 or length >= 80 or (distinct > 0.5 and words >= 3)):
        return Kind("text", column)
    if n >= 20 and distinct > 0.5:
        return Kind("id", column)
    mixed = int(counts[~np.isnan(numbers)].sum())
    note = None
    if mixed and np.isnan(numbers).any() and len(used) > 20 and mixed > 0.05 * n:
        note = f"{name!r} mixes {mixed} numbers with {n - mixed} other fields; read as a category"
    return Kind("category", column, note)
