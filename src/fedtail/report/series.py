"""From contenders to what charts draw: colours, means with spreads, curves, thirds of the classes."""

from __future__ import annotations

import numpy as np

from fedtail.report.comparison import Comparison, Contender
from fedtail.report.lines import Line


def palette(comparison: Comparison) -> dict[str, int]:
    """Label -> colour: the baseline takes the neutral colour 0, the rest follow in order."""
    others = [one.label for i, one in enumerate(comparison.contenders) if i != comparison.baseline]
    if len(comparison.contenders) == 1:
        return {comparison.contenders[0].label: 1}
    return {comparison.reference.label: 0} | {label: i for i, label in enumerate(others, start=1)}


def contender_line(contender: Contender, name: str, c: int) -> Line:
    t, mean, spread = contender.band(name)
    return Line(name=contender.label, colour=c, x=t + 1, y=mean, spread=spread)


def mean_spread(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Column means and standard deviations of (seeds, n); NaN where undefined."""
    seen = np.isfinite(table)
    n = seen.sum(axis=0)
    mean = np.where(n > 0, np.where(seen, table, 0.0).sum(axis=0) / np.maximum(n, 1), np.nan)
    square = np.where(seen, (table - mean) ** 2, 0.0).sum(axis=0) / np.maximum(n - 1, 1)
    return mean, np.where(n > 1, np.sqrt(square), np.nan)


def _nanmean(values: np.ndarray) -> np.ndarray:
    """Mean over the classes that have test samples; NaN if none has."""
    seen = np.isfinite(values)
    total = np.where(seen, values, 0.0).sum(axis=1)
    return np.where(seen.any(axis=1), total / np.maximum(seen.sum(axis=1), 1), np.nan)


def thirds(values: np.ndarray) -> np.ndarray:
    """(seeds, C) per-class values, most frequent class first -> (seeds, 3) head, middle and tail means.

    Thirds as the head and tail metrics count them; two columns where nothing is left for the middle.
    """
    n = values.shape[1]
    size = max(1, n // 3)
    parts = [values[:, :size], values[:, size : n - size], values[:, n - size :]]
    return np.stack([_nanmean(p) for p in parts if p.shape[1]], axis=1)
