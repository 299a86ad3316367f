"""What crosses the wire, as plain bytes: JSON for the numbers and one safetensors blob per tensor.

Nothing is ever pickled. One blob per tensor, rather than one per message, lets a transport that stores objects
by content keep the global model once for all clients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch

from fedtail.core.candidates import Candidates
from fedtail.core.records import Task, Tensors, Update
from fedtail.errors import FedtailError
from fedtail.federate.protocol.compress import decode

Parts = dict[str, bytes]
"""A message as a transport sees it: ``meta`` is JSON, every other part one tensor under its name."""

META = "meta"
FORMAT = 1
"""Raised when the layout changes; a peer that speaks another format is refused with both numbers."""


class WireError(FedtailError):
    """A message that cannot be read."""

    code = "malformed"


@dataclass(frozen=True)
class Parcel:
    """A message as the two ends see it."""

    meta: dict[str, Any] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)


def pack(parcel: Parcel, packed: dict[int, bytes] | None = None) -> Parts:
    """Parcel -> bytes. Tensors travel as they are, bit by bit, from the CPU.

    ``packed`` keeps the bytes of each tensor, by its identity, for the next parcel that has it: a model for a hundred
    clients is in memory once.
    """
    parts = {META: json.dumps({**parcel.meta, "format": FORMAT}).encode()}
    packed = {} if packed is None else packed
    for name, tensor in parcel.tensors.items():
        if id(tensor) not in packed:
            packed[id(tensor)] = safetensors_torch.save({"t": tensor.detach().cpu().contiguous()})
        parts[f"tensor/{name}"] = packed[id(tensor)]
    return parts


def unpack(parts: Mapping[str, bytes]) -> Parcel:
    """Bytes -> parcel; ``WireError`` for anything that is not one."""
    try:
        meta = json.loads(parts[META])
        if not isinstance(meta, dict):
            raise WireError("malformed message: its meta part is not an object")
        if meta.pop("format", None) != FORMAT:
            raise WireError("malformed message: written by another version of fedtail; install the same one everywhere")
        tensors = {
            name.removeprefix("tensor/"): safetensors_torch.load(bytes(blob))["t"]
            for name, blob in parts.items()
            if name != META
        }
    except (KeyError, ValueError, SafetensorError) as error:
        raise WireError(f"malformed message: {type(error).__name__} {error}") from error
    return Parcel(meta, tensors)


def error_parts(reason: str) -> Parts:
    """A reply that says why there is none."""
    return pack(Parcel({"error": reason}))


def size_of(parts: Mapping[str, bytes]) -> int:
    """Bytes of a message's parts."""
    return sum(map(len, parts.values()))


# -- the round's records -------------------------------------------------------------------------------------


def pack_task(task: Task, row: int, meta: dict[str, Any]) -> Parcel:
    """What client ``task.clients[row]`` gets: the model, its own row of the probes, the method's messages."""
    client = task.clients[row]
    tensors = {"x": task.x}
    tensors |= {f"probe/{name}": torch.as_tensor(values[row].copy()) for name, values in task.probes.items()}
    tensors |= {f"broadcast/{name}": value for name, value in task.broadcast.items()}
    tensors |= {f"message/{name}": value for name, value in task.messages.get(client, {}).items()}
    fields = {"round": task.round, "lr": task.lr, "reports": sorted(task.reports), "client": client}
    return Parcel({**meta, "task": fields}, tensors)


def unpack_task(parcel: Parcel) -> Task:
    """The task as one client sees it: one row."""
    fields = parcel.meta["task"]
    client = int(fields["client"])
    message = _under(parcel.tensors, "message/")
    return Task(
        round=int(fields["round"]),
        x=parcel.tensors["x"],
        clients=(client,),
        probes={name: value.numpy()[None] for name, value in _under(parcel.tensors, "probe/").items()},
        lr=float(fields["lr"]),
        broadcast=_under(parcel.tensors, "broadcast/"),
        messages={client: message} if message else {},
        reports=frozenset(fields["reports"]),
    )


def pack_update(update: Update, meta: dict[str, Any]) -> Parcel:
    """Everything a client uploads after local training."""
    tensors = {"delta": update.delta}
    tensors |= {f"report/{name}": torch.as_tensor(np.asarray(value)) for name, value in update.reports.items()}
    tensors |= {f"extra/{name}": value for name, value in update.extras.items()}
    fields = {"client": update.client, "n_samples": update.n_samples, "steps": update.steps, "loss": update.loss}
    return Parcel({**meta, "update": fields}, tensors)


def unpack_update(parcel: Parcel) -> Update:
    """Inverse of ``pack_update``; ``WireError`` if a field is missing or of the wrong kind."""
    try:
        fields = parcel.meta["update"]
        return Update(
            client=int(fields["client"]),
            delta=decode(parcel.tensors),
            n_samples=int(fields["n_samples"]),
            steps=tuple(int(v) for v in fields["steps"]),
            loss=tuple(float(v) for v in fields["loss"]),
            reports={name: value.numpy() for name, value in _under(parcel.tensors, "report/").items()},
            extras=_under(parcel.tensors, "extra/"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"malformed update: {type(error).__name__} {error}") from error


def pack_candidates(candidates: Candidates, meta: dict[str, Any]) -> Parcel:
    """K + 1 vectors that stand for 2^K models."""
    tensors = {"base": candidates.base, "patterns": torch.as_tensor(candidates.patterns)}
    tensors |= {f"direction/{a:03d}": direction for a, direction in enumerate(candidates.directions)}
    return Parcel(meta, tensors)


def unpack_candidates(parcel: Parcel) -> Candidates:
    """Inverse of ``pack_candidates``."""
    directions = _under(parcel.tensors, "direction/")
    base = parcel.tensors["base"]
    rows = [directions[name] for name in sorted(directions)]
    stacked = torch.stack(rows) if rows else base.new_zeros(0, base.numel())
    return Candidates(base, stacked, parcel.tensors["patterns"].numpy())


def _under(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
