"""One preprocessing for all sites: what pooled data would give, without pooling. From totals alone where nobody is
trusted, else from statistics of single sites, of which none can spoil it.

A total is of integers, and what is a fine unit for one column is a coarse one for another. So first the sizes of
numbers are counted, in powers of two; then sums are taken in units of the largest; and again for what is left when the
mean is taken off, so that time stamps keep their digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedtail.core.robust import fairly
from fedtail.core.totals import COUNTS, Totals
from fedtail.data.tables.schema import TableSchema
from fedtail.data.tables.sketch import (
    BINS,
    COUNT,
    M2,
    MEAN,
    check_moments,
    column_sketch,
    fit_cuts,
    fit_schema,
    grid,
    merge_moments,
    merge_sketches,
    pack_sketch,
    tempered,
    unpack_sketch,
)
from fedtail.data.tables.sketch import column_moments as moments_of
from fedtail.errors import FedtailError
from fedtail.federate.protocol.job import IDENTITY
from fedtail.federate.protocol.limits import Budget, WireError
from fedtail.federate.protocol.masks import FINE
from fedtail.federate.protocol.transport import Phase, Transport, exchange
from fedtail.federate.protocol.wire import MOST, Parcel
from fedtail.federate.site.own import check_declared
from fedtail.federate.site.prepared import SiteData

LOW, SIZES = -64, 256
"""Sizes of numbers that are counted: 2^-64 and less, to 2^190 and more; zeros do not count."""
UNITS = 38
"""Bits of the largest number in a sum, which has room for four million of them."""


def preprocess(
    schema: Mapping[str, Any],
    moments: Callable[[int], np.ndarray],
    sketch: Callable[[TableSchema], np.ndarray],
) -> dict[str, Any]:
    """The schema with all a job needs: input shape, transform, augmentation, preprocessing, model options. ``moments``:
    number of columns -> (columns, 4); ``sketch``: scaled schema -> (columns, BINS)."""
    if schema["kind"] == "slice":
        return dict(schema)
    whole = {"augment": None, "model_options": {}, "transform": IDENTITY, "preprocessing": {}, **schema}
    if schema["kind"] == "images":
        channels, height, width = schema["input_shape"]
        whole["preprocessing"] = {"kind": "images", "size": [height, width], "channels": channels}
        if schema.get("encoder"):  # scales pixels itself, as it was trained
            return whole
        found = moments(channels)
        if not found[:, COUNT].all():
            raise FedtailError("the sites have no images")
        std = np.sqrt(np.maximum(found[:, M2] / found[:, COUNT], 1e-6))
        scale = {"scale": 1 / 255, "mean": found[:, MEAN].round(4).tolist(), "std": std.round(4).tolist()}
        return {**whole, "transform": scale}
    declared = TableSchema.from_dict(schema["table"])
    width = len(declared.numeric)
    scaled = fit_schema(declared, moments(width)) if width else declared
    fitted = fit_cuts(scaled, sketch(scaled) if width else np.zeros((0, BINS), dtype=np.int64))
    return {**whole, "preprocessing": fitted.to_dict(), "input_shape": [fitted.width]}


def sketches(columns: Sequence[np.ndarray], scaled: TableSchema, least: int = 1) -> np.ndarray:
    """(columns, BINS) counts of a site's numbers; bins of fewer than ``least`` are joined."""
    pairs = zip(columns, scaled.numeric, strict=True)
    return np.array([column_sketch(v, grid(c.mean or 0.0, c.std or 1.0), min_count=least) for v, c in pairs])


# -- from totals -------------------------------------------------------------------------------------------------------


def common_preprocessing(
    totals: Totals, schema: Mapping[str, Any], data: Mapping[int, SiteData], seed: int, noise: float = 0.0
) -> dict[str, Any]:
    """``preprocess`` from totals. ``data``: what this process has of the sites, by client; ``noise``: multiplier of the
    noise in every total."""
    columns = {k: one.columns(k, seed) for k, one in data.items()}
    each = math.prod(schema["input_shape"][1:]) if schema["kind"] == "images" else 1

    def sketch(scaled: TableSchema) -> np.ndarray:
        width = len(scaled.numeric)

        def part(client: int) -> np.ndarray:
            """A bin says where at least so many rows of the site are; under noise, one row is hidden as it is."""
            return sketches(columns[client], scaled, 1 if noise else data[client].min_count).ravel()

        counts = totals.total(width * BINS, part, limit=COUNTS, reach=math.sqrt(2 * width))
        return np.maximum(counts, 0).astype(np.int64).reshape(width, BINS)

    return preprocess(schema, lambda width: column_moments(totals, columns, width, noise, each), sketch)


def column_moments(
    totals: Totals, columns: Mapping[int, Sequence[np.ndarray]], width: int, noise: float = 0.0, each: int = 1
) -> np.ndarray:
    """(width, 4) of all sites together: numbers, missing ones, mean, sum of squared deviations from the mean. ``each``:
    how many numbers of a column are of one row: of an image, all its pixels."""
    sizes = _sizes(totals, columns, width, noise, each)
    first = _sums(totals, columns, sizes, 1, each)
    known, missing = first[:, 0], first[:, 1]
    mean = np.where(known > 0, first[:, 2] / np.maximum(known, 1), 0.0)
    apart = {k: [values - m for values, m in zip(own, mean, strict=True)] for k, own in columns.items()}
    second = _sums(totals, apart, _sizes(totals, apart, width, noise, each), 2, each)
    return np.stack([known, missing, mean, np.maximum(second[:, 2], 0.0)], axis=1)


