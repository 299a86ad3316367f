"""Weak and strong views of images: RandAugment's operations and a cut-out square, for methods that compare the two."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.data.images.augment import BASIC, PAD, VIEWS, Views, draw_augment

STRONG = 9
"""Numbers that a strong view has beside those of its crop and flip."""
LEVELS = 1000
"""Strengths are drawn as whole numbers from -LEVELS to LEVELS."""
OPERATIONS = 8
"""Rotation, shear and shift (each of two), brightness, contrast, saturation; see ``apply_strong``."""


def draw_views(name: str | None, n: int, rng: np.random.Generator, strong_rng: np.random.Generator) -> np.ndarray:
    """(2n, 12) int64: each sample's weak view, which is ``name``'s or the sample itself, and its strong view, one after
    the other."""
    out = np.zeros((n, 2, BASIC + STRONG), dtype=np.int64)
    out[:, :, :2] = PAD
    if name is not None:
        out[:, 0, :BASIC] = draw_augment(name, n, rng)
        out[:, 1, :BASIC] = draw_augment(name, n, strong_rng)
    out[:, 1, BASIC:] = draw_strong(n, strong_rng)
    return out.reshape(2 * n, -1)


def draw_strong(n: int, rng: np.random.Generator) -> np.ndarray:
    """(n, 9) int64: the strengths of all operations, of which two random ones are not 0; then where a square is cut
    out, in 1 .. LEVELS along each side as one number (row LEVELS + column), 0 for nowhere."""
    levels = rng.integers(-LEVELS, LEVELS + 1, size=(n, OPERATIONS))
    chosen = rng.random((n, OPERATIONS)).argsort(1) < 2
    place = rng.integers(0, LEVELS, size=(n, 2))
    return np.concatenate([np.where(chosen, levels, 0), place[:, :1] * LEVELS + place[:, 1:] + 1], 1)


def apply_strong(x: Tensor, draws: Tensor) -> Tensor:
    """RandAugment's operations on normalized images, and a cut-out square of half their side. x: (N, C, H, W).

    Up to: 30 degrees of rotation, shear .3, shift of .3 of the side; brightness by .9 deviations, contrast and
    saturation by factors within .1 and 1.9. All are computed for all, those not drawn by strength 0, so that a recorded
    graph can replay them; a row of zeros leaves its image as it is, bit for bit."""
    n, channels, h, w = x.shape
    level = draws[:, :OPERATIONS].to(x.dtype) / LEVELS
    angle, shear_x, shear_y, shift_x, shift_y, bright, contrast, colour = level.unbind(1)
    angle = angle * (torch.pi / 6)
    cos, sin = torch.cos(angle), torch.sin(angle)
    row0 = torch.stack([cos + 0.3 * shear_x * sin, -sin + 0.3 * shear_x * cos, 0.6 * shift_x], 1)
    row1 = torch.stack([0.3 * shear_y * cos + sin, -0.3 * shear_y * sin + cos, 0.6 * shift_y], 1)
    grid = F.affine_grid(torch.stack([row0, row1], 1), [n, channels, h, w], align_corners=False)
    moved = F.grid_sample(x, grid, align_corners=False)
    still = (level[:, :5] == 0).all(1).view(-1, 1, 1, 1)
    out = torch.where(still, x, moved)
    centre = out.mean(dim=(1, 2, 3), keepdim=True)
    grey = out.mean(dim=1, keepdim=True)
    factor, tint = (1 + 0.9 * v.view(-1, 1, 1, 1) for v in (contrast, colour))
    out = torch.where(contrast.view(-1, 1, 1, 1) == 0, out, centre + factor * (out - centre))
    out = torch.where(colour.view(-1, 1, 1, 1) == 0, out, grey + tint * (out - grey))
    out = out + 0.9 * bright.view(-1, 1, 1, 1)
    place = draws[:, OPERATIONS] - 1
    row, column = (place // LEVELS) * h // LEVELS, (place % LEVELS) * w // LEVELS
    near_row = (torch.arange(h, device=x.device) - row.unsqueeze(1)).abs() <= h // 4
    near_column = (torch.arange(w, device=x.device) - column.unsqueeze(1)).abs() <= w // 4
    cut = (place >= 0).view(-1, 1, 1) & near_row.unsqueeze(2) & near_column.unsqueeze(1)
    return out.masked_fill(cut.unsqueeze(1), 0.0)


WEAK_AND_STRONG = Views(BASIC + STRONG, draw_views, apply_strong)
VIEWS[WEAK_AND_STRONG.width] = WEAK_AND_STRONG
