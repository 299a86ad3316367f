"""Columns that give the label away: often recorded after the event they are meant to predict."""

from __future__ import annotations

import numpy as np

from fedtail.core.random import generator
from fedtail.data.tables.columns import Levels, Numbers

SURE = 0.98
BINS = 64


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
        revealed = _given_away(_values(data, sample), y[sample], half, len(classes))
        if revealed:
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
    truth = y[test]
    revealed = []
    for c in range(n_classes):
        true, guessed = truth == c, guess == c
        if true.sum() < 5 or (~true).sum() < 5:
            continue
        hit = float((true & guessed).sum())
        specificity = 1.0 - float((guessed & ~true).sum()) / float((~true).sum())
        if hit / true.sum() >= SURE and specificity >= SURE and hit / max(guessed.sum(), 1) >= 0.9:
            revealed.append(c)
    return revealed
