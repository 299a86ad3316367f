"""What crosses the wire, as plain bytes: JSON for the numbers and one safetensors blob per tensor.

Nothing is ever pickled. One blob per tensor, rather than one per message, lets a transport that stores objects
by content keep the global model once for all clients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import torch as safetensors_torch

from fedtail.core.candidates import Candidates
from fedtail.core.records import Task, Tensors, Update
from fedtail.federate.protocol.limits import ANY, Budget, WireError, open_json, open_tensor, real, whole

T = TypeVar("T")
Parts = dict[str, bytes]
"""A message as a transport sees it: ``meta`` is JSON, every other part one tensor under its name."""

META = "meta"
FORMAT = 1
"""Raised when the layout changes; a peer that speaks another format is refused with both numbers."""
MOST, MOST_PROBES, MOST_CANDIDATES, MOST_RIVALS = 1 << 40, 256, 1 << 16, 8
"""No count of samples or steps is larger, no local run has more probes, and no search compares more models at once."""


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
    parts = {META: json.dumps({**parcel.meta, "format": FORMAT}, allow_nan=False).encode()}
    packed = {} if packed is None else packed
    for name, tensor in parcel.tensors.items():
        ANY.kind(name)  # no name that no reader takes, such as one made of what a question says
        if id(tensor) not in packed:
            packed[id(tensor)] = safetensors_torch.save({"t": tensor.detach().cpu().contiguous()})
        parts[f"tensor/{name}"] = packed[id(tensor)]
    return parts


def unpack(parts: Mapping[str, bytes], budget: Budget = ANY) -> Parcel:
    """Bytes -> parcel; ``WireError`` for anything that is not one, or not what the budget declares."""
    budget.check(parts)
    if META not in parts:
        raise WireError("malformed message: it has no meta part")
    meta = open_json(parts[META], budget)
    if meta.pop("format", None) != FORMAT:
        raise WireError("malformed message: written by another version of fedtail; install the same one everywhere")
    return Parcel(meta, {} if "error" in meta else open_tensors(parts, budget))


def open_tensors(parts: Mapping[str, bytes], budget: Budget) -> Tensors:
    out: Tensors = {}
    for part, blob in parts.items():
        if part == META:
            continue
        name, prefix = part.removeprefix("tensor/"), part.split("/")[1:2]
        kind = budget.kind(name)
        if part == name or sum(p.split("/")[1:2] == prefix for p in parts) > kind.times:
            raise WireError(f"more tensors than the {kind.times} that were asked for", "unexpected")
        out[name] = open_tensor(name, blob, kind)
    return out


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
    if task.rival:
        fields["rival"] = task.rival
    return Parcel({**meta, "task": fields}, tensors)


def unpack_task(parcel: Parcel) -> Task:
    """The task as one client sees it: one row; ``WireError`` where it is none."""
    fields, x = parcel.meta.get("task"), parcel.tensors.get("x")
    probes = {name: value.numpy()[None] for name, value in under(parcel.tensors, "probe/").items()}
    if not isinstance(fields, dict) or x is None or "rate" not in probes:
        raise WireError("malformed task: no fields, no model or no rates")
    runs, reports = probes["rate"].shape, fields.get("reports")
    if len(runs) != 2 or not 1 <= runs[1] <= MOST_PROBES or any(p.shape != runs for p in probes.values()):
        raise WireError("malformed task: probes of several lengths, or none")
    if not isinstance(reports, list) or not all(isinstance(name, str) for name in reports):
        raise WireError("malformed task: reports that have no names")
    client = whole(fields.get("client"), 0, MOST, "client")
    message = under(parcel.tensors, "message/")
    return Task(
        round=whole(fields.get("round"), 0, MOST, "round"),
        x=x,
        clients=(client,),
        probes=probes,
        lr=real(fields.get("lr"), "lr"),
        rival=whole(fields.get("rival", 0), 0, MOST_RIVALS - 1, "rival"),
        broadcast=under(parcel.tensors, "broadcast/"),
        messages={client: message} if message else {},
        reports=frozenset(reports),
    )


def pack_update(update: Update, meta: dict[str, Any]) -> Parcel:
    """Everything a client uploads after local training."""
    tensors = {"delta": update.delta}
    tensors |= {f"report/{name}": torch.as_tensor(np.asarray(value)) for name, value in update.reports.items()}
    tensors |= {f"extra/{name}": value for name, value in update.extras.items()}
    loss = [value if math.isfinite(value) else None for value in update.loss]
    fields = {"client": update.client, "n_samples": update.n_samples, "steps": update.steps, "loss": loss}
    return Parcel({**meta, "update": fields}, tensors)


def unpack_update(parcel: Parcel, most_steps: float = float("inf")) -> Update:
    """Inverse of ``pack_update``; ``WireError`` if a field is missing, of the wrong kind or impossible."""
    fields = parcel.meta.get("update")
    if not isinstance(fields, dict) or "delta" not in parcel.tensors:
        raise WireError("malformed update: it has no fields, or no delta")
    steps, loss = fields.get("steps"), fields.get("loss")
    if not isinstance(steps, list) or not isinstance(loss, list) or not 1 <= len(steps) == len(loss) <= MOST_PROBES:
        raise WireError("malformed update: steps and losses are not two lists of one length")
    return Update(
        client=whole(fields.get("client"), 0, MOST, "client"),
        delta=parcel.tensors["delta"],
        n_samples=whole(fields.get("n_samples"), 0, MOST, "n_samples"),
        steps=tuple(whole(v, 0, min(most_steps, MOST), "local steps") for v in steps),
        loss=tuple(float("nan") if v is None else real(v, "loss") for v in loss),
        reports={name: value.numpy() for name, value in under(parcel.tensors, "report/").items()},
        extras=under(parcel.tensors, "extra/"),
    )


def pack_candidates(candidates: Candidates) -> Parcel:
    """K + 1 vectors that stand for 2^K models."""
    tensors = {"base": candidates.base, "patterns": torch.as_tensor(candidates.patterns)}
    tensors |= {f"direction/{a:03d}": direction for a, direction in enumerate(candidates.directions)}
    return Parcel({}, tensors)


def unpack_candidates(parcel: Parcel) -> Candidates:
    """Inverse of ``pack_candidates``; ``WireError`` for patterns that are not of these directions."""
    directions, base, patterns = (under(parcel.tensors, "direction/"), *map(parcel.tensors.get, ("base", "patterns")))
    if base is None or patterns is None or base.ndim != 1 or patterns.ndim != 2 or patterns.is_floating_point():
        raise WireError("malformed candidates: no base, or no patterns")
    rows = [directions[name] for name in sorted(directions)]
    fit = patterns.shape[1] == len(rows) and 1 <= len(patterns) <= MOST_CANDIDATES
    if not fit or bool((patterns.long().abs() > 1).any()):
        raise WireError(f"malformed candidates: {len(patterns)} patterns of {len(rows)} directions")
    if any(row.shape != base.shape or row.dtype != base.dtype for row in rows):
        raise WireError("malformed candidates: directions of another kind than their base")
    stacked = torch.stack(rows) if rows else base.new_zeros(0, base.numel())
    return Candidates(base, stacked, patterns.numpy())


def under(parts: Mapping[str, T], prefix: str) -> dict[str, T]:
    """The parts whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in parts.items() if name.startswith(prefix)}
