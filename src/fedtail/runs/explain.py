"""Why: which columns a model's answers rest on, for one row and for a class.

For a row of trees the path explains the score exactly: every split moves it by the difference between the node's value
and its child's (Saabas, 2014), and these differences are summed by column. For a network a column is left out (its
features set to what these rows have on average) and the answer's log-odds are compared. For a class, a column is
shuffled over rows, which takes away what it tells, and the recall that is lost is its importance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedtail.boosting.model import TreesModule
from fedtail.core.counts import Counts, total
from fedtail.core.random import generator
from fedtail.data.inputs import saved_schema
from fedtail.errors import FedtailError
from fedtail.runs.judged import Judged
from fedtail.runs.saved import SavedModel

MOST_COLUMNS = 500
"""A model with more inputs, such as pixels, has no reasons that can be listed."""
SHUFFLES = 3


@dataclass(frozen=True)
class Part:
    """A column of the data, and the inputs that it became."""

    name: str
    at: slice


def parts_of(model: SavedModel) -> list[Part]:
    """List the columns that a model's inputs stand for; inputs without a schema are columns of their own."""
    if len(model.input_shape) != 1:
        raise FedtailError("reasons are columns of a table; this model takes images")
    schema = saved_schema(model.preprocessing)
    width = model.input_shape[0]
    if schema is None or schema.width != width:
        if width > MOST_COLUMNS:
            raise FedtailError(
                f"a model with {width:,} inputs has no reasons that can be listed (most: {MOST_COLUMNS})"
            )
        return [Part(f"input {i + 1}", slice(i, i + 1)) for i in range(width)]
    out, first = [], 0
    for column in schema.columns:
        out.append(Part(column.name, slice(first, first + column.width)))
        first += column.width
    return out


def reasons(model: SavedModel, x: Tensor, answers: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Return the columns' names and (N, columns) how far each moves a row towards its answer, in log-odds."""
    if isinstance(model.module, TreesModule):
        module = model.module
        forest = module.read()
        moved = forest.attributions(forest.start.bins.of(module.values(x)))  # (K, N, F)
        if len(moved) == 1:
            moved = np.concatenate([-moved, moved])
        own = moved[answers, np.arange(len(x))]
        others = (moved.sum(0) - own) / max(len(moved) - 1, 1)
        return [column.name for column in module.shape.columns], own if len(moved) == 2 else own - others
    parts = parts_of(model)
    before = _log_odds(model, x, answers)
    out = np.empty((len(x), len(parts)))
    for i, part in enumerate(parts):
        without = x.clone()
        without[:, part.at] = x[:, part.at].mean(0)
        out[:, i] = before - _log_odds(model, without, answers)
    return [part.name for part in parts], out


def sentence(names: Sequence[str], moved: np.ndarray, most: int = 3) -> str:
    """Say the strongest reasons of one row: ``age +1.20, site -0.31``."""
    order = np.argsort(-np.abs(moved), kind="stable")[:most]
    return ", ".join(f"{names[i]} {moved[i]:+.2f}" for i in order if abs(moved[i]) >= 0.005)


@dataclass(frozen=True)
class Shuffled(Counts):
    """Labelled rows whose class is found, as they are and with each column shuffled at their site."""

    cases: np.ndarray
    """(C,) labelled rows."""
    found: np.ndarray
    """(C,) of them answered right."""
    without: np.ndarray
    """(columns, C) answered right with a column shuffled, summed over shuffles."""

    @classmethod
    def none(cls, n_classes: int, n_columns: int) -> Shuffled:
        """Return the counts of no rows."""
        return cls(*(np.zeros(shape, dtype=np.int64) for shape in (n_classes, n_classes, (n_columns, n_classes))))

    @property
    def lost(self) -> np.ndarray:
        """(columns, C) the recall of each class that shuffling a column costs; NaN for a class without cases."""
        n = np.where(self.cases > 0, self.cases, np.nan)
        return np.asarray(self.found / n - self.without / (SHUFFLES * n))


def importance(model: SavedModel, judged: Judged, seed: int = 0) -> tuple[list[str], np.ndarray]:
    """Return the columns' names and (columns, C) the recall of each class that is lost when a column is shuffled.

    Rows that name sites are shuffled within each site, as sites would.
    """
    rows = judged.labelled
    counts = total(shuffle(model, part, seed) for part in rows.by_site().values() or [rows])
    assert counts is not None
    return [part.name for part in parts_of(model)], counts.lost


def shuffle(model: SavedModel, rows: Judged, seed: int = 0) -> Shuffled:
    """Count at one site what its labelled rows tell of the importance of columns."""
    x, y, parts, c = rows.x, rows.y, parts_of(model), len(rows.classes)
    assert x is not None and y is not None
    without = np.zeros((len(parts), c), dtype=np.int64)
    for i, part in enumerate(parts):
        for again in range(SHUFFLES):
            order = torch.from_numpy(generator(seed, "importance", client=i, round=again).permutation(len(y)))
            other = x.clone()
            other[:, part.at] = x[order][:, part.at]
            answers = model.decision.answers(model.probabilities(other))
            without[i] += np.bincount(y[answers == y], minlength=c)
    right = rows.decision.answers(rows.p) == y
    return Shuffled(np.bincount(y, minlength=c), np.bincount(y[right], minlength=c), without)


def _log_odds(model: SavedModel, x: Tensor, answers: np.ndarray) -> np.ndarray:
    p = model.probabilities(x)[np.arange(len(x)), answers].astype(np.float64).clip(1e-9, 1 - 1e-9)
    return np.asarray(np.log(p) - np.log1p(-p))
