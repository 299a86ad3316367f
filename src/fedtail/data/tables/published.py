"""Tables that others published, with a fixed vocabulary: every file has the same columns, and what differs is an error.

Version 0.2 and older wrote such a table's preprocessing as a "layout"; ``from_layout`` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fedtail.data.tables.columns import Levels, Numbers
from fedtail.data.tables.schema import Column, TableSchema
from fedtail.errors import FedtailError


def published(
    label: str, classes: Sequence[str], numeric: Sequence[str], vocabulary: Mapping[str, Sequence[str]]
) -> TableSchema:
    """Return the schema of numeric columns, then one-hot columns over a fixed vocabulary."""
    columns = [Column(name, "numeric") for name in numeric]
    columns += [Column(name, "category", tuple(levels)) for name, levels in vocabulary.items()]
    return TableSchema(label, tuple(classes), tuple(columns), clip=None, strict=True)


def strict_columns(schema: TableSchema, frame: pd.DataFrame, where: str) -> dict[str, Numbers | Levels]:
    """Return the columns as arrays; a value that is no number or stands outside the vocabulary is an error."""
    missing = [c.name for c in schema.columns if c.name not in frame]
    if missing:
        raise FedtailError(f"{where} has no column {missing[0]!r}; is it the official file with its header?")
    out: dict[str, Numbers | Levels] = {}
    for column in schema.columns:
        series = frame[column.name]
        if column.kind == "numeric":
            # single precision, as such tables have always been stored
            values = pd.to_numeric(series, errors="coerce").to_numpy(dtype=np.float64).astype(np.float32)
            if not np.isfinite(values).all():
                row = int(np.flatnonzero(~np.isfinite(values))[0])
                raise FedtailError(
                    f"{where}: {column.name} = {series.iloc[row]!r} in data row {row + 1} is not a number"
                )
            out[column.name] = Numbers(values.astype(np.float64), False)
        else:
            codes = pd.Index(column.levels).get_indexer(pd.Index(series)).astype(np.int32)
            if (codes < 0).any():
                value = series.iloc[int(np.flatnonzero(codes < 0)[0])]
                count = len(column.levels)
                raise FedtailError(f"{where}: {column.name} = {value!r} is not one of the {count} published values")
            out[column.name] = Levels(codes, list(column.levels))
    return out


def from_layout(raw: Mapping[str, Any]) -> TableSchema:
    """Return the schema of a layout in a run folder of version 0.2 or older, which named neither label nor classes."""
    schema = published("label", ("0", "1"), raw["numeric"], raw["vocabulary"])
    return with_scale(schema, raw["shift"], raw["scale"])


def with_scale(schema: TableSchema, shift: Sequence[float] | np.ndarray, scale: Any) -> TableSchema:
    n = len(schema.numeric)
    fitted = [replace(c, mean=float(m), std=float(s)) for c, m, s in zip(schema.numeric, shift, scale, strict=True)]
    return replace(schema, columns=(*fitted, *schema.columns[n:]))
