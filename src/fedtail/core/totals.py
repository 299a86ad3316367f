"""Sums of integer vectors over all clients: the one question that a federation without a trusted server can answer.

Whoever computes with totals alone gets the same result in a simulation, at every site of a federation, and at a relay
that has no data: trees from histograms, models from updates, thresholds from counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

Part = Callable[[int], np.ndarray]
"""Client -> its (size,) integer vector. Only asked for clients whose data are in this process."""
LIMIT = 2**62
"""No total may be this large, in any coordinate and either direction."""


class Totals(Protocol):
    """Adds vectors over all ``n_clients`` clients."""

    n_clients: int

    @property
    def here(self) -> Sequence[int]:
        """Clients whose data are in this process: all in a simulation, one at a site, none at a relay."""
        ...

    def total(self, size: int, part: Part) -> np.ndarray:
        """(size,) int64: the sum over all clients of ``part(client)``. ``size`` must follow from what everybody knows:
        settings and earlier totals."""
        ...


class LocalTotals:
    """All clients in this process."""

    def __init__(self, n_clients: int) -> None:
        self.n_clients = n_clients

    @property
    def here(self) -> Sequence[int]:
        return range(self.n_clients)

    def total(self, size: int, part: Part) -> np.ndarray:
        out = np.zeros(size, dtype=np.int64)
        for client in self.here:
            out += np.asarray(part(client), dtype=np.int64)
        return out
