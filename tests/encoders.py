"""Encoders and images for tests: nothing is downloaded, an image takes a fraction of a millisecond."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

TINY = "tests.encoders:tiny"


def tiny() -> nn.Module:
    """Three blocks with fixed random weights, BatchNorm included: 32 features of images of 16 pixels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in ((3, 8), (8, 16), (16, 32))
        ]
        for block in blocks:
            block[1].running_mean.normal_(0, 0.1)
            block[1].running_var.uniform_(0.5, 1.5)
    network = nn.Sequential(*blocks)
    network.image_size = 16  # type: ignore[assignment]
    return network


def broken() -> nn.Module:
    raise ValueError("no weights today")


def draw(kind: int, rng: np.random.Generator, side: int = 20) -> Image.Image:
    """Noise with horizontal stripes, vertical stripes or a bright corner."""
    pixels = rng.normal(90, 25, (side, side))
    if kind == 0:
        pixels[::4] += 90
    elif kind == 1:
        pixels[:, ::4] += 90
    else:
        pixels[: side // 2, : side // 2] += 90
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def draw_folder(root: Path, counts: dict[str, tuple[int, ...]], seed: int = 0) -> Path:
    """``root/site/class/*.png``. counts: site -> images per class."""
    rng = np.random.default_rng(seed)
    for site, numbers in counts.items():
        for kind, n in enumerate(numbers):
            folder = root / site / f"kind{kind}"
            folder.mkdir(parents=True)
            for i in range(n):
                draw(kind, rng).save(folder / f"{i}.png")
    return root
