"""Where tensors live: a device that is misspelt or not there is noticed before anything is computed."""

from __future__ import annotations

import torch

from fedtail.errors import FedtailError, one_of


def check_device(key: str, name: str) -> None:
    """Raise for a device that torch does not know or that is not there. ``key``: the setting, for the message."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise one_of(key, name, ("cpu", "cuda", "cuda:0", "mps")) from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise FedtailError(f"{key} = {name!r} but torch finds no CUDA device; use cpu")
        if (device.index or 0) >= count:
            raise FedtailError(f"{key} = {name!r} but torch finds {count} CUDA device(s), cuda:0 to cuda:{count - 1}")
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise FedtailError(f"{key} = {name!r} but torch finds no such device; use cpu")
