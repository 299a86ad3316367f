"""The base of rate strategies: ``ask`` for rates to try, ``tell`` what came of them.

The strategy never calls the world; the round loop calls the strategy. So the same object serves the
simulator and a real federation, and can be saved at any point.

A round under a strategy with P probes and A axes (A = K clients, or fewer clusters of clients):

1. ``ask()`` -> (K, P): what each client tries in each of its P local runs.
2. The loop trains, builds the candidate models that ``patterns`` names and has them validated.
3. ``tell(rewards, ...)`` digests the outcome; ``choice`` then says which probe of each client is kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from fedtail.errors import FedtailError, check_range
from fedtail.registry import Registry

Rewards = np.ndarray | Sequence[float] | None
Reports = dict[str, np.ndarray] | None
Present = np.ndarray | None
"""What ``tell`` takes."""


@dataclass(frozen=True)
class Setting:
    """The facts about a run that a strategy may use."""

    rounds: int
    participation: float
    sizes: np.ndarray
    """(K,) training samples per client."""
    labels: tuple[str, ...] = ()
    """A label per client that the user's data names (region, machine type ...); empty if none."""
    seed: int = 0
    """The run's."""
    rivals: bool = False
    """Whether clients may be asked to train several models in a round, each from its own start (for a race)."""


class RateStrategy:
    """Base of all strategies. A subclass overrides what differs from a single fixed rate."""

    name: ClassVar[str] = ""
    """Set by the registry."""
    title: ClassVar[str] = ""
    """How tables and reports call it; by default the class's name."""
    reports: ClassVar[frozenset[str]] = frozenset()
    """Scalars it needs from each client's local runs: ``local_gain``, ``local_validation``, ``diverged``."""

    n_clients: int
    searches: str = "rate"
    """Which client-side quantity is searched: ``rate``, ``lr``, or a tunable field of the method."""
    base_rates: np.ndarray
    """(K,) resampling rates in force while another quantity is searched."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__dict__.get("name", cls.__name__)
        cls.title = cls.__dict__.get("title", cls.__name__)

    def begin(self, setting: Setting) -> None:
        """Called before the first round of a run and, after ``load_state``, before the first resumed one."""

    def ask(self) -> np.ndarray:
        """(K, P) probes of the coming round, one row per registered client. Repeated calls agree."""
        raise NotImplementedError("a rate strategy needs ask()")

    @property
    def axes(self) -> np.ndarray:
        """(K,) the axis (client or cluster) each client moves along."""
        return np.arange(self.n_clients)

    @property
    def n_axes(self) -> int:
        """The number of axes, A; an axis may have no clients."""
        return self.n_clients

    def patterns(self) -> str | None:
        """Which candidate models the server validates this round.

        ``None``: none, each client keeps the probe ``choice`` names. ``"binary"``: all 2^A combinations of two
        probes, candidate s taking probe ``(s >> a) & 1`` on axis a. ``"uniform"``: P candidates, candidate j
        taking probe j everywhere.
        """
        return None

    def weights(self, p: np.ndarray, present: np.ndarray) -> np.ndarray:
        """(S,) aggregation weights of the clients present. p: (K,) weights of all clients; present: (S,) indices."""
        return np.asarray(p[present] / p[present].sum())

    def observe(self, clients: np.ndarray, deltas: Sequence[Tensor]) -> None:
        """Look at a round's updates before ``tell``. clients: (S,) indices; deltas: S tensors of shape (P, n)."""

    def tell(self, rewards: Rewards = None, *, reports: Reports = None, present: Present = None) -> int:
        """Process a round. Returns the index of the candidate that becomes the next global model.

        Args:
            rewards: (number of candidates,) pooled validation metric, in the order ``patterns`` defines.
            reports: name -> (K, P) client scalars, NaN for clients that did not report.
            present: (K,) bool, clients whose update arrived; all if None.
        """
        return 0

    @property
    def choice(self) -> np.ndarray:
        """(K,) which probe of the last round each client keeps."""
        return np.zeros(self.n_clients, dtype=np.int64)

    @property
    def rates(self) -> np.ndarray:
        """(K,) the values in force (of what ``searches`` names): those of the last selected candidate; by default the
        first that ``ask`` gives."""
        return self.ask()[:, 0]

    @property
    def done(self) -> bool:
        """True once the search is over and ``rates`` no longer changes."""
        return True

    def stats(self) -> dict[str, Any]:
        """Numbers about the search for history and report (tree size, depth, best score ...)."""
        return {}

    def state(self) -> dict[str, Any]:
        """JSON-serialisable state: ``load_state`` of it continues the same search."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Inverse of ``state``."""


