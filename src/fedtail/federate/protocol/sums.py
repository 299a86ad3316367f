"""Masked sums on the wire: what the server orders, and what all members must have been asked alike."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors import torch as safetensors_torch

from fedtail.core.masks import Fixed, Release
from fedtail.core.records import DIVERGED, Tensors, Update
from fedtail.federate.protocol.faults import CodedError
from fedtail.federate.protocol.wire import Parcel

LEAST = 3
"""Sites of a sum, at least, whatever a policy says: with two, each knows the other's numbers."""
ORDER, MASKED, RELEASE = "sum", "masked", "release"
"""Where an order, a masked vector and a release are in a message."""
OWN = ("client", "commit", ORDER)
"""What a server may tell members differently."""
LOSS_LIMIT = 64.0
"""Largest mean loss that is told under masks."""
COORDINATE_LIMIT = 64.0
"""Largest coordinate of a masked update, where the method has no bound of its own; what is larger is cut."""
SLACK = 1 + 1e-4
"""More noise than the bound asks for."""


class SumError(CodedError):
    """An order for a sum that a site does not take part in."""


@dataclass(frozen=True)
class Order:
    """A sum that the server asks for. Members are named; all get the same order."""

    number: int
    """Rises from sum to sum; a site answers each once."""
    members: tuple[str, ...]
    adverts: dict[str, dict[str, str]]
    """Member -> its key for the run, with its signature."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Member -> training samples, for a sum of updates."""
    cap: float = math.inf
    """A member weighs as many samples as it has, but no more than this."""
    probes: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """What each member tries, for a sum of updates."""
    limit: float = 0.0
    """For a sum of updates: no coordinate of the sum is larger."""
    clip: float = 0.0
    """With shares of noise: the norm to which a member cuts its update before weighing it."""

    @property
    def weights(self) -> dict[str, float]:
        """Member -> its part in the sum; all together 1."""
        parts = {name: min(float(size), self.cap) for name, size in self.sizes.items()}
        return {name: part / sum(parts.values()) for name, part in parts.items()}

    @property
    def fixed(self) -> Fixed:
        return Fixed(self.limit)

    def to_json(self) -> dict[str, Any]:
        return vars(self) if math.isfinite(self.cap) else {k: v for k, v in vars(self).items() if k != "cap"}

    @classmethod
    def from_json(cls, told: Any) -> Order:
        """``SumError`` for anything that is not an order."""
        try:
            return cls(
                number=int(told["number"]),
                members=tuple(sorted(str(name) for name in told["members"])),
                adverts={
                    str(k): {"key": str(v["key"]), "signature": str(v["signature"])} for k, v in told["adverts"].items()
                },
                sizes={str(k): int(v) for k, v in told.get("sizes", {}).items()},
                cap=float(told.get("cap", math.inf)),
                probes={
                    str(name): {str(k): [float(x) for x in row] for k, row in rows.items()}
                    for name, rows in told.get("probes", {}).items()
                },
                limit=float(told.get("limit", 0.0)),
                clip=float(told.get("clip", 0.0)),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            raise SumError("malformed", "the server's request for a masked sum cannot be read") from None


def content(parcel: Parcel) -> bytes:
    """A digest of what a member was asked, but for what is its own. It enters the masks: a server that asks two members
    different things gets no sum."""
    order = {k: v for k, v in parcel.meta.get(ORDER, {}).items() if k != "adverts"}
    shared = {k: v for k, v in parcel.tensors.items() if not k.startswith(("probe/", "message/"))}  # rows of the order
    return _digest({**parcel.meta, "order": order}, shared)


def question(parcel: Parcel) -> bytes:
    """A digest of what this member was asked, whoever else is in the sum: of a model and a round, it answers one."""
    order = {k: v for k, v in parcel.meta.get(ORDER, {}).items() if k in ("cap", "clip", "limit")}
    return _digest({**parcel.meta, "order": order}, parcel.tensors)


def _digest(meta: Mapping[str, Any], tensors: Tensors) -> bytes:
    told = {k: v for k, v in meta.items() if k not in OWN}
    if "task" in told:
        told["task"] = {k: v for k, v in told["task"].items() if k != "client"}
    found = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=32)
    for name in sorted(tensors):
        found.update(name.encode() + b"\0" + safetensors_torch.save({"t": tensors[name].contiguous()}))
    return found.digest()


