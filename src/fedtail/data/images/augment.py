"""Random crop and flip, drawn once per sample copy on the host and applied on whatever device the batch is.

Drawing is apart from applying, so that every engine applies the very same augmentation.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.errors import one_of

AUGMENTS = ("crop-flip", "flip")
PAD = 4


def check_augment(name: str | None) -> None:
    if name is not None and name not in AUGMENTS:
        raise one_of("augmentation", name, (*AUGMENTS, "none"))


def draw_augment(name: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """(n, 3) int64: vertical shift, horizontal shift (0..8, 4 = none), flip (0/1)."""
    out = np.full((n, 3), PAD, dtype=np.int64)
    if name == "crop-flip":
        out[:, :2] = rng.integers(0, 2 * PAD + 1, size=(n, 2))
    out[:, 2] = rng.integers(0, 2, size=n)
    return out


def apply_augment(x: Tensor, draws: Tensor) -> Tensor:
    """Crop and flip images. x: (N, C, H, W); draws: (N, 3) on the same device.

    Meant for normalized images: the 4 pixels of padding are zeros, so the border is of the mean colour, as the
    padding of a convolution is. A black border would shift the statistics of every GroupNorm, in training only.
    """
    n, _, h, w = x.shape
    rows = torch.arange(h, device=x.device) + draws[:, :1]
    cols = torch.arange(w, device=x.device).expand(n, w)
    cols = torch.where(draws[:, 2:] > 0, w - 1 - cols, cols) + draws[:, 1:2]
    padded = F.pad(x, (PAD, PAD, PAD, PAD))
    return padded[torch.arange(n, device=x.device)[:, None, None], :, rows[:, :, None], cols[:, None, :]].permute(
        0, 3, 1, 2
    )
