"""The label and site columns: names, never numbers."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedtail.data.tables.columns import level_name
from fedtail.data.tables.read import listing
from fedtail.errors import FedtailError

MAX_CLASSES = 1000


def need_column(role: str, name: str, columns: Collection[str], where: str) -> None:
    """Raise, with the nearest spelling, unless the table has the column."""
    if name in columns:
        return
    names = list(columns)
    lower = {n.lower(): n for n in names}
    close = difflib.get_close_matches(str(name).lower(), list(lower), n=1, cutoff=0.5)
    hint = f"; did you mean {lower[close[0]]!r}?" if close else ""
    raise FedtailError(f"{where} has no {role} column {name!r}{hint} (columns: {listing(names, 12)})")


def name_codes(series: pd.Series[Any]) -> tuple[np.ndarray, list[str]]:
    """(codes, names): names in natural order (numbers by value), code -1 for missing or empty."""
    raw, uniques = pd.factorize(series, use_na_sentinel=True)
    spelled = [level_name(v) for v in uniques.tolist()]
    names = natural_order({s for s in spelled if s})
    place = {name: i for i, name in enumerate(names)}
    table = np.array([*(place.get(s, -1) for s in spelled), -1], dtype=np.int64)
    return table[raw], names


def natural_order(names: Collection[str]) -> list[str]:
    """Sorted by value if all are numbers, else by text."""
    try:
        return sorted(names, key=lambda v: (float(v), v))
    except ValueError:
        return sorted(names)


def label_codes(
    series: pd.Series[Any], label: str, where: str, classes: Sequence[str] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """(y, classes): y is -1 where the label is missing. With ``classes`` given, any other label is an error."""
    codes, names = name_codes(series)
    n = int((codes >= 0).sum())
    if n == 0:
        raise FedtailError(f"{where}: label column {label!r} is empty")
    if classes is not None:
        known = {c: i for i, c in enumerate(classes)}
        strange = [v for v in names if v not in known]
        if strange:
            raise FedtailError(
                f"{where}: label(s) {listing(map(repr, strange), 5)} are not among the schema's classes "
                f"({listing(classes, 12)}); add them to the schema or fix the rows"
            )
        table = np.array([*(known[v] for v in names), -1], dtype=np.int64)
        return table[codes], tuple(classes)
    if len(names) < 2:
        raise FedtailError(f"{where}: label column {label!r} contains only one class, {names[0]!r}; nothing to learn")
    if len(names) > MAX_CLASSES or (n >= 50 and len(names) > 0.5 * n):
        raise FedtailError(
            f"{where}: label column {label!r} holds {len(names)} different values in {n} rows; it looks like a "
            "quantity or an id, not a class (bin it first, or name another column)"
        )
    return codes, tuple(names)