def flat_counts(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """(n,) uint64 of named counts, in the order of names."""
    return np.concatenate([np.asarray(tensors[name]).ravel() for name in sorted(tensors)]).astype(np.uint64)


def named_counts(total: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Inverse of ``flat_counts``."""
    out, place = {}, 0
    for name in sorted(shapes):
        size = int(np.prod(shapes[name]))
        out[name] = total[place : place + size].astype(np.int64).reshape(shapes[name])
        place += size
    return out


def size_of_counts(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(int(np.prod(shape)) for shape in shapes.values())


def as_tensor(values: np.ndarray) -> torch.Tensor:
    """Unsigned integers as the signed ones of the same bits, which every reader of tensors knows."""
    return torch.from_numpy(values.view(np.int32 if values.dtype == np.uint32 else np.int64).copy())


def as_masked(tensors: Tensors, size: int, dtype: Any) -> np.ndarray:
    """(size,) unsigned of a reply; ``ValueError`` if it is something else."""
    values = tensors[MASKED]
    wanted = torch.int32 if np.dtype(dtype) == np.uint32 else torch.int64
    if tuple(values.shape) != (size,) or values.dtype != wanted:
        raise ValueError(f"{values.dtype} of shape {tuple(values.shape)}, expected {wanted} ({size},)")
    return np.asarray(values.numpy().view(dtype))


def release_to_json(release: Release) -> dict[str, Any]:
    return {"sealed": release.sealed.hex(), "pieces": {k: v.hex() for k, v in release.pieces.items()}}


def release_from_json(told: Any, others: Collection[str]) -> Release:
    """``ValueError`` or ``KeyError`` for what is not a release for these others."""
    pieces = {str(k): bytes.fromhex(v) for k, v in told["pieces"].items()}
    if set(pieces) != set(others):
        raise ValueError("a release for other survivors")
    return Release(bytes.fromhex(told["sealed"]), pieces)


def enough(n: int, dropouts: float) -> int:
    """Of ``n`` members, how many shares of noise must do."""
    return n - math.floor(dropouts * n + 1e-9)


def sum_deviation(order: Order, noise: float) -> float:
    """Deviation of the noise in a sum of updates: the multiplier times how far one member can move it. The slack covers
    rounding to fixed point."""
    return noise * SLACK * order.clip * max(order.weights.values())


def flat_update(order: Order, me: str, update: Update, *, diverged: bool) -> np.ndarray:
    """(m,) float64: what a member adds: its weighted update, then its weighted losses, then whether runs diverged; the
    last two are scaled so that they fit the update's limit."""
    weight, unit = order.weights[me], order.limit / LOSS_LIMIT
    delta = update.delta.detach().cpu().double()
    if order.clip:
        delta = delta * (order.clip / delta.norm(dim=1, keepdim=True).clamp_min(order.clip))
    failed = update.reports.get(DIVERGED, np.zeros(len(delta))) if diverged else np.empty(0)
    beside = np.concatenate([np.clip(np.asarray(update.loss), 0.0, LOSS_LIMIT), failed]) * unit
    return weight * np.concatenate([delta.numpy().ravel(), beside])


def split_update(order: Order, total: np.ndarray, left: Collection[str], runs: int, n: int) -> tuple[np.ndarray, ...]:
    """Means over those ``left``: (P, n) updates, (P,) losses and the (P,) weight of runs that diverged, which may be
    empty."""
    weight = sum(order.weights[name] for name in left)
    mean, unit = order.fixed.decode(total) / weight, order.limit / LOSS_LIMIT
    delta, beside = mean[: runs * n].reshape(runs, n), mean[runs * n :] / unit
    return delta, beside[:runs], beside[runs:]
