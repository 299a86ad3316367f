"""Updates in fewer bytes: ``bf16`` (half) or ``int8`` (a quarter), where ``deploy.compress`` asks for it.

What rounding leaves of an update stays at the site and is added to the next one (error feedback: Seide et al., 1-bit
SGD, Interspeech 2014; Karimireddy et al., ICML 2019), so that it is late, not lost. A run is then no longer the
simulator's bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.core.records import Tensors

BLOCK = 1024
"""Values that share one scale."""
MARGIN = 0.98
"""Share of the method's norm bound that a compressed update may use, so that rounding does not exceed it."""


def encode(values: Tensor, how: str) -> Tensors:
    """What travels of float32 values (P, n)."""
    if how == "bf16":
        return {"delta": values.to(torch.bfloat16)}
    blocks = F.pad(values, (0, -values.shape[1] % BLOCK)).view(len(values), -1, BLOCK)
    scale = blocks.abs().amax(-1) / 127
    steps = (blocks / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)).round().clamp(-127, 127)
    return {"delta": steps.to(torch.int8).view(len(values), -1)[:, : values.shape[1]].contiguous(), "scale": scale}


def decode(tensors: Tensors) -> Tensor:
    """(P, n) float32 of what travelled, compressed or not; ``ValueError`` if its parts do not fit."""
    delta = tensors["delta"]
    if delta.dtype != torch.int8:
        return delta.float() if delta.dtype == torch.bfloat16 else delta
    scale, n = tensors["scale"], delta.shape[-1]
    if delta.ndim != 2 or tuple(scale.shape) != (len(delta), -(-n // BLOCK)) or scale.dtype != torch.float32:
        raise ValueError(f"scales of shape {tuple(scale.shape)} for an update of shape {tuple(delta.shape)}")
    blocks = F.pad(delta, (0, -n % BLOCK)).view(len(delta), -1, BLOCK).float()
    return (blocks * scale.unsqueeze(-1)).view(len(delta), -1)[:, :n].contiguous()


def compress(delta: Tensor, left: Tensor | None, bounds: list[float | None], how: str) -> tuple[Tensors, Tensor]:
    """What is sent of an update (P, n) and of what was ``left`` (n,) before, and what is left now (P, n).

    bounds: the method's norm bound of each run, which the sum is kept within.
    """
    whole = delta if left is None else delta + left
    wanted = whole.clone()
    for row, bound in zip(wanted, bounds, strict=True):
        norm = float(torch.linalg.vector_norm(row.double()))
        if bound is not None and norm > MARGIN * bound:
            row *= MARGIN * bound / norm
    sent = encode(wanted, how)
    return sent, whole - decode(sent)
