"""Scaling of a published table by statistics of its training rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedtail.data.tables.columns import Levels, Numbers
from fedtail.data.tables.encode import with_scale
from fedtail.data.tables.schema import TableSchema


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
