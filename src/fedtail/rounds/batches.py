"""``local.batch_size = "auto"``: batches that follow the size of the sites.

A site of a hundred rows takes two steps in an epoch of batches of 64, so that a whole run hardly moves the model;
batches of 16 make eight of them. Sites of thousands of rows take steps enough, and larger batches find their direction
better. What it follows is how many training samples sites have, which a server knows from the handshake.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedtail.errors import FedtailError
from fedtail.settings import LocalSettings, Settings

BATCHES = (16, 32, 64)
"""What ``auto`` chooses from."""
STEPS = 8
"""Steps that an epoch of the median site is to have."""


def follow(sizes: Sequence[int] | np.ndarray) -> int:
    """The largest batch in which the median site takes ``STEPS`` steps in an epoch, else the smallest. sizes: training
    samples per site; 0 of one that is not there."""
    return max((batch for batch in BATCHES if median(sizes) >= STEPS * batch), default=BATCHES[0])


def median(sizes: Sequence[int] | np.ndarray) -> float:
    """Return the median size of the sites that are there."""
    there = np.asarray(sizes)[np.asarray(sizes) > 0]
    return float(np.median(there)) if there.size else 0.0


def settle_batch(settings: Settings, batch: int) -> Settings:
    """The same settings with so many samples in a batch."""
    return settings.model_copy(update={"local": settings.local.model_copy(update={"batch_size": batch})})


def settled(settings: Settings, sizes: Sequence[int] | np.ndarray) -> Settings:
    """Settings as engines take them: with a number for the batch size."""
    return settle_batch(settings, follow(sizes)) if settings.local.batch_size == "auto" else settings


def batch_of(local: LocalSettings) -> int:
    """Samples of a local step."""
    if local.batch_size == "auto":
        raise FedtailError("local.batch_size = 'auto' depends on site sizes, which are not known here; set a number")
    return local.batch_size


def batch_notes(local: LocalSettings, batch: int, sizes: Sequence[int] | np.ndarray) -> tuple[str, ...]:
    """Return a note on the choice of ``auto``, for the run folder and the screen; none where the batch size was
    given."""
    if local.batch_size != "auto":
        return ()
    return (f"batches of {batch} (local.batch_size=auto): the median site has {median(sizes):,.0f} training samples",)
