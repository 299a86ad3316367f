"""One preprocessing for all sites, from federated sums: what pooled data would give, without pooling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedtail.data.tables import TableSchema, fit_cuts, fit_schema, merge_moments, merge_sketches, unpack_sketch
from fedtail.errors import FedtailError
from fedtail.federate.protocol.exchange import exchange
from fedtail.federate.protocol.transport import Phase, Transport
from fedtail.federate.protocol.wire import Parcel

IDENTITY: dict[str, Any] = {"scale": 1.0, "mean": [], "std": []}


def agree_on_preprocessing(
    transport: Transport, schema: dict[str, Any], sites: Mapping[int, str], seed: int, timeout: float
) -> dict[str, Any]:
    """The schema with all a job needs: input shape, transform, augmentation, preprocessing, model options.

    sites: client -> name of those that are there, whose sums count.
    """
    if schema["kind"] == "slice":
        return schema
    if schema.get("encoder"):  # scales pixels itself, as it was trained
        channels, height, width = schema["input_shape"]
        images = {"kind": "images", "size": [height, width], "channels": channels}
        return {**schema, "model_options": {}, "transform": IDENTITY, "preprocessing": images}
    answers = _ask(transport, sites, seed, timeout)
    try:
        if schema["kind"] == "table":
            scaled = from_moments(schema, answers)
            found = from_sketches(scaled, _ask(transport, sites, seed, timeout, scaling=scaled.to_dict()))
        else:
            found = from_pixel_sums(schema, answers)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FedtailError(f"a site sent statistics that cannot be read: {type(error).__name__} {error}") from None
    return {"augment": None, "model_options": {}, "transform": IDENTITY, "preprocessing": {}, **schema, **found}


def from_moments(schema: dict[str, Any], answers: Sequence[dict[str, Any]]) -> TableSchema:
    """Tables: the agreed schema, scaled by the merged column moments."""
    declared = TableSchema.from_dict(schema["table"])
    width = len(declared.numeric)
    moments = [np.array(a["moments"], dtype=np.float64).reshape(width, 4) for a in answers]
    return fit_schema(declared, merge_moments(moments))


def from_sketches(scaled: TableSchema, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tables: the scaled schema with the cuts that the added bin counts give."""
    columns = len(scaled.numeric)
    counts = merge_sketches([unpack_sketch(a["sketch"], columns) for a in answers], columns)
    fitted = fit_cuts(scaled, counts)
    return {"preprocessing": fitted.to_dict(), "input_shape": [fitted.width]}


def from_pixel_sums(schema: dict[str, Any], answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Images: mean and deviation per channel over all sites' training images."""
    pixels = sum(int(a["pixels"]) for a in answers)
    total = np.sum([np.array(a["sum"], dtype=np.float64) for a in answers], axis=0)
    square = np.sum([np.array(a["square"], dtype=np.float64) for a in answers], axis=0)
    if pixels <= 0 or not np.isfinite([*total, *square]).all():
        raise FedtailError("the sites' pixel sums are not finite, or there are no images")
    mean = total / pixels
    std = np.sqrt(np.maximum(square / pixels - mean**2, 1e-6))
    channels, height, width = schema["input_shape"]
    return {
        "transform": {"scale": 1 / 255, "mean": [round(v, 4) for v in mean], "std": [round(v, 4) for v in std]},
        "preprocessing": {"kind": "images", "size": [height, width], "channels": channels},
    }


def _ask(
    transport: Transport, sites: Mapping[int, str], seed: int, timeout: float, **more: Any
) -> list[dict[str, Any]]:
    parcels = {k: Parcel({"request": {"client": k, "seed": seed, **more}}) for k in sites}
    answers = exchange(transport, Phase.STATISTICS, parcels, lambda _, reply: dict(reply.meta["statistics"]), timeout)
    if answers.reasons:
        problems = [f"{sites[k]}: {reason}" for k, reason in answers.reasons.items()]
        raise FedtailError(f"the sites' statistics are incomplete: {'; '.join(problems)}")
    return list(answers.good.values())
