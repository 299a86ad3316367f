"""Axes: a linear map from data to canvas units, round numbers to label it at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A linear map from data to canvas units."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return round(self.start + share * (self.stop - self.start), 2)

    @property
    def middle(self) -> float:
        return round((self.start + self.stop) / 2, 2)

    def within(self, value: float) -> float:
        """Return the nearest value that the axis has."""
        return min(max(value, self.low), self.high)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers inside [low, high], about ``count`` of them.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    step = _step(low, high, count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]


def nice_range(values: Sequence[float], floor: float | None, ceiling: float | None) -> tuple[float, float]:
    """Return a range that holds all finite values, ends on ticks and stays within floor and ceiling."""
    finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if high - low < 1e-9:
        pad = abs(high) * 0.1 or 0.5
        low, high = low - pad, high + pad
    step = _step(low, high, 5)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    low = low if floor is None else max(low, floor)
    high = high if ceiling is None else min(high, ceiling)
    return round(low, 12), round(high, 12)


def _step(low: float, high: float, count: int) -> float:
    """Return the least round number (1, 2 or 5 times a power of ten) that takes at most ``count`` steps."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
