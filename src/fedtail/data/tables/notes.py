"""What a table is taken as, in words: columns by kind, what was left out and why, classes that lack rows."""

from __future__ import annotations

import shlex
from collections import Counter

import numpy as np

from fedtail.core.random import generator
from fedtail.data.federation import Samples
from fedtail.data.tables.columns import Kind, Levels, Numbers
from fedtail.data.tables.schema import KINDS, Column, TableSchema
from fedtail.words import listing, plural

SURE = 0.98
"""Share of rows from which on a column is taken to tell a class, or the site."""
BINS = 64
NAMED = 40
"""Most columns that a note names."""
REASONS = {
    "date": "dates",
    "text": "free text",
    "id": "an ID, different in nearly every row",
    "constant": "only one value",
    "empty": "no values",
    "excluded": "as requested",
}


def describe(schema: TableSchema, rows: int, kinds: dict[str, Kind]) -> list[str]:
    """What was used and as what, and what was not: column by column, by name."""
    count = Counter(c.kind for c in schema.columns)
    parts = ", ".join(f"{count[kind]} {kind}" for kind in KINDS if count[kind])
    notes = [f"{rows:,} rows; {schema.width:,} features from {parts} columns"]
    numeric = [repr(c.name) + _marks(c) for c in schema.numeric]
    names = [f"{c.name!r} ({_levels(c)})" for c in schema.columns if c.kind == "category"]
    codes = [f"{n!r} ({k.code})" for n, k in kinds.items() if k.code]
    notes += [f"{what}: {listing(who, NAMED)}" for what, who in (("numbers", numeric), ("categories", names)) if who]
    if codes:
        notes.append(
            f"codes, treated as categories: {listing(codes, NAMED)}; data.numbers=NAME,NAME makes them numbers"
        )
    hashed = [c.name for c in schema.columns if c.kind == "hashed"]
    if hashed:
        found = {name: len(kind.data.levels) for name, kind in kinds.items() if isinstance(kind.data, Levels)}
        most = listing(f"{n!r} ({found.get(n, 'many')} levels)" for n in hashed)
        notes.append(f"hashed, because they have more levels than data.max_levels: {most}")
    if schema.left_out:
        notes.append(f"left out: {left_out_words(schema.left_out)}")
    return notes


def _levels(column: Column) -> str:
    """``2 levels``, ``1 level and missing``."""
    count = plural(len(column.levels), "level")
    return f"{count} and missing" if column.missing else count


def _marks(column: Column) -> str:
    return f" ({listing((f'{m:g}' for m in column.marks), 4)} as missing)" if column.marks else ""


def leak_note(name: str, found: list[str], classes: tuple[str, ...], label: str) -> str:
    what = f"the {label}" if len(found) == len(classes) else f"{label} = {listing(found, 3)}"
    return (
        f"warning: column {name!r} alone reveals {what}; if it is only known afterwards, leave it out: "
        + shlex.quote(f'data.exclude=["{name}"]')
    )


PLACEHOLDERS = {"?", "-", ".", "n/a", "na", "nan", "none", "null", "unknown", "unspecified", "missing", "undefined"}
"""Names that stand for a value that nobody knows, in small letters."""


def doubts(
    schema: TableSchema, kinds: dict[str, Kind], y: np.ndarray, sites: np.ndarray, *, at_random: bool
) -> list[str]:
    """Warn of what makes figures mean less than they seem to: labels that are none, columns that only repeat the site,
    and rows in time that are split at random.

    y, sites: (N,) class and site of each row, -1 where there is none; at_random: whether test rows are drawn.
    """
    notes = [
        f"warning: {schema.label} {name!r} ({int((y == c).sum()):,} rows) looks like a missing value and is trained as "
        "a class of its own; empty these cells to leave the rows out"
        for c, name in enumerate(schema.classes)
        if name.strip().casefold() in PLACEHOLDERS
    ]
    for column in schema.columns if schema.site else ():
        data = kinds[column.name].data if column.name in kinds else None
        if isinstance(data, Levels) and _repeats(data.codes, sites):
            notes.append(
                f"warning: column {column.name!r} names the site again, as {schema.site!r} does, and tells nothing at "
                "a new site; leave it out: " + shlex.quote(f'data.exclude=["{column.name}"]')
            )
    dates = [name for name, kind in kinds.items() if kind.name == "date"]
    if dates and at_random:
        notes.append(
            f"warning: {listing(map(repr, dates), 3)} is left out, and test rows are drawn at random over time; if the "
            "model is for later rows, hold out the latest ones: data.test=FILE"
        )
    return notes


