"""ELPV: electroluminescence images of solar cells, defect level 0 to 3, two module types as sites.

Read through the same image path as a user's own folders, either from ``elpv/<mono,poly>/<level0..3>/*.png`` or from
the official layout ``elpv/labels.csv`` + ``elpv/images/``. CC BY-NC-SA 4.0: evaluation only.
"""

from __future__ import annotations

from pathlib import Path

from fedtail.data.images.folders import Listing, from_listing, scan
from fedtail.data.registry import Pooled
from fedtail.data.sources import SOURCES, Source, locate
from fedtail.errors import FedtailError

SOURCES["elpv"] = Source(
    "ELPV solar cells",
    "elpv",
    ("labels.csv", "mono", "poly"),
    "https://github.com/zae-bayern/elpv-dataset",
    "CC BY-NC-SA 4.0",
    any_file=True,
    by_hand="labels.csv and the folder images/",
)


def elpv(
    size: int | None = None,
    test_fraction: float = 0.15,
    cache: bool = True,
    seed: int = 0,
    data_dir: str | None = None,
) -> Pooled:
    """2,624 grey images (1,508 / 295 / 106 / 715 of level 0 to 3); ``level0`` is the background class."""
    folder = locate("elpv", data_dir)
    listing = official_listing(folder) if (folder / "labels.csv").is_file() else scan(folder)
    return from_listing(
        listing, "elpv", size=size, background="level0", test_fraction=test_fraction, cache=cache, seed=seed
    )


def official_listing(folder: Path) -> Listing:
    """``labels.csv`` has one image per line: path, defect probability (0, 1/3, 2/3, 1), module type."""
    files, classes, sites = [], [], []
    for number, line in enumerate((folder / "labels.csv").read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            name, probability, kind = line.split()
            level = round(float(probability) * 3)
        except ValueError:
            raise FedtailError(
                f"{folder / 'labels.csv'} line {number} is not 'path probability type': {line!r}"
            ) from None
        files.append(folder / name)
        classes.append(f"level{level}")
        sites.append(kind)
    missing = [f for f in files if not f.is_file()]
    if missing:
        raise FedtailError(
            f"{missing[0]} is named in labels.csv but missing; put the folder images/ next to labels.csv"
        )
    return Listing(folder, files, classes, sites, None)
