"""How figures look, wherever matplotlib draws them: colours, widths, fonts."""

from __future__ import annotations

from typing import Any

COLOURS = ("#77726f", "#1e74bd", "#b5230f", "#11623e", "#9081d3", "#bf7a37", "#4e9b9d", "#904376")
"""Those of the page; the baseline is grey."""
COLUMN, PAGE = 3.4, 7.0
"""Widths in inches of a column and of a page of common two-column papers."""
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e6ea",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "fedtail",
}
