"""Why: which columns a model's answers rest on, for one row and for a class.

For a row of trees the path explains the score exactly: every split moves it by the difference between the node's value
and its child's (Saabas, 2014), and these differences are summed by column. For a network a column is left out (its
features set to what these rows have on average) and the answer's log-odds are compared. For a class, a column is
shuffled over rows, which takes away what it tells, and the recall that is lost is its importance.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedtail.boosting.model import TreesModule
from fedtail.core.random import generator
from fedtail.data.inputs import saved_schema
from fedtail.errors import FedtailError
from fedtail.runs.judged import Judged
from fedtail.runs.saved import SavedModel

MOST_COLUMNS = 500
"""A model with more inputs, such as pixels, has no reasons that can be listed."""
SHUFFLES = 3


def parts_of(model: SavedModel) -> dict[str, slice]:
    """Return the columns that a model's inputs stand for, and which inputs each became; inputs without a schema are
    columns of their own."""
    if len(model.input_shape) != 1:
        raise FedtailError("reasons are columns of a table; this model takes images")
    schema = saved_schema(model.preprocessing)
    width = model.input_shape[0]
    if schema is None or schema.width != width:
        if width > MOST_COLUMNS:
            raise FedtailError(
                f"a model with {width:,} inputs has no reasons that can be listed (most: {MOST_COLUMNS})"
            )
        return {f"input {i + 1}": slice(i, i + 1) for i in range(width)}
    ends = itertools.accumulate(column.width for column in schema.columns)
    return {column.name: slice(end - column.width, end) for column, end in zip(schema.columns, ends, strict=True)}


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
    for i, at in enumerate(parts.values()):
        without = x.clone()
        without[:, at] = x[:, at].mean(0)
        out[:, i] = before - _log_odds(model, without, answers)
    return list(parts), out


def sentence(names: Sequence[str], moved: np.ndarray) -> str:
    """Say the three strongest reasons of one row: ``age +1.20, site -0.31``."""
    order = np.argsort(-np.abs(moved), kind="stable")[:3]
    return ", ".join(f"{names[i]} {moved[i]:+.2f}" for i in order if abs(moved[i]) >= 0.005)


def importance(model: SavedModel, judged: Judged) -> tuple[list[str], np.ndarray]:
    """Return the columns' names and (columns, C) the recall of each class that is lost when a column is shuffled; NaN
    for a class without cases. Rows that name sites are shuffled within each site."""
    rows, parts, c = judged.labelled, parts_of(model), len(judged.classes)
    without = np.zeros((len(parts), c))
    for here in rows.by_site().values() or [rows]:
        x, y = here.x, here.y
        assert x is not None and y is not None
        for (i, at), again in itertools.product(enumerate(parts.values()), range(SHUFFLES)):
            order = torch.from_numpy(generator(0, "importance", client=i, round=again).permutation(len(y)))
            other = x.clone()
            other[:, at] = x[order][:, at]
            answers = model.decision.answers(model.probabilities(other))
            without[i] += np.bincount(y[answers == y], minlength=c) / SHUFFLES
    counts = rows.scores.confusion
    cases = counts.sum(1)
    return list(parts), (np.diag(counts) - without) / np.where(cases > 0, cases, np.nan)


def _log_odds(model: SavedModel, x: Tensor, answers: np.ndarray) -> np.ndarray:
    p = model.probabilities(x)[np.arange(len(x)), answers].astype(np.float64).clip(1e-9, 1 - 1e-9)
    return np.asarray(np.log(p) - np.log1p(-p))
