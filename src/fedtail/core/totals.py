"""Sums of integer vectors over all clients: the one question that a federation without a trusted server can answer.

Whoever computes with totals alone gets the same result in a simulation, at every site of a federation, and at a relay
that has no data: trees from histograms, models from updates, thresholds from counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

import numpy as np

Part = Callable[[int], np.ndarray]
"""Client -> its (size,) integer vector. Only asked for clients whose data are in this process."""
Reach = float | np.ndarray
"""How far one row of data can move a part: its Euclidean length or, as (size,) positive numbers r, such that the sum of
(change / r)^2 is at most 1. Noise is drawn by it where a federation adds some; infinite where nobody knows."""
LIMIT, COUNTS = 1 << 60, 1 << 31
"""No total is this large, in any coordinate and either direction; counts of rows are smaller, and travel in half the
bytes."""


class Totals(Protocol):
    """Adds vectors over all ``n_clients`` clients."""

    n_clients: int

    @property
    def here(self) -> Sequence[int]:
        """Clients whose data are in this process: all in a simulation, one at a site, none at a relay."""

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """The clusters of clients that may be summed apart, fixed for the run; one of all clients if there are none."""

    def total(self, size: int, part: Part, *, limit: int = LIMIT, reach: Reach = np.inf) -> np.ndarray:
        """(size,) int64: the sum over all clients of ``part(client)``. ``size``, ``limit`` and ``reach`` must follow
        from what everybody knows: settings and earlier totals."""

    def group_totals(self, size: int, part: Part, *, limit: int = LIMIT, reach: Reach = np.inf) -> np.ndarray:
        """(groups, size) int64: the same over each group."""


class Counts:
    """A dataclass of integer arrays; ``a + b`` are the counts of both, in any order the same."""

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def flat(self) -> np.ndarray:
        """Return one int64 vector of everything, to be summed over sites."""
        return np.concatenate([np.ravel(value) for value in vars(self).values()]).astype(np.int64)

    def like(self, flat: np.ndarray) -> Self:
        """Return the record that ``flat`` is the vector of, in the shapes of this one."""
        ends = np.cumsum([np.size(value) for value in vars(self).values()])
        parts = np.split(np.asarray(flat, dtype=np.int64), ends[:-1])
        named = zip(vars(self).items(), parts, strict=True)
        return type(self)(**{name: part.reshape(np.shape(value)) for (name, value), part in named})

    def to_json(self) -> dict[str, Any]:
        """Return for each array its shape, where it is not zero, and what is there."""
        arrays = {name: np.asarray(value) for name, value in vars(self).items()}
        kept = {name: np.flatnonzero(value) for name, value in arrays.items()}
        return {
            name: [list(value.shape), kept[name].tolist(), value.ravel()[kept[name]].tolist()]
            for name, value in arrays.items()
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote."""
        out = {}
        for name, (shape, places, values) in fields.items():
            out[name] = np.zeros(shape, dtype=np.int64)
            out[name].ravel()[places] = values
        return cls(**out)


C = TypeVar("C", bound=Counts)


def total(parts: Iterable[C]) -> C | None:
    """Return the counts of all together, adding one after another; None of nothing."""
    whole: C | None = None
    for part in parts:
        whole = part if whole is None else whole + part
    return whole
