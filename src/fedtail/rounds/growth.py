"""A run that has more clients than when it began: what is known of each client is continued, newcomers start afresh.

A client's number is its own for the whole run, so newcomers take the numbers after the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.rates.base import RateStrategy, Setting


def grown_tensors(kept: Tensors, fresh: Tensors) -> Tensors:
    """A method's state with rows for clients that it does not know: those that it would begin with."""
    out = dict(kept)
    for name, new in fresh.items():
        old = kept.get(name)
        if old is not None and new.ndim and old.shape[1:] == new.shape[1:] and len(old) < len(new):
            out[name] = torch.cat([old, new[len(old) :].to(old)])
    return out


def grown_history(history: Sequence[dict[str, Any]], n_clients: int) -> list[dict[str, Any]]:
    """Records whose lists over all clients have a value for newcomers: the mean of the others, as they start with."""

    def longer(values: list[float]) -> list[float]:
        return values + [float(np.mean(values))] * (n_clients - len(values))

    out = []
    for record in history:
        more = dict(record)
        if len(record.get("rates", [])) < n_clients and "rates" in record:
            more["rates"] = longer(record["rates"])
            if "searched" in record:
                more["searched"] = {name: longer(values) for name, values in record["searched"].items()}
        out.append(more)
    return out


class WithNewcomers(RateStrategy):
    """A strategy that was begun for fewer clients: newcomers have the mean of what the others have, and no say in a
    search."""

    def __init__(self, inner: RateStrategy, n_clients: int) -> None:
        self.inner, self.n_clients, self.known = inner, n_clients, inner.n_clients
        self.searches = inner.searches

    def __getattribute__(self, name: str) -> Any:
        if name in (
            "name",
            "title",
            "reports",
            "done",
            "raced",
            "settle",
        ):  # who it is and what it needs is the strategy's own
            return getattr(object.__getattribute__(self, "inner"), name)
        return object.__getattribute__(self, name)

    def begin(self, setting: Setting) -> None:
        self.inner.begin(replace(setting, sizes=setting.sizes[: self.known], labels=setting.labels[: self.known]))

    def ask(self) -> np.ndarray:
        """Both probes of a newcomer are the same, so its direction is zero."""
        probes, mean = self.inner.ask(), float(self.inner.rates.mean())
        return np.concatenate([probes, np.full((self.n_clients - self.known, probes.shape[1]), mean)])

    @property
    def axes(self) -> np.ndarray:
        return np.concatenate([self.inner.axes, np.zeros(self.n_clients - self.known, dtype=np.int64)])

    @property
    def n_axes(self) -> int:
        return self.inner.n_axes

    def patterns(self) -> str | None:
        return self.inner.patterns()

    def weights(self, p: np.ndarray, present: np.ndarray) -> np.ndarray:
        old = present < self.known
        w = np.array(p[present], dtype=np.float64)
        if old.any():
            w[old] = self.inner.weights(p[: self.known], present[old]) * w[old].sum()
        return np.asarray(w / w.sum())

    def observe(self, clients: np.ndarray, deltas: Sequence[Tensor]) -> None:
        old = [i for i, k in enumerate(clients) if k < self.known]
        if old:
            self.inner.observe(np.asarray(clients)[old], [deltas[i] for i in old])

    def tell(
        self,
        rewards: np.ndarray | None = None,
        *,
        reports: dict[str, np.ndarray] | None = None,
        present: np.ndarray | None = None,
    ) -> int:
        known = {name: values[: self.known] for name, values in (reports or {}).items()}
        return self.inner.tell(rewards, reports=known, present=None if present is None else present[: self.known])

    @property
    def choice(self) -> np.ndarray:
        return np.concatenate([self.inner.choice, np.zeros(self.n_clients - self.known, dtype=np.int64)])

    @property
    def rates(self) -> np.ndarray:
        return self._longer(self.inner.rates)

    @property
    def base_rates(self) -> np.ndarray:  # type: ignore[override]
        return self._longer(self.inner.base_rates)

    def _longer(self, values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, np.full(self.n_clients - self.known, float(np.mean(values)))])

    def stats(self) -> dict[str, Any]:
        return self.inner.stats()

    def state(self) -> dict[str, Any]:
        return self.inner.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.inner.load_state(state)
