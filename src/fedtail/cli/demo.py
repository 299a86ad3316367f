"""``fedtail demo``."""

from __future__ import annotations


def demo() -> None:
    """Three methods side by side on long-tailed digits."""
