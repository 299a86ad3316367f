"""One preprocessing for all sites, from federated sums: what pooled data would give, without pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from fedtail.core.robust import capped, fair_share
from fedtail.data.tables import TableSchema, fit_cuts, fit_schema, merge_moments, merge_sketches, unpack_sketch
from fedtail.data.tables.sketch import BINS, COUNT, check_moments, tempered
from fedtail.errors import FedtailError
from fedtail.federate.protocol.exchange import exchange
from fedtail.federate.protocol.job import IDENTITY
from fedtail.federate.protocol.limits import Budget, WireError, whole
from fedtail.federate.protocol.transport import Phase, Transport
from fedtail.federate.protocol.wire import MOST, Parcel

T = TypeVar("T")


def agree_on_preprocessing(
    transport: Transport, schema: dict[str, Any], names: Sequence[str], seed: int, timeout: float
) -> dict[str, Any]:
    """The schema with all a job needs: input shape, transform, augmentation, preprocessing, model options. The sums of
    a single site have a bounded effect, among three or more."""
    if schema["kind"] == "slice":
        return schema
    if schema.get("encoder"):  # scales pixels itself, as it was trained
        channels, height, width = schema["input_shape"]
        images = {"kind": "images", "size": [height, width], "channels": channels}
        return {**schema, "model_options": {}, "transform": IDENTITY, "preprocessing": images}
    ask = partial(_ask, transport, names, seed, timeout)
    try:
        if schema["kind"] == "table":
            declared = TableSchema.from_dict(schema["table"])
            width = len(declared.numeric)
            budget = Budget(meta=(1 << 16) + 128 * width, items=1024 + 8 * width)
            moments = ask(partial(read_moments, columns=width), budget)
            scaled = fit_schema(declared, merge_moments(tempered(list(moments.values()))))
            budget = Budget(meta=(1 << 16) + 40 * BINS * width, items=1024 + 4 * BINS * width)
            counts = ask(partial(read_sketch, moments=moments), budget, scaling=scaled.to_dict())
            found = from_sketches(scaled, list(counts.values()))
        else:
            found = from_pixel_sums(schema, list(ask(partial(read_pixels, channels=schema["input_shape"][0])).values()))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FedtailError(f"the sites' statistics do not match their schema ({type(error).__name__})") from None
    return {"augment": None, "model_options": {}, "transform": IDENTITY, "preprocessing": {}, **schema, **found}


def read_moments(client: int, told: dict[str, Any], columns: int) -> np.ndarray:
    """(columns, 4) of a site."""
    part = np.array(told["moments"], dtype=np.float64).reshape(columns, -1)
    check_moments(part, columns, MOST)
    return part


def read_sketch(client: int, told: dict[str, Any], moments: Mapping[int, np.ndarray]) -> np.ndarray:
    """(columns, BINS) of a site, which are no more values than it had said."""
    said = moments[client][:, COUNT]
    counts = unpack_sketch(told["sketch"], len(said))
    if (counts < 0).any() or (counts.sum(axis=1, dtype=np.float64) > said).any():
        raise WireError("bin counts of more values than its moments had", "out-of-range")
    return counts


def read_pixels(client: int, told: dict[str, Any], channels: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Pixels, and the sums of their values and squares per channel, which are of bytes."""
    pixels = whole(told["pixels"], 0, 1 << 60, "pixels")
    total, square = (np.array(told[name], dtype=np.float64) for name in ("sum", "square"))
    if total.shape != (channels,) or square.shape != (channels,):
        raise WireError("pixel sums of other channels", "unexpected")
    if not ((total >= 0) & (total <= 255.0 * pixels) & (square >= 0)).all():
        raise WireError("pixel sums that no image has", "out-of-range")
    if not ((square <= 255.0 * total + 1) & (square >= 0.999 * total * (total / max(pixels, 1)))).all():
        raise WireError("pixel sums that no image has", "out-of-range")
    return pixels, total, square


def from_sketches(scaled: TableSchema, sites: Sequence[np.ndarray]) -> dict[str, Any]:
    """Tables: the scaled schema with the cuts that the added bin counts give, none with more than a fair share."""
    columns = len(scaled.numeric)
    sizes = np.array([counts.sum(axis=1, dtype=np.float64) for counts in sites])
    kept = np.stack([capped(column, fair_share(int((column > 0).sum()))) for column in sizes.T], axis=1)
    parts = [
        np.floor(counts * (now / np.maximum(before, 1))[:, None]).astype(np.int64) if (now < before).any() else counts
        for counts, now, before in zip(sites, kept, sizes, strict=True)
    ]
    fitted = fit_cuts(scaled, merge_sketches(parts, columns))
    return {"preprocessing": fitted.to_dict(), "input_shape": [fitted.width]}


def from_pixel_sums(schema: dict[str, Any], answers: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Images: mean and deviation per channel over all sites' training images, none with more than a fair share."""
    sizes = np.array([n for n, _, _ in answers], dtype=np.float64)
    kept = capped(sizes, fair_share(int((sizes > 0).sum())))
    scale = np.where(kept < sizes, kept / np.maximum(sizes, 1), 1.0)
    pixels = float(kept.sum())
    total = np.sum([s * values for s, (_, values, _) in zip(scale, answers, strict=True)], axis=0)
    square = np.sum([s * values for s, (_, _, values) in zip(scale, answers, strict=True)], axis=0)
    if pixels <= 0:
        raise FedtailError("the sites have no images")
    mean = total / pixels
    std = np.sqrt(np.maximum(square / pixels - mean**2, 1e-6))
    channels, height, width = schema["input_shape"]
    return {
        "transform": {"scale": 1 / 255, "mean": [round(v, 4) for v in mean], "std": [round(v, 4) for v in std]},
        "preprocessing": {"kind": "images", "size": [height, width], "channels": channels},
    }


def _ask(
    transport: Transport,
    names: Sequence[str],
    seed: int,
    timeout: float,
    read: Callable[[int, dict[str, Any]], T],
    budget: Budget = Budget(),
    **more: Any,
) -> dict[int, T]:
    """What ``read`` makes of the statistics of each site; ``FedtailError`` if there are none that can be."""
    parcels = {k: Parcel({"request": {"client": k, "seed": seed, **more}}) for k in range(len(names))}

    def taken(client: int, reply: Parcel) -> T:
        try:
            return read(client, reply.meta["statistics"])
        except WireError:
            raise
        except (FedtailError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"statistics that cannot be ({type(error).__name__})", "out-of-range") from None

    answers = exchange(transport, Phase.STATISTICS, parcels, taken, timeout, budget)
    if answers.reasons:
        problems = [f"{names[k]}: {reason}" for k, reason in answers.reasons.items()]
        raise FedtailError(f"the sites' statistics are incomplete: {'; '.join(problems)}")
    return answers.good