HIGHEST = 2.0
"""Resampling rates above 1 make rare classes the common ones; beyond this, an epoch becomes endless."""


def check_rate(name: str, rate: float) -> None:
    """Raise for a resampling rate outside [0, 2]; warn of one above 1."""
    check_range(name, rate, 0.0, HIGHEST)
    if rate > 1:
        warnings.warn(
            f"{name} = {rate:g} is above 1 (fully balanced), so rare classes become the most frequent ones",
            stacklevel=2,
        )


def base_rates(rate: float | Sequence[float], n_clients: int) -> np.ndarray:
    """(K,) from one rate or one per client."""
    rates = np.atleast_1d(np.asarray(rate, dtype=np.float64))
    if rates.size not in (1, n_clients):
        raise FedtailError(
            f"rates.base_rate has {rates.size} values for {n_clients} clients; give one, or one per client"
        )
    for r in rates:
        check_rate("rates.base_rate", float(r))
    return np.broadcast_to(rates, n_clients).copy()


def _own_strategy(name: str, kind: Any) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, RateStrategy)):
        raise FedtailError(f"rate strategy {name!r} is not a subclass of fedtail.rates.RateStrategy")
    kind.name = name
    return kind


RATES: Registry[RateStrategy] = Registry("rate strategy", "rates", given=("n_clients",), adapt=_own_strategy)


@RATES.add("fixed")
class Fixed(RateStrategy):
    """Client k always resamples at ``rates[k]``.

    With ``searches`` the values are something else that a search found per client, a learning rate or a field of the
    method, and every client resamples at ``base_rate`` (one, or one per client).
    """

    title = "fixed rates"

    def __init__(
        self, n_clients: int, rates: Sequence[float], searches: str = "rate", base_rate: float | Sequence[float] = 0.6
    ) -> None:
        if len(rates) != n_clients:
            raise FedtailError(f"rates.rates has {len(rates)} values for {n_clients} clients; give one per client")
        for k, rate in enumerate(rates):
            if searches == "rate":
                check_rate(f"rates.rates[{k}]", rate)
            check_range(f"rates.rates[{k}]", rate, 0.0)
        self.n_clients, self._rates = n_clients, np.asarray(rates, dtype=np.float64)
        self.searches, self.base_rates = searches, base_rates(base_rate, n_clients)

    def ask(self) -> np.ndarray:
        return self._rates[:, None].copy()


def fixed_section(record: Mapping[str, Any]) -> dict[str, Any]:
    """The config section ``[rates]`` that keeps what a search found. record: the last of the run's history.

    Mostly the values in force; for FAST, which plays on, each client's best arm.
    """
    for name, values in record.get("searched", {}).items():
        return {"name": "fixed", "rates": list(values), "searches": name, "base_rate": list(record["rates"])}
    return {"name": "fixed", "rates": list(record.get("search", {}).get("best_arm", record["rates"]))}


@RATES.add("uniform")
class Uniform(RateStrategy):
    """The same rate everywhere and always; rate 0 is no resampling, 1 is fully balanced."""

    title = "U"

    def __init__(self, n_clients: int, rate: float = 0.6) -> None:
        check_rate("rates.rate", rate)
        self.n_clients, self.rate = n_clients, float(rate)

    def ask(self) -> np.ndarray:
        return np.full((self.n_clients, 1), self.rate)
