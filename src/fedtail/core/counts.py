"""Records of integers that sites add up: the same figures come from rows at hand and from masked sums over sites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self, TypeVar

import numpy as np


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
