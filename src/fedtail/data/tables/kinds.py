"""What a column is: a number, a category, or something a classifier should not see."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from fedtail.data.tables.columns import (
    DATE,
    Levels,
    Numbers,
    as_levels,
    as_numbers,
    decimal_comma,
    level_numbers,
    without_marks,
)
from fedtail.errors import FedtailError

MOSTLY = 0.95
"""Share of a text column's fields that must be numbers (dates) for it to count as numbers (dates)."""
FEW, ROWS_PER_CODE = 20, 20
"""Whole numbers of at most so many different values, each in so many rows on average, count as codes."""
NINES = (99, 999, 9999, 99999, 999999)
PADDED = re.compile(r"0\d+")
ID_NAME = re.compile(r"(^|[_\W])(id|ids|uuid|guid|key|index|idx|nr|no|number|row|row name|case|serial)([_\W]|$)", re.I)


@dataclass(frozen=True)
class Kind:
    """The use made of a column."""

    name: str
    """``numeric``, ``category`` or, left out: ``date``, ``text``, ``id``, ``constant``, ``empty``."""
    data: Numbers | Levels
    note: str | None = None
    code: str = ""
    """Why numbers count as names, if they do."""

    @property
    def used(self) -> bool:
        return self.name in ("numeric", "category")


def infer_kind(
    name: str, column: Numbers | Levels, *, max_levels: int, category: bool = False, number: bool = False
) -> Kind:
    """Decide from all rows of the file; nothing is fitted here. ``category`` forces names, whatever they look like;
    ``number`` keeps numbers from being taken for codes or ids, and their values for marks."""
    if isinstance(column, Numbers) and category:
        column = as_levels(column)
    if isinstance(column, Numbers):
        return _numeric(name, column, number)
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
    if not number and any(PADDED.fullmatch(v) for v in column.levels):
        kind = _names(name, column, counts, np.full(len(column.levels), np.nan), max_levels)
        return replace(kind, code="leading zeros") if kind.used else kind
    comma = decimal_comma(column.levels)
    numbers = level_numbers(column.levels, comma)
    if counts[~np.isnan(numbers)].sum() >= MOSTLY * len(present):
        kind = _numeric(name, as_numbers(column, numbers, comma), number)
        data = kind.data
        if kind.used and isinstance(data, Numbers) and data.not_numbers:
            note = f"{name!r}: {data.not_numbers} non-numeric fields count as missing"
            return Kind("numeric", data, note)
        return kind
    if number:
        raise FedtailError(
            f"data.numbers names column {name!r}, whose fields are no numbers, such as {column.levels[0]!r}; "
            "leave it out"
        )
    return _names(name, column, counts, numbers, max_levels)


def _numeric(name: str, column: Numbers, number: bool = False) -> Kind:
    known = column.values[~np.isnan(column.values)]
    if not len(known):
        return Kind("empty", column)
    if len(known) == len(column.values) and known.min() == known.max():
        return Kind("constant", column)
    note = f"{name!r}: {column.infinite} infinite values count as missing" if column.infinite else None
    if number:
        return Kind("numeric", column, note)
    if column.integer and len(known) >= 20 and _looks_like_id(name, known):
        return Kind("id", column)
    if not column.integer:
        return Kind("numeric", column, note)
    distinct, counts = np.unique(known, return_counts=True)
    if 2 < len(distinct) <= FEW and len(known) >= ROWS_PER_CODE * len(distinct):
        return Kind("category", as_levels(column), note, code=f"{len(distinct)} different whole numbers")
    return Kind("numeric", without_marks(column, missing_marks(distinct, counts)), note)


def missing_marks(distinct: np.ndarray, counts: np.ndarray) -> tuple[float, ...]:
    """Values that stand for "missing": 96 to 99, 996 to 999 and so on, where all others are below half of that; and a
    lone -1, -9, -99, -999 or -9999 under values from 0 on. A mark occurs twice or more.

    distinct: (D,) ascending; counts: (D,).
    """
    marks: list[float] = []
    for nines in NINES:
        top = (distinct > nines - 4) & (distinct <= nines)
        rest = distinct[~top]
        if top.any() and top[-1] and len(rest) > 1 and rest[-1] < nines / 2 and counts[top].sum() > 1:
            marks += distinct[top].tolist()
    if len(distinct) > 2 and distinct[0] in (-1, -9, -99, -999, -9999) and distinct[1] >= 0 and counts[0] > 1:
        marks.insert(0, float(distinct[0]))
    return tuple(marks)


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
        note = f"{name!r} mixes {mixed} numbers with {n - mixed} other fields; treated as a category"
    return Kind("category", column, note)
