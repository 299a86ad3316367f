"""The label-skew plot of a federation: sites by classes, each with its samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedtail.data.inspection import Inspection, ratio
from fedtail.errors import FedtailError, writing
from fedtail.plots import MOST_NUMBERS, Heat, draw

FORMATS = (".png", ".svg", ".pdf")


def save_skew_plot(inspection: Inspection, path: str | Path) -> Path:
    """Draw an inspection to a PNG, SVG or PDF file."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise FedtailError(f"--plot {str(path)!r} must end in {', '.join(FORMATS)}")
    figure = skew_figure(inspection)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150, bbox_inches="tight", facecolor="white")
    return target


def skew_figure(inspection: Inspection) -> Any:
    """Return a matplotlib figure: counts on a logarithmic colour scale, blank where a site lacks the class, marked
    where the class is in the site's last (rarest) group at the inspected rate."""
    k, c = inspection.table.shape
    order = inspection.order
    marked = np.asarray(inspection.groups == inspection.n_groups - 1) & (inspection.n_groups > 1)
    mark = "orange" if k * c <= MOST_NUMBERS else "orange dot" if max(k, c) <= 120 else ""
    skew = f"imbalance {ratio(inspection.total):.4g}, label skew {inspection.skew:.2f}"
    rare = (
        "(blank)"
        if not mark or inspection.n_groups < 2
        else f"(blank); {mark}: rarest group at rate {inspection.rate:g}"
    )
    lacking = int(((inspection.table == 0) & (inspection.total > 0)).any(1).sum())
    chart = Heat(
        f"{inspection.name}: {inspection.total.sum():,} training samples, {c} classes, {k:,} sites",
        inspection.table[:, order],
        [f"{site} ({n:,})" for site, n in zip(inspection.sites, inspection.table.sum(1), strict=True)],
        [f"{inspection.classes[i]} ({inspection.total[i]:,})" for i in order],
        "site",
        "class, rarest first",
        unit="samples",
        marked=marked[:, order],
        caption=f"{skew}; {lacking:,} of {k:,} sites lack a class {rare}",
    )
    return draw(chart)
