"""The label-skew plot of a federation: sites by classes, with class totals above and site sizes beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedtail.data.inspection import Inspection, ratio
from fedtail.errors import FedtailError, writing
from fedtail.plots import MOST_NUMBERS, Heat, draw

FORMATS = (".png", ".svg", ".pdf")


def save_skew_plot(found: Inspection, path: str | Path) -> Path:
    """Draw an inspection to a PNG, SVG or PDF file."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise FedtailError(f"--plot {str(path)!r} must end in {', '.join(FORMATS)}")
    figure = skew_figure(found)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150, bbox_inches="tight", facecolor="white")
    return target


def skew_figure(found: Inspection) -> Any:
    """Return a matplotlib figure: counts on a logarithmic colour scale, blank where a site lacks the class, marked
    where the class is in the site's last (rarest) group at the inspected rate."""
    k, c = found.table.shape
    order = np.argsort(found.total, kind="stable")
    marked = np.asarray(found.groups == found.n_groups - 1) & (found.n_groups > 1)
    mark = "orange" if k * c <= MOST_NUMBERS else "orange dot" if max(k, c) <= 120 else ""
    skew = f"imbalance {ratio(found.total):.4g}, label skew {found.skew:.2f}"
    rare = "(blank)" if not mark or found.n_groups < 2 else f"(blank); {mark}: rarest group at rate {found.rate:g}"
    lacking = int(((found.table == 0) & (found.total > 0)).any(1).sum())
    chart = Heat(
        f"{found.name}: {found.total.sum():,} training samples, {c} classes, {k:,} sites",
        found.table[:, order],
        found.sites,
        [found.classes[i] for i in order],
        "site",
        "class, rarest first",
        unit="samples",
        marked=marked[:, order],
        totals=True,
        caption=f"{skew}; {lacking:,} of {k:,} sites lack a class {rare}",
    )
    return draw(chart)
