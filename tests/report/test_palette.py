"""The colours of series can be told apart by people who see some of them alike."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest

from fedtail.plots import COLOURS

# What people without red, green or blue cones see, as maps of linear RGB (Machado, Oliveira and Fernandes, 2009)
SIGHT = {
    "all cones": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
CONES = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
CONES += [[0.0883024619, 0.2817188376, 0.6299787005]]
LAB = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099]]
LAB += [[0.0259040371, 0.7827717662, -0.8086757660]]


def themes() -> list[list[str]]:
    css = files("fedtail.report").joinpath("templates", "page.css").read_text()
    return [re.findall(r"--s\d: (#\w{6});", line) for line in css.splitlines() if "--s0: " in line]


def place(colour: str, sight: np.ndarray) -> np.ndarray:
    """A colour as it is seen, in OKLab, where distances are as large as they look."""
    v = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4)
    return np.array(LAB) @ np.cbrt(np.array(CONES) @ np.clip(sight @ linear, 0, 1))


@pytest.mark.parametrize("sight", SIGHT)
def test_any_two_series_differ_for_everybody(sight: str) -> None:
    found = themes()
    assert [len(colours) for colours in found] == [8, 8, 8] and tuple(found[0]) == COLOURS, "papers look like the page"
    for colours in found:
        seen = [place(c, np.array(SIGHT[sight])) for c in colours]
        apart = min(
            (float(np.linalg.norm(a - b)), i, j) for (i, a), (j, b) in itertools.combinations(enumerate(seen), 2)
        )
        assert apart[0] > 0.05, apart