def _sizes(
    totals: Totals, columns: Mapping[int, Sequence[np.ndarray]], width: int, noise: float, each: int
) -> np.ndarray:
    """(width,) powers of two that all numbers of a column are below; all that noise does not hide, where there is
    some."""
    reach = each * math.sqrt(2 * width)

    def counted(client: int) -> np.ndarray:
        rows = []
        for values in columns[client]:
            there = values[np.isfinite(values) & (values != 0)]
            place = (np.frexp(there)[1] - LOW).clip(0, SIZES - 1)
            rows.append(np.bincount(place, minlength=SIZES))
        return np.concatenate(rows)

    counts = totals.total(width * SIZES, counted, limit=COUNTS, reach=reach).reshape(width, SIZES)
    spread = max(noise * reach, FINE * math.sqrt(totals.n_clients)) if noise else 0.0
    there = counts >= max(1.0, 6 * spread)
    top = np.where(there.any(axis=1), SIZES - 1 - there[:, ::-1].argmax(axis=1), 0)
    return np.asarray(np.ldexp(1.0, top + LOW))


def _sums(
    totals: Totals, columns: Mapping[int, Sequence[np.ndarray]], sizes: np.ndarray, power: int, each: int
) -> np.ndarray:
    """(width, 3): numbers, missing ones, and the sum of a power of the numbers, none taken as larger than its size."""
    width, unit = len(sizes), float(1 << UNITS)

    def summed(client: int) -> np.ndarray:
        rows = []
        for values, size in zip(columns[client], sizes, strict=True):
            there = values[~np.isnan(values)]
            inside = np.clip(there / size, -1.0, 1.0) ** power
            rows.append([len(there), len(values) - len(there), int(np.rint(inside * unit).astype(np.int64).sum())])
        return np.array(rows, dtype=np.int64).ravel()

    reach = np.tile([1.0, 1.0, 2.0 * unit], width) * (each * math.sqrt(3 * width))
    total = totals.total(3 * width, summed, reach=reach).reshape(width, 3).astype(np.float64)
    total[:, :2] = np.maximum(total[:, :2], 0.0)
    total[:, 2] *= sizes**power / unit
    return total


# -- from single sites -------------------------------------------------------------------------------------------------


def agree_on_preprocessing(
    transport: Transport, schema: Mapping[str, Any], names: Sequence[str], seed: int, timeout: float
) -> dict[str, Any]:
    """``preprocess`` at a server that sites trust with statistics of their own. Those of a single site have a bounded
    effect, among three or more."""
    sizes: dict[int, np.ndarray] = {}

    def ask(read: Callable[[int, Any], np.ndarray], budget: Budget, **more: Any) -> dict[int, np.ndarray]:
        def taken(client: int, reply: Parcel) -> np.ndarray:
            try:
                return read(client, reply.meta["statistics"])
            except (FedtailError, KeyError, TypeError, ValueError, OverflowError) as error:
                raise WireError(f"statistics that cannot be ({type(error).__name__})", "out-of-range") from None

        parcels = {k: Parcel({"request": {"client": k, "seed": seed, **more}}) for k in range(len(names))}
        answers = exchange(transport, Phase.STATISTICS, parcels, taken, timeout, budget)
        if answers.reasons:
            problems = "; ".join(f"{names[k]}: {reason}" for k, reason in answers.reasons.items())
            raise FedtailError(f"the sites' statistics are incomplete: {problems}")
        return answers.good

    def moments(width: int) -> np.ndarray:
        def read(client: int, told: Any) -> np.ndarray:
            part = np.array(told, dtype=np.float64).reshape(width, -1)
            check_moments(part, width, MOST)
            sizes[client] = part[:, COUNT]
            return part

        found = ask(read, Budget(meta=(1 << 16) + 128 * width, items=1024 + 8 * width))
        return merge_moments(tempered(list(found.values())))

    def sketch(scaled: TableSchema) -> np.ndarray:
        width = len(scaled.numeric)

        def read(client: int, told: Any) -> np.ndarray:
            counts = unpack_sketch(told, width)
            if (counts < 0).any() or (counts.sum(axis=1, dtype=np.float64) > sizes[client]).any():
                raise WireError("bin counts of more values than its moments had", "out-of-range")
            return counts

        budget = Budget(meta=(1 << 16) + 40 * BINS * width, items=1024 + 4 * BINS * width)
        return merge_sketches(fair(list(ask(read, budget, scaling=scaled.to_dict()).values())), width)

    try:
        return preprocess(schema, moments, sketch)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FedtailError(f"the sites' statistics do not match their schema ({type(error).__name__})") from None


def fair(sites: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(columns, BINS) counts of each site, in no column more than a fair share."""
    sizes = np.array([counts.sum(axis=1, dtype=np.float64) for counts in sites])
    kept = np.stack([fairly(column) for column in sizes.T], axis=1)
    return [
        np.floor(counts * (now / np.maximum(before, 1))[:, None]).astype(np.int64) if (now < before).any() else counts
        for counts, now, before in zip(sites, kept, sizes, strict=True)
    ]


def tell(data: SiteData, request: Mapping[str, Any]) -> list[Any]:
    """A site's answer: moments of its columns or, with a common scaling, how many numbers are in each bin."""
    columns = data.columns(int(request["client"]), int(request["seed"]))
    if "scaling" not in request:
        return [moments_of(values, min_count=data.min_count).tolist() for values in columns]
    scaled, own = (
        TableSchema.from_dict(told, "the server's scaling") for told in (request["scaling"], data.schema()["table"])
    )
    check_declared(scaled, own)
    return pack_sketch(sketches(columns, scaled, data.min_count))
