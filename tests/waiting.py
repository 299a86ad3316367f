"""Waiting for other processes. No test is about how long that takes; the limit only ends one that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

HANGS = 600.0
"""Seconds after which something that nobody will ever see happen has been waited for."""


def until(condition: Callable[[], object], what: str, pause: float = 0.05) -> None:
    """Return as soon as the condition holds."""
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(pause)
