"""One preprocessing for all sites, from totals alone: what pooled data would give, without pooling.

A total is of integers, and what is a fine unit for one column is a coarse one for another. So first the sizes of
numbers are counted, in powers of two; then sums are taken in units of the largest; and again for what is left when the
mean is taken off, so that time stamps keep their digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedtail.core.totals import COUNTS, Totals
from fedtail.data.tables import TableSchema, fit_cuts, fit_schema
from fedtail.data.tables.sketch import BINS, column_sketch, grid
from fedtail.errors import FedtailError
from fedtail.federate.protocol.job import IDENTITY
from fedtail.federate.site.prepared import SiteData

LOW, SIZES = -64, 256
"""Sizes of numbers that are counted: 2^-64 and less, to 2^190 and more; zeros do not count."""
UNITS = 38
"""Bits of the largest number in a sum, which has room for four million of them."""


def common_preprocessing(
    totals: Totals, schema: Mapping[str, Any], data: Mapping[int, SiteData], seed: int, noise: float = 0.0
) -> dict[str, Any]:
    """The schema with all a job needs: input shape, transform, augmentation, preprocessing, model options. ``data``:
    what this process has of the sites, by client. ``noise``: multiplier of the noise in every total."""
    if schema["kind"] == "slice":
        return dict(schema)
    whole = {"augment": None, "model_options": {}, "transform": IDENTITY, "preprocessing": {}, **schema}
    if schema["kind"] == "images":
        channels, height, width = schema["input_shape"]
        whole["preprocessing"] = {"kind": "images", "size": [height, width], "channels": channels}
        if schema.get("encoder"):  # scales pixels itself, as it was trained
            return whole
    columns = {k: one.columns(k, seed) for k, one in data.items()}
    if schema["kind"] == "images":
        moments = column_moments(totals, columns, channels, noise)
        if not moments[:, 0].all():
            raise FedtailError("the sites have no images")
        std = np.sqrt(np.maximum(moments[:, 3] / moments[:, 0], 1e-6))
        scale = {"scale": 1 / 255, "mean": moments[:, 2].round(4).tolist(), "std": std.round(4).tolist()}
        return {**whole, "transform": scale}
    declared = TableSchema.from_dict(schema["table"])
    width = len(declared.numeric)
    scaled = fit_schema(declared, column_moments(totals, columns, width, noise)) if width else declared

    def sketch(client: int) -> np.ndarray:
        pairs = zip(columns[client], scaled.numeric, strict=True)
        return np.concatenate([column_sketch(v, grid(c.mean or 0.0, c.std or 1.0)) for v, c in pairs])

    counts = totals.total(width * BINS, sketch, limit=COUNTS, reach=math.sqrt(2 * width)) if width else np.zeros(0)
    fitted = fit_cuts(scaled, np.maximum(counts, 0).astype(np.int64).reshape(width, BINS))
    return {**whole, "preprocessing": fitted.to_dict(), "input_shape": [fitted.width]}


def column_moments(
    totals: Totals, columns: Mapping[int, Sequence[np.ndarray]], width: int, noise: float = 0.0
) -> np.ndarray:
    """(width, 4) of all sites together: numbers, missing ones, mean, sum of squared deviations from the mean."""
    sizes = _sizes(totals, columns, width, noise)
    first = _sums(totals, columns, sizes, power=1)
    known, missing = first[:, 0], first[:, 1]
    mean = np.where(known > 0, first[:, 2] / np.maximum(known, 1), 0.0)
    apart = {k: [values - m for values, m in zip(own, mean, strict=True)] for k, own in columns.items()}
    second = _sums(totals, apart, _sizes(totals, apart, width, noise), power=2)
    return np.stack([known, missing, mean, np.maximum(second[:, 2], 0.0)], axis=1)


def _sizes(totals: Totals, columns: Mapping[int, Sequence[np.ndarray]], width: int, noise: float) -> np.ndarray:
    """(width,) powers of two that all numbers of a column are below; all that noise does not hide, where there is
    some."""
    reach = math.sqrt(2 * width)

    def counted(client: int) -> np.ndarray:
        rows = []
        for values in columns[client]:
            there = values[np.isfinite(values) & (values != 0)]
            place = (np.frexp(there)[1] - LOW).clip(0, SIZES - 1)
            rows.append(np.bincount(place, minlength=SIZES))
        return np.concatenate(rows)

    counts = totals.total(width * SIZES, counted, limit=COUNTS, reach=reach).reshape(width, SIZES)
    there = counts >= max(1.0, 6 * noise * reach)
    top = np.where(there.any(axis=1), SIZES - 1 - there[:, ::-1].argmax(axis=1), 0)
    return np.asarray(np.ldexp(1.0, top + LOW))


def _sums(totals: Totals, columns: Mapping[int, Sequence[np.ndarray]], sizes: np.ndarray, power: int) -> np.ndarray:
    """(width, 3): numbers, missing ones, and the sum of a power of the numbers, none taken as larger than its size."""
    width, unit = len(sizes), float(1 << UNITS)

    def summed(client: int) -> np.ndarray:
        rows = []
        for values, size in zip(columns[client], sizes, strict=True):
            there = values[~np.isnan(values)]
            inside = np.clip(there / size, -1.0, 1.0) ** power
            rows.append([len(there), len(values) - len(there), int(np.rint(inside * unit).astype(np.int64).sum())])
        return np.array(rows, dtype=np.int64).ravel()

    reach = np.tile([1.0, 1.0, 2.0 * unit], width) * math.sqrt(3 * width)
    total = totals.total(3 * width, summed, reach=reach).reshape(width, 3).astype(np.float64)
    total[:, :2] = np.maximum(total[:, :2], 0.0)
    total[:, 2] *= sizes**power / unit
    return total
