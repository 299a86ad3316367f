"""A real federation's skew over any data set: a matrix of sites by classes, from a CSV file or by name.

Two files come along. ``carriers`` has the flights of 2013 from New York by carrier and outcome. ``six-sites`` is made
up after what multi-centre collections look like: one large general site, small special ones, rare classes at two or
three sites only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedtail.errors import FedtailError

FOLDER = Path(__file__).parent / "templates"
TEMPLATES = ("carriers", "six-sites")


def template_shares(template: pd.DataFrame, classes: Sequence[str], totals: np.ndarray) -> np.ndarray:
    """(K, len(classes)) share of each class's samples that goes to each site; columns sum to 1.

    Classes are matched by name where the template has all of them, else by rank: the most frequent class takes the
    most frequent column, and where the numbers of classes differ, the ranks are stretched. totals: (len(classes),).
    """
    counts = template.to_numpy(dtype=np.float64)
    if set(classes) <= set(template.columns):
        columns = template.columns.get_indexer(pd.Index(classes))
    else:
        order = np.argsort(-counts.sum(0), kind="stable")
        rank = np.argsort(np.argsort(-np.asarray(totals), kind="stable"))
        columns = order[rank * len(order) // len(classes)]
    chosen = counts[:, columns]
    return np.asarray(chosen / chosen.sum(0))


def load_template(template: str) -> pd.DataFrame:
    """Samples of each class (columns) at each site (rows), of which only the proportions within a class count: a named
    template, or a CSV file with a header of class names after the first column, then a row per site."""
    where = f"data.partition {template!r}"
    path = FOLDER / f"{template}.csv" if template in TEMPLATES else Path(template)
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
    if len(wrong := np.argwhere(~((counts >= 0) & np.isfinite(counts)))):
        row, column = wrong[0]
        raise FedtailError(
            f"{where}: {frame.index[row]!r}, {frame.columns[column]!r} is {counts[row, column]:g}, which is not a "
            "number of samples (0 or more)"
        )
    if (counts.sum(0) == 0).any():
        empty = frame.columns[int(np.flatnonzero(counts.sum(0) == 0)[0])]
        raise FedtailError(f"{where}: no site has samples of class {str(empty)!r}; drop the column or fix it")
    frame = frame.set_axis(frame.index.astype(str).str.strip()).rename(columns=lambda name: str(name).strip())
    if frame.index.has_duplicates:
        raise FedtailError(f"{where}: two rows have the same site name")
    return frame
