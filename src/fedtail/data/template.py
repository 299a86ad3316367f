"""A real federation's skew over any data set: a matrix of sites by classes, from a CSV file or by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedtail.errors import FedtailError


@dataclass(frozen=True)
class Template:
    """How many samples of each class each site has; only the proportions within a class count."""

    sites: tuple[str, ...]
    classes: tuple[str, ...]
    counts: np.ndarray
    """(K, C) not negative."""

    def shares(self, classes: Sequence[str], totals: np.ndarray) -> np.ndarray:
        """(K, len(classes)) share of each class's samples that goes to each site; columns sum to 1.

        Classes are matched by name where the template has all of them, else by rank: the most frequent class takes the
        most frequent column, and where the numbers of classes differ, the ranks are stretched. totals: (len(classes),).
        """
        if set(classes) <= set(self.classes):
            columns = np.array([self.classes.index(c) for c in classes])
        else:
            order = np.argsort(-self.counts.sum(0), kind="stable")
            rank = np.empty(len(classes), dtype=np.int64)
            rank[np.argsort(-np.asarray(totals), kind="stable")] = np.arange(len(classes))
            columns = order[rank * len(order) // len(classes)]
        chosen = self.counts[:, columns]
        return np.asarray(chosen / chosen.sum(0))


def load_template(template: str) -> Template:
    """A named template, or a CSV file: a header of class names after the first column, then a row per site."""
    if template in TEMPLATES:
        return TEMPLATES[template]
    path, where = Path(template), f"data.partition {template!r}"
    if not path.is_file():
        raise FedtailError(
            f"{where} is neither a file nor one of {', '.join(TEMPLATES)}; give a CSV file with a row per site and a "
            "column per class"
        )
    try:
        frame = pd.read_csv(path, index_col=0, skipinitialspace=True)
        counts = frame.to_numpy(dtype=np.float64)
    except (ValueError, TypeError, UnicodeDecodeError) as error:
        raise FedtailError(f"{where} is not a table of numbers: {' '.join(str(error).split())[:200]}") from None
    if counts.size == 0 or counts.shape[1] < 2:
        raise FedtailError(f"{where} needs a row per site and two class columns or more after the site's name")
    if not np.isfinite(counts).all() or (counts < 0).any():
        row, column = np.argwhere(~(counts >= 0) | ~np.isfinite(counts))[0]
        raise FedtailError(
            f"{where}: {frame.index[row]!r}, {frame.columns[column]!r} is {counts[row, column]:g}, which is not a "
            "number of samples (0 or more)"
        )
    if (counts.sum(0) == 0).any():
        empty = frame.columns[int(np.flatnonzero(counts.sum(0) == 0)[0])]
        raise FedtailError(f"{where}: no site has samples of class {str(empty)!r}; drop the column or fix it")
    sites = tuple(str(s).strip() for s in frame.index)
    if len(set(sites)) < len(sites):
        raise FedtailError(f"{where}: two rows have the same site name")
    return Template(sites, tuple(str(c).strip() for c in frame.columns), counts)


def _named(classes: str, rows: dict[str, tuple[int, ...]]) -> Template:
    return Template(tuple(rows), tuple(classes.split(", ")), np.array(list(rows.values()), dtype=np.float64))


TEMPLATES: dict[str, Template] = {
    # Flights of 2013 from New York by carrier and outcome: the counts of the data set `flights` over the whole year.
    "carriers": _named(
        "on time, 1 to 3 h late, cancelled, over 3 h late, diverted",
        {
            "9E": (15464, 1526, 1044, 304, 122), "AA": (29877, 1794, 636, 276, 146), "AS": (676, 30, 2, 3, 3),
            "B6": (49084, 4377, 466, 588, 120), "DL": (44731, 2435, 349, 492, 103),
            "EV": (44305, 5918, 2817, 885, 248), "F9": (594, 69, 3, 18, 1), "FL": (2815, 286, 73, 74, 12),
            "HA": (334, 7, 0, 1, 0), "MQ": (22714, 2089, 1234, 234, 126), "OO": (25, 4, 3, 0, 0),
            "UA": (53851, 3383, 686, 548, 197), "US": (18894, 824, 663, 113, 42), "VX": (4742, 279, 31, 95, 15),
            "WN": (10981, 863, 192, 200, 39), "YV": (470, 62, 56, 12, 1),
        },
    ),
    # Made up, after what multi-centre collections look like: one large general site, small special ones, rare classes
    # at two or three sites only.
    "six-sites": _named(
        "class 1, class 2, class 3, class 4, class 5, class 6, class 7, class 8",
        {
            "site 1": (4200, 2900, 1700, 900, 500, 210, 120, 40),
            "site 2": (3000, 300, 260, 120, 40, 60, 0, 0),
            "site 3": (2000, 700, 150, 130, 160, 0, 30, 0),
            "site 4": (700, 500, 420, 80, 0, 90, 0, 30),
            "site 5": (300, 250, 0, 60, 10, 0, 0, 0),
            "site 6": (250, 90, 30, 0, 0, 15, 0, 0),
        },
    ),
}  # fmt: skip
"""Templates by name."""
