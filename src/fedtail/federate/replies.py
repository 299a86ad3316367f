"""What sites answer, as the engine of a real federation takes it: every reply is read, checked and made its own here.

``WireError`` for what cannot be; the site then counts as one that did not answer.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedtail.core.decisions import Decision
from fedtail.core.records import DIVERGED, Task, Update
from fedtail.federate.protocol.limits import WireError, whole
from fedtail.federate.protocol.wire import MOST, Parcel, unpack_update


def read_update(client: int, parcel: Parcel, task: Task, most: float, size: int) -> Update:
    """The update of a reply that belongs to this client and round; ``WireError`` otherwise. ``most``: local steps that
    are possible; ``size``: training samples, as the handshake has it."""
    update, answered = unpack_update(parcel, most), parcel.meta.get("round")
    if update.client != client or answered != task.round:
        raise WireError(
            f"reply is for client {update.client} in round {whole(answered, 0, MOST, 'round')}, expected client "
            f"{client} in round {task.round}"
        )
    if update.n_samples != size:
        raise WireError(f"it says it has {update.n_samples} training samples, in the handshake {size}", "changed")
    runs = len(update.delta) if update.delta.ndim else 0
    if not runs == len(update.steps) == len(update.loss):
        raise WireError(f"malformed update: {runs} runs, {len(update.steps)} step counts, {len(update.loss)} losses")
    if extra := set(update.reports) - {*task.reports, DIVERGED}:
        raise WireError(f"{len(extra)} reports that were not asked for", "unexpected")
    return update


def read_counts(client: int, parcel: Parcel, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Counts of the expected shape, none of them negative; ``WireError`` otherwise."""
    counts = read_tensor(client, parcel, name)
    if tuple(counts.shape) != shape or counts.dtype != torch.int64 or bool((counts < 0).any()):
        raise WireError(f"malformed counts: {counts.dtype} of shape {tuple(counts.shape)}, expected int64 {shape}")
    return counts.numpy()


def read_decision(client: int, parcel: Parcel, n_classes: int) -> Decision:
    """A site's own decision; ``WireError`` for one that is none."""
    try:
        found = Decision.from_json(parcel.meta.get("decision") or {})
        found.check(n_classes)
    except (TypeError, ValueError, AttributeError) as error:
        raise WireError(f"malformed decision: {error}") from None
    return found


def read_tensor(client: int, parcel: Parcel, name: str) -> Tensor:
    """A tensor the reply must have; ``WireError`` otherwise."""
    if name not in parcel.tensors:
        raise WireError(f"malformed reply: it has no {name!r}")
    return parcel.tensors[name]
