"""The label and site columns: names, never numbers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedtail.data.tables.columns import DATE, level_name, level_numbers
from fedtail.errors import FedtailError
from fedtail.words import listing

MAX_CLASSES = 1000
FEW_FRACTIONS = 20
"""Most different numbers with fractions, or dates, that may be classes unless a schema declares them."""
WHOLE = re.compile(r"[-+]?\d+(\.0*)?")


def need_column(role: str, name: str, columns: Collection[str], where: str) -> None:
    """Raise, with the nearest spelling, unless the table has the column."""
    if name in columns:
        return
    names = list(columns)
    lower = {n.lower(): n for n in names}
    close = difflib.get_close_matches(str(name).lower(), list(lower), n=1, cutoff=0.5)
    hint = f"; did you mean {lower[close[0]]!r}?" if close else ""
    lacks = f"{role} column {name!r}" if role in ("label", "site") else f"column {name!r} for {role!r}"
    raise FedtailError(f"{where} has no {lacks}{hint} (columns: {listing(names, 12)})")


def name_codes(series: pd.Series[Any]) -> tuple[np.ndarray, list[str]]:
    """(codes, names): names in natural order (numbers by value), code -1 for missing or empty. Whole numbers that were
    written as ``7.0``, as programs do where a column has gaps, are ``7``."""
    raw, uniques = pd.factorize(series, use_na_sentinel=True)
    spelled = [level_name(v) for v in uniques.tolist()]
    if all(WHOLE.fullmatch(s) for s in spelled if s):
        spelled = [whole_name(s) for s in spelled]
    names = natural_order({s for s in spelled if s})
    place = {name: i for i, name in enumerate(names)}
    table = np.array([*(place.get(s, -1) for s in spelled), -1], dtype=np.int64)
    return table[raw], names


def whole_name(name: str) -> str:
    """``7`` for ``7.0``; any other name as it is."""
    return name.partition(".")[0] if WHOLE.fullmatch(name) else name


def class_places(names: Sequence[str], classes: Sequence[str]) -> list[int]:
    """The class that each name is, -1 for none; ``7`` and ``7.0`` are one."""
    spelled = (lambda c: whole_name(level_name(c)), level_name, str)  # the last counts most
    known = {as_read(c): i for as_read in spelled for i, c in enumerate(classes)}
    return [known.get(v, known.get(whole_name(v), -1)) for v in names]


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
        places = class_places(names, classes)
        if strange := [repr(v) for v, c in zip(names, places, strict=True) if c < 0]:
            who = f"label {strange[0]} is" if len(strange) == 1 else f"labels {listing(strange, 5)} are"
            raise FedtailError(
                f"{where}: {who} not among the schema's classes "
                f"({listing(classes, 12)}); mend the rows, or add to the classes of a schema (--schema) that "
                "`fedtail data schema` proposes"
            )
        return np.array([*places, -1], dtype=np.int64)[codes], tuple(classes)
    if len(names) < 2:
        raise FedtailError(f"{where}: label column {label!r} contains only one class, {names[0]!r}; nothing to learn")
    if len(names) > MAX_CLASSES or (n >= 50 and len(names) > 0.5 * n):
        raise FedtailError(
            f"{where}: label column {label!r} holds {len(names)} different values in {n} rows; it looks like a "
            "quantity or an id, not a class (bin it first, or name another column)"
        )
    if len(names) > FEW_FRACTIONS:
        dates, numbers = all(DATE.fullmatch(v) for v in names), level_numbers(names, comma=False)
        if dates or (np.isfinite(numbers).all() and (numbers != np.rint(numbers)).any()):
            what = "dates" if dates else "numbers with fractions"
            raise FedtailError(
                f"{where}: label column {label!r} holds {len(names)} different {what} ({listing(names, 3)}), which are "
                "not classes; bin it first, name another column, or declare them as classes with --schema"
            )
    return codes, tuple(names)


def label_notes(classes: Sequence[str], label: str) -> list[str]:
    """What looks like a slip in the names of classes: the same word in capitals and small letters."""
    same: dict[str, list[str]] = {}
    for name in classes:
        same.setdefault(name.casefold(), []).append(name)
    return [
        f"warning: {listing(map(repr, names))} of {label!r} differ only in capitals and count as different classes; "
        "write them alike if they are one"
        for names in same.values()
        if len(names) > 1
    ]


def label_type(values: Any) -> str:
    """Return the type that answers are given in: ``bool``, ``int``, ``float`` or ``str``.

    Whole numbers that a column with gaps holds as ``7.0`` are integers.
    """
    given = np.asarray(values)
    if given.dtype.kind == "O":
        given = np.array([v for v in given.reshape(-1).tolist() if v is not None and v == v])
    if given.dtype.kind == "f":
        known = given[np.isfinite(given)]
        return "int" if known.size < np.size(values) and (known == np.rint(known)).all() else "float"
    return {"b": "bool", "i": "int", "u": "int"}.get(given.dtype.kind, "str")


def as_labels(classes: Sequence[str], kind: str) -> np.ndarray:
    """(C,) class names as labels of a type."""
    if kind == "bool":
        return np.array([name.lower() == "true" for name in classes])
    if kind in ("int", "float"):
        return np.array([float(name) for name in classes]).astype(np.int64 if kind == "int" else np.float64)
    return np.array(classes, dtype=object)
