"""Masked sums on the wire: what the server orders, and what all members must have been asked alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors import torch as safetensors_torch

from fedtail.core.masks import Fixed, Release
from fedtail.core.records import Task, Tensors
from fedtail.federate.protocol.faults import CodedError
from fedtail.federate.protocol.wire import Parcel

LEAST = 3
"""Sites of a sum, at least, whatever a policy says: with two, each knows the other's numbers."""
ORDER, MASKED, RELEASE = "sum", "masked", "release"
"""Where an order, a masked vector and a release are in a message."""
OWN = ("client", "commit", ORDER)
"""What a server may tell members differently."""


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
    weights: dict[str, int] = field(default_factory=dict)
    """Member -> training samples, for a sum of updates."""
    probes: dict[str, list[list[float]]] = field(default_factory=dict)
    """What each member tries, for a sum of updates: rows in the order of members."""
    limit: float = 0.0
    """For a sum of updates: no coordinate of the sum is larger."""
    clip: float = 0.0
    """With noise: the norm to which a member cuts its update before weighing it."""
    noise: float = 0.0
    """Deviation of the sum's noise, once ``enough`` members have added their shares."""
    enough: int = 0
    """Members without which the sum must not be unmasked: fewer shares would be too little noise."""

    @property
    def fixed(self) -> Fixed:
        return Fixed(self.limit)

    def to_json(self) -> dict[str, Any]:
        return vars(self)

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
                weights={str(k): int(v) for k, v in told.get("weights", {}).items()},
                probes={str(k): [[float(x) for x in row] for row in v] for k, v in told.get("probes", {}).items()},
                limit=float(told.get("limit", 0.0)),
                clip=float(told.get("clip", 0.0)),
                noise=float(told.get("noise", 0.0)),
                enough=int(told.get("enough", 0)),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            raise SumError("malformed", "the server's order for a masked sum cannot be read") from None


def content(parcel: Parcel) -> bytes:
    """A digest of what a member was asked, but for what is its own. It enters the masks: a server that asks two members
    different things gets no sum."""
    found = hashlib.blake2b(digest_size=32)
    told = {k: v for k, v in parcel.meta.items() if k not in OWN}
    if "task" in told:
        told["task"] = {k: v for k, v in told["task"].items() if k != "client"}
    order = parcel.meta.get(ORDER, {})
    told["order"] = {k: v for k, v in order.items() if k not in ("adverts",)}
    found.update(json.dumps(told, sort_keys=True).encode())
    for name in sorted(parcel.tensors):
        if not name.startswith(("probe/", "message/")):  # a member's own: rows of the order, and nothing
            found.update(name.encode() + b"\0" + safetensors_torch.save({"t": parcel.tensors[name].contiguous()}))
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


def probe_rows(task: Task) -> dict[str, list[list[float]]]:
    """The rows of all of a task's clients, for an order."""
    return {name: np.asarray(values, dtype=np.float64).tolist() for name, values in task.probes.items()}
