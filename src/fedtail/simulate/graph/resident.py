"""Samples on the device, once for all runs of this process that have the same ones."""

from __future__ import annotations

import hashlib
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fedtail.data.federation import Federation

_HELD: WeakValueDictionary[tuple[str, str, str], Tensor] = WeakValueDictionary()


def shared_samples(federation: Federation, device: torch.device) -> tuple[Tensor, Tensor]:
    """Samples and labels of the pool and, behind them, of the test set. They are not to be changed."""
    pool, test = federation.pool, federation.test
    return (
        _shared("x", torch.cat([pool.x, test.x.to(pool.x.dtype)]), device),
        _shared("y", torch.cat([pool.y, test.y]), device),
    )


def _shared(kind: str, values: Tensor, device: torch.device) -> Tensor:
    shape = f"{tuple(values.shape)} {values.dtype}"
    content = hashlib.blake2b(values.contiguous().view(torch.uint8).numpy().data, digest_size=16).hexdigest()
    key = (kind + shape, content, str(device))
    held = _HELD.get(key)
    if held is None:
        held = _HELD[key] = values.to(device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other runs read it on other streams
    return held
