"""Forest cover types: seven kinds of trees on 581,012 patches of 30 x 30 metres, in four wilderness areas.

An area is a site. Their mixes of trees differ, and the rarest kind (2,747 patches) grows in one of them alone.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pandas as pd

from fedtail.data.registry import Pooled
from fedtail.data.sources import SOURCES, Remote, Source, locate
from fedtail.data.tables.pooled import table_from_frame
from fedtail.data.tables.read import Table
from fedtail.errors import FedtailError

SHA256 = "614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771"
SOURCES["covertype"] = Source(
    "Forest cover types (UCI)",
    "covertype",
    ("covtype.data.gz",),
    "https://archive.ics.uci.edu/dataset/31/covertype",
    "CC BY 4.0",
    (Remote("https://ndownloader.figshare.com/files/5976039", f"sha256:{SHA256}"),),
)

AREAS = ("Rawah", "Neota", "Comanche Peak", "Cache la Poudre")
CLASSES = ("lodgepole pine", "spruce or fir", "ponderosa pine", "krummholz", "Douglas fir", "aspen", "cottonwood")
CODES = (2, 1, 3, 7, 6, 5, 4)
"""What the file calls ``CLASSES``."""
NAMES = "elevation aspect slope water_distance water_height road_distance shade_9am shade_noon shade_3pm fire_distance"
NUMBERS = NAMES.split()
SOILS = 40


def covertype(test_fraction: float = 0.2, seed: int = 0, data_dir: str | None = None) -> Pooled:
    """Forest cover types with the four wilderness areas as sites."""
    frame = read_patches(locate("covertype", data_dir) / SOURCES["covertype"].files[0])
    return table_from_frame(
        Table(frame, [], "covertype"),
        "cover",
        "area",
        classes=CLASSES,
        categories=("soil",),
        numbers=NUMBERS,
        test_fraction=test_fraction,
        seed=seed,
    )


def read_patches(path: Path) -> pd.DataFrame:
    """One row per patch, with its area and its soil as names instead of columns of ones."""
    width = len(NUMBERS) + len(AREAS) + SOILS + 1
    try:
        raw = pd.read_csv(path, header=None, compression="gzip").to_numpy()
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise FedtailError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    if raw.shape[1] != width or not set(np.unique(raw[:, -1])) <= set(CODES):
        raise FedtailError(f"{path} has {raw.shape[1]} columns, expected {width} with codes 1 to 7 in the last")
    areas, soils = raw[:, len(NUMBERS) : len(NUMBERS) + len(AREAS)], raw[:, len(NUMBERS) + len(AREAS) : -1]
    frame = pd.DataFrame(raw[:, : len(NUMBERS)], columns=NUMBERS)
    names = dict(zip(CODES, CLASSES, strict=True))
    return frame.assign(
        area=np.array(AREAS)[areas.argmax(1)],
        soil=[f"soil {n + 1}" for n in soils.argmax(1)],
        cover=[names[int(code)] for code in raw[:, -1]],
    )
