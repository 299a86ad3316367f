"""Image files -> one uint8 tensor: decoded in parallel, brought to one size, cached.

The cache is keyed by the listing (names, sizes, modification times) and the settings, so a changed, added or removed
file gives a new entry and nothing is ever stale.
"""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedtail.cores import usable_cores
from fedtail.data.sources import cache_root
from fedtail.errors import FedtailError

EXTENSIONS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp"})
LARGEST = 224
"""Longest side that images get unless a size is given."""
GREY_MODES = frozenset({"1", "L", "LA", "I", "I;16", "I;16B", "I;16L", "F"})
MOST_THREADS = 8
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning)
"""What Pillow raises for a file that it cannot read, or that is too large to be opened safely."""


@dataclass(frozen=True)
class Decoded:
    """x: (N, C, H, W) uint8; ``bad``: positions of files that could not be read, whose rows are zero."""

    x: Tensor
    bad: dict[int, str]


def read_image(path: Path, size: tuple[int, int], channels: int) -> np.ndarray:
    """(C, H, W) uint8. Turned upright, alpha dropped, 16-bit and float images scaled to 8 bits, resized if needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        warnings.filterwarnings("ignore", "Palette images with Transparency")  # alpha is dropped, as it should be
        with Image.open(path) as file:
            return image_pixels(ImageOps.exif_transpose(_to_8_bits(file)), size, channels)


def image_pixels(image: Image.Image, size: tuple[int, int], channels: int) -> np.ndarray:
    """(C, H, W) uint8 of an opened image."""
    image = image.convert("L" if channels == 1 else "RGB")
    if (image.height, image.width) != size:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR, reducing_gap=3.0)
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def survey(files: Sequence[Path]) -> list[tuple[int, int, bool] | str]:
    """(height, width, is grey) of each file from its header, or why it cannot be opened."""

    def look(path: Path) -> tuple[int, int, bool] | str:
        try:
            with Image.open(path) as image:
                rotates = image.format in ("JPEG", "TIFF", "WEBP")  # asking a PNG would decode it
                turned = rotates and image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
                width, height = image.size[::-1] if turned else image.size
                return height, width, image.mode in GREY_MODES
        except UNREADABLE as error:
            return _reason(error)

    with ThreadPoolExecutor(min(MOST_THREADS, usable_cores())) as pool:
        return list(pool.map(look, files))


def choose_size(
    shapes: Sequence[tuple[int, int]], size: int | tuple[int, int] | None, largest: int = LARGEST
) -> tuple[tuple[int, int], str]:
    """((height, width), a note if images are resized). Without ``size``: the size they all share, else the median
    square, and no side beyond ``largest``."""
    if size is not None:
        wanted = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        if min(wanted) < 4 or max(wanted) > 2048:
            raise FedtailError(f"data.size = {size!r} is outside [4, 2048]")
        differ = sum(s != wanted for s in shapes)
        return wanted, f"{differ:,} images were resized to {wanted[0]}x{wanted[1]}" if differ else ""
    common = Counter(shapes).most_common(1)[0][0]
    if len(set(shapes)) == 1:
        if max(common) <= largest:
            return common, ""
        scale = largest / max(common)
        chosen = (max(4, round(common[0] * scale)), max(4, round(common[1] * scale)))
    else:
        side = int(min(largest, max(4, np.median([min(s) for s in shapes]))))
        chosen = (side, side)
    return chosen, f"images were resized to {chosen[0]}x{chosen[1]}; set data.size to choose another size"


def decode(root: Path, files: Sequence[Path], size: tuple[int, int], channels: int, *, cache: bool = True) -> Decoded:
    """All files at one size, from the cache where the same files were decoded before."""
    entry = cache_root() / "images" / f"{_key(root, files, f'{size} {channels}')}.safetensors" if cache else Path()
    if cache and entry.exists():
        with suppress(SafetensorError, OSError, KeyError):  # a damaged entry is decoded again
            return Decoded(load_file(entry)["x"], {})
    x = np.zeros((len(files), channels, *size), dtype=np.uint8)
    bad: dict[int, str] = {}

    def work(i: int) -> None:
        try:
            x[i] = read_image(files[i], size, channels)
        except UNREADABLE as error:
            bad[i] = _reason(error)

    with ThreadPoolExecutor(min(MOST_THREADS, usable_cores())) as pool:
        list(pool.map(work, range(len(files))))
    tensor = torch.from_numpy(x)
    if cache and not bad:
        write_cache(entry, x=tensor)
    return Decoded(tensor, dict(sorted(bad.items())))


def write_cache(entry: Path, **tensors: Tensor) -> None:
    """Write atomically; a cache that cannot be written is no error."""
    with suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=entry.parent) as scratch:
            part = Path(scratch) / "x"
            save_file(tensors, part)
            part.replace(entry)


def _key(root: Path, files: Sequence[Path], settings: str) -> str:
    digest = hashlib.sha256(f"1 {settings}\n".encode())
    for path in files:
        stat = path.stat()
        digest.update(f"{path.relative_to(root).as_posix()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Deep grey images in 8 bits: 16-bit integers by their range, floats from [0, 1] or [0, 255]."""
    if image.mode not in ("I", "I;16", "I;16B", "I;16L", "F"):
        return image
    values: Any = np.asarray(image, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("pixels that are not finite")
    top = 1.0 if image.mode == "F" and values.max() <= 1 else 255.0 if values.max() <= 255 else 65535.0
    return Image.fromarray(np.clip(np.rint(values * (255.0 / top)), 0, 255).astype(np.uint8))


def _reason(error: BaseException) -> str:
    return "is not an image" if isinstance(error, UnidentifiedImageError) else " ".join(str(error).split())[:120]
