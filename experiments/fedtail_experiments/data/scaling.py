"""A published table as samples, scaled by statistics of its training rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from fedtail.core.random import generator
from fedtail.data.federation import Samples, stratified_holdout
from fedtail.data.registry import Pooled
from fedtail.data.tables.columns import Levels, Numbers
from fedtail.data.tables.encode import encode, strict_columns, with_scale
from fedtail.data.tables.schema import TableSchema


def published_table(
    name: str, schema: TableSchema, frame: pd.DataFrame, y: np.ndarray, where: str, how: str, share: float, seed: int,
    **about: Any,
) -> Pooled:  # fmt: skip
    """Return the samples of a table, a stratified ``share`` of them for testing; ``how``: see ``scaled``."""
    columns = strict_columns(schema, frame, where)
    train, test = stratified_holdout(y, np.arange(len(y)), share, generator(seed, f"{name}/test"))
    schema = scaled(schema, columns, train, how)
    samples = Samples(torch.from_numpy(encode(schema, columns)), torch.from_numpy(y))
    about = {"validation": 3 / 17, "preprocessing": schema.to_dict(), **about}
    return Pooled(samples.take(train), samples.take(test), name=name, **about)


def scaled(schema: TableSchema, columns: Mapping[str, Numbers | Levels], fit_on: np.ndarray, how: str) -> TableSchema:
    """Return the schema with numbers scaled by statistics of the rows ``fit_on`` only.

    ``standard``: (v - mean) / std; ``minmax``: (v - min) / (max - min). Columns that do not vary become 0.
    """
    numbers = [data.values for name in (c.name for c in schema.numeric) if isinstance(data := columns[name], Numbers)]
    part = np.stack(numbers, axis=1)[fit_on]
    if how == "standard":
        shift, scale = part.mean(0), part.std(0)
    elif how == "minmax":
        shift, scale = part.min(0), part.max(0) - part.min(0)
    else:
        raise ValueError(how)
    return with_scale(schema, shift, np.where(scale > 0, scale, 1.0))
