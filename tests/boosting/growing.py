"""Small tables with everything a tree may meet, and forests grown from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtail.boosting.bins import Column, read_columns
from fedtail.boosting.grower import Site, asking, boost
from fedtail.boosting.predictor import Forest, Plan
from fedtail.methods.trees import Trees
from tests.totals import LocalTotals

COLUMNS = (Column("a", 0), Column("b", 1), Column("kind", 2, levels=5, missing=7), Column("c", 8, missing=9))


def table(seed: int = 0, n: int = 400, n_classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Stored samples and classes: two numbers, a category of five levels, a number that is often missing."""
    rng = np.random.default_rng(seed)
    x = np.zeros((n, 10), dtype=np.float32)
    x[:, 0] = rng.normal(size=n)
    x[:, 1] = rng.integers(0, 6, n)
    level = rng.integers(-1, 5, n)
    x[np.arange(n), np.where(level < 0, 7, 2 + level)] = 1
    x[:, 9] = rng.random(n) < 0.3
    x[:, 8] = np.where(x[:, 9] > 0, 0, rng.normal(size=n))
    score = x[:, 0] + (level % 2) * 1.5 + x[:, 9] + rng.logistic(size=n)
    edges = np.quantile(score, np.cumsum([0.6, 0.3, 0.1])[: n_classes - 1])
    return x, np.searchsorted(edges, score)


SMALL: dict[str, Any] = {"lr": 0.3, "leaves": 8, "depth": 4, "bins": 16, "column_share": 1.0}


def a_plan(n_classes: int = 3, rounds: int = 4, seed: int = 0, patience: int = 0, **options: Any) -> Plan:
    return Plan(COLUMNS, n_classes, rounds, Trees(**{**SMALL, **options}), seed, patience)


def grown(
    x: np.ndarray,
    y: np.ndarray,
    parts: Sequence[np.ndarray],
    plan: Plan | None = None,
    held: np.ndarray | None = None,
    forest: Forest | None = None,
) -> tuple[Forest, list[Site]]:
    """A forest of the rows in ``parts``, one per site; the first site holds out ``held``."""
    plan, none = plan or a_plan(), np.zeros(0, dtype=np.int64)

    def values(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return read_columns(x[rows], plan.columns), y[rows]

    sites = [
        Site(values(rows), values(held if k == 0 and held is not None else none), forest)
        for k, rows in enumerate(parts)
    ]
    found = boost(plan, asking(LocalTotals(len(sites)), dict(enumerate(sites))), forest)
    return found, sites


def same(a: Forest, b: Forest) -> bool:
    """Whether two forests have the same bits."""
    arrays = zip(a.arrays().values(), b.arrays().values(), strict=True)
    return a.start.bins == b.start.bins and all(np.array_equal(u, v) and u.dtype == v.dtype for u, v in arrays)
