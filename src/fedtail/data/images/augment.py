"""Random crop and flip, drawn once per sample copy on the host and applied on whatever device the batch is.

Drawing is apart from applying, so that every engine applies the very same augmentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.errors import one_of

AUGMENTS = ("crop-flip", "flip")
PAD = 4
BASIC = 3
"""Numbers that a crop and flip is drawn as."""


@dataclass(frozen=True)
class Views:
    """How images become two views, weak and strong, where a method asks for them; other data are their own views."""

    width: int
    """Numbers that a view is drawn as: ``BASIC`` of its crop and flip, and those of its changes."""
    draw: Callable[[str | None, int, np.random.Generator, np.random.Generator], np.ndarray]
    """(augmentation, n, its generator, that of strong views) -> (2n, width) int64, weak and strong in turn."""
    change: Callable[[Tensor, Tensor], Tensor]
    """What is done to cropped and flipped images, (N, C, H, W), by the numbers of their changes."""


VIEWS: dict[int, Views] = {}
"""By width, since an engine knows no more than the numbers; packages of methods add theirs."""


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
    """Crop and flip images. x: (N, C, H, W); draws: (N, 3) on the same device, or wider with views among them.

    Meant for normalized images: the 4 pixels of padding are zeros, so the border is of the mean colour, as the
    padding of a convolution is. A black border would shift the statistics of every GroupNorm, in training only.
    """
    if draws.shape[1] > BASIC:
        return VIEWS[draws.shape[1]].change(apply_augment(x, draws[:, :BASIC]), draws[:, BASIC:])
    n, _, h, w = x.shape
    rows = torch.arange(h, device=x.device) + draws[:, :1]
    cols = torch.arange(w, device=x.device).expand(n, w)
    cols = torch.where(draws[:, 2:] > 0, w - 1 - cols, cols) + draws[:, 1:2]
    padded, image = F.pad(x, (PAD, PAD, PAD, PAD)), torch.arange(n, device=x.device)[:, None, None]
    return padded[image, :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)
