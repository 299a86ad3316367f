"""Tables with a declared layout: numeric columns first, then one-hot columns over a fixed vocabulary.

The vocabulary is part of the layout, so that every site, file and later prediction has the same columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedtail.errors import FedtailError


@dataclass(frozen=True)
class Layout:
    """Names of numeric columns and, per categorical column, its values in order."""

    numeric: tuple[str, ...]
    vocabulary: Mapping[str, tuple[str, ...]]

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        return (*self.numeric, *(f"{c}={v}" for c, values in self.vocabulary.items() for v in values))

    def encode(self, frame: pd.DataFrame, source: str) -> np.ndarray:
        """(N, F) float32, unscaled. A value outside the vocabulary is an error that names it."""
        missing = [c for c in (*self.numeric, *self.vocabulary) if c not in frame]
        if missing:
            raise FedtailError(f"{source} has no column {missing[0]!r}; is it the official file with its header?")
        out = np.zeros((len(frame), len(self.features)), dtype=np.float32)
        for j, name in enumerate(self.numeric):
            values = pd.to_numeric(frame[name], errors="coerce").to_numpy(dtype=np.float64)
            if not np.isfinite(values).all():
                row = int(np.flatnonzero(~np.isfinite(values))[0])
                raise FedtailError(
                    f"{source}: {name} = {frame[name].iloc[row]!r} in data row {row + 1} is not a number"
                )
            out[:, j] = values
        offset = len(self.numeric)
        for name, allowed in self.vocabulary.items():
            codes = pd.Index(allowed).get_indexer(pd.Index(frame[name]))
            if (codes < 0).any():
                value = frame[name].iloc[int(np.flatnonzero(codes < 0)[0])]
                raise FedtailError(f"{source}: {name} = {value!r} is not one of the {len(allowed)} published values")
            out[np.arange(len(frame)), offset + codes] = 1.0
            offset += len(allowed)
        return out


def scale_columns(x: np.ndarray, n_numeric: int, fit_on: np.ndarray, how: str) -> dict[str, list[float]]:
    """Scale the first ``n_numeric`` columns in place with statistics of the rows ``fit_on`` only.

    ``standard``: (v - mean) / std; ``minmax``: (v - min) / (max - min). Constant columns become 0.
    Returns the shift and scale used, for the saved preprocessing.
    """
    part = x[fit_on, :n_numeric].astype(np.float64)
    if how == "standard":
        shift, scale = part.mean(0), part.std(0)
    elif how == "minmax":
        shift, scale = part.min(0), part.max(0) - part.min(0)
    else:
        raise ValueError(how)
    scale = np.where(scale > 0, scale, 1.0)
    x[:, :n_numeric] = (x[:, :n_numeric] - shift) / scale
    return {"shift": shift.tolist(), "scale": scale.tolist()}


def describe(layout: Layout, scaling: dict[str, list[float]]) -> dict[str, Any]:
    """JSON form of a layout and its scaling."""
    return {
        "kind": "layout",
        "numeric": list(layout.numeric),
        "vocabulary": {name: list(values) for name, values in layout.vocabulary.items()},
        **scaling,
    }


def label_codes(values: Sequence[Any], classes: Sequence[str], source: str) -> np.ndarray:
    """(N,) class index of each label; an unknown label is an error."""
    codes = np.asarray(pd.Index(classes).get_indexer(pd.Index(list(values))), dtype=np.int64)
    if (codes < 0).any():
        unknown = values[int(np.flatnonzero(codes < 0)[0])]
        raise FedtailError(f"{source}: label {unknown!r} is not one of {', '.join(map(repr, classes))}")
    return codes
