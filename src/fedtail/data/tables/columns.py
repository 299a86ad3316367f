"""A raw column as plain arrays: numbers with NaN, or codes into a list of levels with -1."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fedtail.data.tables.read import MISSING

THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?")
DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+")
DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})|\d{1,2}[- ][A-Za-z]{3}[- ]\d{2,4}"
    r"|[A-Za-z]{3,9} \d{1,2},? \d{4})([T ]+\d{1,2}:\d{2}(:\d{2})?([.,]\d+)?\s*([AaPp][Mm])?\s*(Z|[-+]\d{2}:?\d{2})?)?"
    r"|\d{1,2}:\d{2}(:\d{2})?(\.\d+)?"
)
LARGEST = 1e100
"""Beyond this, squares overflow: such values count as infinite."""


@dataclass(frozen=True)
class Numbers:
    """A numeric column. Infinities have become NaN and are counted."""

    values: np.ndarray
    """(N,) float64."""
    integer: bool
    """All values are whole."""
    infinite: int = 0
    not_numbers: int = 0
    """Fields of another kind that became NaN."""
    comma: bool = False
    """Written with a decimal comma."""
    marks: tuple[float, ...] = ()
    """Values that meant "missing" and have become NaN."""


@dataclass(frozen=True)
class Levels:
    """A column of names."""

    codes: np.ndarray
    """(N,) int32 into ``levels``, -1 for missing."""
    levels: list[str]
    dates: bool = False
    """The source says that these are dates or times."""


def parse_column(series: pd.Series[Any]) -> Numbers | Levels:
    """What pandas made of a column, as arrays. Text that is numbers is left as ``Levels``; see ``as_numbers``."""
    dtype = series.dtype
    if isinstance(dtype, pd.DatetimeTZDtype | pd.PeriodDtype) or dtype.kind in "mM":
        return Levels(np.full(len(series), -1, dtype=np.int32), [], dates=True)
    if isinstance(dtype, pd.CategoricalDtype):
        levels = [level_name(v) for v in dtype.categories]
        return _merge_levels(np.asarray(series.cat.codes, dtype=np.int32), levels)
    if pd.api.types.is_bool_dtype(dtype) or not pd.api.types.is_numeric_dtype(dtype):
        codes, uniques = pd.factorize(series, use_na_sentinel=True)
        return _merge_levels(codes.astype(np.int32), [level_name(v) for v in uniques.tolist()])
    return clean_numbers(series.to_numpy(dtype=np.float64, na_value=np.nan))


def clean_numbers(values: np.ndarray, not_numbers: int = 0, comma: bool = False) -> Numbers:
    """Infinities and values beyond 1e100 to NaN, counted. values: (N,) float64, not modified."""
    with np.errstate(invalid="ignore"):
        beyond = np.abs(values) > LARGEST
    infinite = int(beyond.sum())
    if infinite:
        values = np.where(beyond, np.nan, values)
    known = values[~np.isnan(values)]
    return Numbers(values, bool((known == np.rint(known)).all()), infinite, not_numbers, comma)


def level_name(value: Any) -> str:
    """The one spelling of a level: stripped; 1.0 and 1 are the same, and so are True and "true"."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating) and float(value).is_integer() and abs(float(value)) < 2**53:
        return str(int(value))
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    name = str(value).strip()
    return name.lower() if name.lower() in ("true", "false") else name


def _merge_levels(codes: np.ndarray, names: list[str]) -> Levels:
    """Levels whose names have become equal get one code; empty ones are missing."""
    seen: dict[str, int] = {}
    remap = np.full(len(names) + 1, -1, dtype=np.int32)
    for i, name in enumerate(names):
        if name not in MISSING:
            remap[i] = seen.setdefault(name, len(seen))
    if len(seen) == len(names):
        return Levels(codes, names)
    return Levels(remap[codes], list(seen))


def decimal_comma(levels: list[str]) -> bool:
    """Whether some level can only be read with a decimal comma: ``3,14``, but not ``1,234``."""
    return any(DECIMAL_COMMA.fullmatch(v) and not THOUSANDS.fullmatch(v) for v in levels)


def level_numbers(levels: list[str], comma: bool) -> np.ndarray:
    """(L,) the number each level is written as, NaN where it is none.

    Plain and scientific notation, and ``1,234.5`` with thousands or, with ``comma``, ``3,14``.
    """
    out = np.full(len(levels), np.nan)
    for i, level in enumerate(levels):
        text = level
        if comma and DECIMAL_COMMA.fullmatch(text):
            text = text.replace(",", ".")
        elif not comma and THOUSANDS.fullmatch(text):
            text = text.replace(",", "")
        try:
            out[i] = float(text) if "_" not in text else np.nan
        except ValueError:
            continue
    return out


def as_numbers(column: Levels, numbers: np.ndarray, comma: bool) -> Numbers:
    """A column of names read as numbers; what is none becomes missing and is counted."""
    table = np.append(numbers, np.nan)
    counts = np.bincount(column.codes[column.codes >= 0], minlength=len(numbers))
    return clean_numbers(table[column.codes], int(counts[np.isnan(numbers)].sum()), comma)


def without_marks(column: Numbers, marks: tuple[float, ...]) -> Numbers:
    """The column with the values that mean "missing" as NaN."""
    if not marks or column.marks == marks:
        return column
    return replace(column, values=np.where(np.isin(column.values, marks), np.nan, column.values), marks=marks)


def as_levels(column: Numbers) -> Levels:
    """Numbers as names, for columns declared to be categories."""
    codes, uniques = pd.factorize(column.values, use_na_sentinel=True)
    return Levels(codes.astype(np.int32), [level_name(v) for v in uniques.tolist()])