def _repeats(codes: np.ndarray, sites: np.ndarray) -> bool:
    """Whether nearly every level is at one site and nearly every site has one level."""
    known = (codes >= 0) & (sites >= 0)
    n, levels, k = int(known.sum()), int(codes.max(initial=-1)) + 1, int(sites.max(initial=-1)) + 1
    if min(levels, k) < 2 or levels > 2 * k or n < SURE * len(codes):
        return False
    together = np.bincount(codes[known].astype(np.int64) * k + sites[known], minlength=levels * k).reshape(levels, k)
    return bool(min(together.max(0).sum(), together.max(1).sum()) >= SURE * n)


def class_notes(y: np.ndarray, test: Samples, classes: tuple[str, ...]) -> list[str]:
    counts, tested = np.bincount(y, minlength=len(classes)), test.counts(len(classes))
    notes = [] if len(test) else ["warning: no test rows, so nothing is scored; provide some with data.test=FILE"]
    absent = [classes[c] for c in np.flatnonzero(counts == 0)]
    if absent:
        notes.append(f"warning: no training rows of class {listing(absent)}")
    untested = [classes[c] for c in np.flatnonzero((tested == 0) & (counts > 0))] if len(test) else []
    if untested:
        notes.append(f"too few rows to test class {listing(untested)}")
    return notes


def left_out_words(left_out: dict[str, str]) -> str:
    return listing((f"{name!r} ({REASONS.get(why, why)})" for name, why in left_out.items()), 12)


def leaking_columns(
    columns: dict[str, Numbers | Levels],
    y: np.ndarray,
    classes: tuple[str, ...],
    index: np.ndarray,
    *,
    rows: int = 40_000,
    seed: int = 0,
) -> dict[str, list[str]]:
    """Column -> classes that it alone tells from all others, on training rows.

    A table column value -> likeliest class is learnt on one half of a sample and tried on the other; a class is
    given away where recall and specificity reach 0.98 and precision 0.9. Missing counts as a value: a field that
    is filled in only for one class leaks it too.
    """
    rng = generator(seed, "table/leaks")
    sample = rng.permutation(index)[:rows]
    half = len(sample) // 2
    out: dict[str, list[str]] = {}
    if half < 20:
        return out
    for name, data in columns.items():
        if revealed := _given_away(_values(data, sample), y[sample], half, len(classes)):
            out[name] = [classes[c] for c in revealed]
    return out


def _values(data: Numbers | Levels, sample: np.ndarray) -> np.ndarray:
    """(S,) small non-negative integers: level codes, or quantile bins of numbers; 0 is missing."""
    if isinstance(data, Levels):
        return data.codes[sample].astype(np.int64) + 1
    values = data.values[sample]
    known = values[~np.isnan(values)]
    if not len(known):
        return np.zeros(len(sample), dtype=np.int64)
    known.sort()
    new = np.flatnonzero(np.diff(known)) + 1
    ranks = np.linspace(0, len(known) - 1, BINS + 1)[1:-1].astype(np.int64)
    edges = known[new] if len(new) < BINS else np.unique(known[ranks])
    return np.where(np.isnan(values), 0, np.searchsorted(edges, values, side="right") + 1)


def _given_away(values: np.ndarray, y: np.ndarray, half: int, n_classes: int) -> list[int]:
    learn, test = slice(None, half), slice(half, None)
    counts = np.zeros((int(values.max()) + 1, n_classes))
    np.add.at(counts, (values[learn], y[learn]), 1.0)
    share = counts / np.maximum(counts.sum(axis=0), 1.0)
    guess = np.where(counts.sum(axis=1) > 0, share.argmax(axis=1), -1)[values[test]]
    true, guessed = (column[:, None] == np.arange(n_classes) for column in (y[test], guess))  # (S / 2, C)
    there, told, hit = true.sum(0), guessed.sum(0), (true & guessed).sum(0)
    elsewhere = np.maximum(len(true) - there, 1)
    sure = (hit / np.maximum(there, 1) >= SURE) & (1.0 - (told - hit) / elsewhere >= SURE)
    sure &= hit / np.maximum(told, 1) >= 0.9
    return np.flatnonzero(sure & (there >= 5) & (elsewhere >= 5)).tolist()
