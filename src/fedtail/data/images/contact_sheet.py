"""A sheet of sample images, one row per class: what the model will see, before augmentation and normalisation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from fedtail.core.random import generator
from fedtail.data.federation import Federation
from fedtail.errors import FedtailError

ROWS = 20
CELL = 96
"""Images smaller than this are enlarged by a whole factor."""
LABEL = 150


def save_contact_sheet(federation: Federation, path: str | Path, columns: int = 8, seed: int = 0) -> Path:
    """Draw ``columns`` random training images of each class (the first 20 classes) to an image file."""
    shape = federation.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise FedtailError(f"--samples needs images, but samples of {federation.name!r} have shape {shape}")
    height, width = (int(v * max(1, CELL // max(shape[1:]))) for v in shape[1:])
    index = np.concatenate(federation.train)
    y = federation.pool.y.numpy()[index]
    rows = min(federation.n_classes, ROWS)
    sheet = Image.new("RGB", (LABEL + columns * (width + 4), rows * (height + 4)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for c in range(rows):
        members = index[y == c]
        picked = generator(seed, "contact sheet", c).permutation(members)[:columns]
        top = c * (height + 4) + 2
        draw.text((4, top + height / 2 - 16), federation.classes[c][:20], fill="black", font=font)
        draw.text((4, top + height / 2 + 1), f"{len(members):,} samples", fill="gray", font=font)
        for j, i in enumerate(picked):
            tile = _image(federation.pool.x[int(i)], federation.transform.scale)
            sheet.paste(tile.resize((width, height), Image.Resampling.NEAREST), (LABEL + j * (width + 4), top))
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(target)
    except (OSError, ValueError) as error:
        raise FedtailError(f"cannot write --samples {str(path)!r}: {error}; use a name such as samples.png") from None
    return target


def _image(x: torch.Tensor, scale: float) -> Image.Image:
    """(C, H, W) stored values as an 8-bit picture."""
    pixels = x.numpy() if x.dtype == torch.uint8 else (x.float() * scale * 255).round().clamp(0, 255).byte().numpy()
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
