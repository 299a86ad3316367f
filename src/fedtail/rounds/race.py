"""A learning rate found by a race: what ``local.lr = "auto"`` does in the first rounds of a run.

Learning rates race on models of their own (``rounds.search``): from the same beginning, each trains a few rounds at its
value, the clients compare the models on their private validation splits, and the better half goes on (successive
halving; Jamieson and Talwalkar, AISTATS 2016). The winner's model is then the run's, as if it had had that learning
rate from the start. Where clients may not be asked for several models (masked sums), all values start every round from
the leader's model, as further probes of the same step. Aggregation is linear, so candidate j is the model in which all
clients took value j; the best one is the next global model, and no round is lost. Then the rate strategy takes over.

Neither FedCGNM's delta nor a resampling rate is raced. Where gradients are shorter than delta, only lr / delta counts,
and from a common model the value that makes the smallest steps wins; a high resampling rate is ahead in the first
rounds, because its epochs are longer, whether or not it is at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from torch import Tensor

from fedtail.core.halving import survivors
from fedtail.core.records import DIVERGED
from fedtail.errors import FedtailError
from fedtail.rates.base import RateStrategy, Rewards, Setting
from fedtail.settings import Settings

LRS: Final[Mapping[str, tuple[float, ...]]] = {
    "sgd": (0.3, 0.1, 1.0, 0.03, 0.01),
    "adam": (0.001, 0.003, 0.0003, 0.01, 0.0001),
}
"""Learning rates raced, by optimizer, the likeliest first: it is in force before the first round, and a short run races
fewer. Another optimizer races those of ``sgd``; as many for each."""
TIE: Final = 1e-9
"""What the likeliest value has ahead: networks that all answer one class still are equally good."""
FIRST: Final = 10
"""Rounds of the first rung, at most."""
LONGER: Final = 5
"""Times as many rounds go to the two best as to all, at most."""
SHARE: Final = 0.4
"""Most local runs that a race may add, as a share of those that the run has without it."""


def _of_inner(name: str) -> Any:
    """Whatever the strategy has under this name."""
    return property(lambda race: getattr(race.inner, name))


class Race(RateStrategy):
    """Races learning rates, then is the strategy ``inner``. Ties go to the likeliest, then to the larger value."""

    name, title = "lr=auto", "lr=auto"

    def __init__(self, inner: RateStrategy, optimizer: str = "sgd") -> None:
        """``optimizer``: whose learning rates."""
        self.values = usual_lrs(optimizer)
        self.inner, self.n_clients, self.searches = inner, inner.n_clients, inner.searches
        self.title = inner.title  # type: ignore[misc]
        self._won = self.values[0]
        self._rungs: list[tuple[int, int]] | None = None
        self.racing, self._apart = True, False
        """Whether ``judge`` is called after the coming round instead of ``tell``; and whether rivals race."""
        self._round = self._choice = 0
        self.rival = 0
        """The number of the model that ``ask``, ``trials`` and ``lr`` refer to."""
        self._field: list[float] = []
        self._gain: list[float] = []
        self.evidence: list[dict[str, Any]] = []
        """The values tried in the last round and their rewards; empty once the race is over."""

    # -- the race -------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The learning rate of the first round that is tried or has been found."""
        return self.values[self.rival] if self.rivals else self._won

    @property
    def rivals(self) -> tuple[int, ...]:
        """Numbers of the models that the coming round trains side by side; empty for a single model. ``rival`` is set
        to each before it is asked for rates."""
        return tuple(map(self.values.index, self._runners())) if self._apart and self.racing else ()

    def begin(self, setting: Setting) -> None:
        self._apart = setting.rivals
        if self._rungs is None:
            self._rungs = rungs(setting.rounds)
            self.racing = bool(self._rungs)
        self.inner.begin(replace(setting, rounds=max(setting.rounds - self.length, 1)))

    @property
    def length(self) -> int:
        """Rounds of the race."""
        return sum(rounds for _, rounds in self._rungs or [])

    def _runners(self) -> list[float]:
        """The values still in the race."""
        if not self._field:
            assert self._rungs is not None  # begin() was called
            self._field = sorted(self.values[: self._rungs[0][0]], reverse=True)
            self._gain = [TIE * (value == self.values[0]) for value in self._field]
        return self._field

    def trials(self) -> np.ndarray:
        """(P,) or (1,) learning rates that all clients try."""
        return np.array(self._runners() if self.racing and not self.rivals else [self.lr])

    def tell(self, rewards: Rewards = None, **more: Any) -> int:
        if self.racing:
            raise FedtailError("report the results of a race with judge()")
        self.evidence = []
        return self.inner.tell(rewards, **more)

    def judge(self, rewards: np.ndarray, values: Mapping[str, np.ndarray], failed: np.ndarray) -> int:
        """Process a round of all rivals or candidates and return the number of the leader.

        Rivals are compared by the models as they are now, since who was ahead before shows in them; probes from a
        common model by what they have gained in all rounds. (N,) each: rewards (higher is better); other known values,
        for ``evidence``; whether each has failed.
        """
        rivals, field = self.rivals, self._runners()
        if rewards.shape != (len(field),) or not np.isfinite(rewards).all():
            raise FedtailError(f"a race of {len(field)} needs as many finite rewards, got {rewards.tolist()}")
        if rivals:
            gain = rewards + TIE * np.array([value == self.values[0] for value in field])
        else:
            gain = rewards - rewards.mean() + self._gain
        self._gain = np.where(failed, -np.inf, gain).tolist()
        first = int(np.argmax(self._gain))
        self._won = field[first]
        self.evidence = [
            {"lr": lr, **{name: float(v[i]) for name, v in values.items()}, **({"diverged": True} if f else {})}
            for i, (lr, f) in enumerate(zip(field, failed, strict=True))
        ]
        self._choice, self.rival = (0, rivals[first]) if rivals else (first, self.rival)
        self._advance()
        return rivals[first] if rivals else first

    def _advance(self) -> None:
        """The next round: of the same rung, or of the next one with the better half."""
        plan = self._rungs or []
        self._round += 1
        ends = np.cumsum([rounds for _, rounds in plan]).tolist()
        if self._round >= ends[-1]:
            self.racing, self._round, self._field, self._gain = False, 0, [], []
        elif self._round in ends:
            kept = sorted(survivors(self._gain, plan[ends.index(self._round) + 1][0]))
            self._field, self._gain = [self._field[i] for i in kept], [self._gain[i] for i in kept]

    # -- what the strategy does -----------------------------------------------------------------------

    rates, base_rates, axes, n_axes, weights = map(_of_inner, ("rates", "base_rates", "axes", "n_axes", "weights"))

    def ask(self) -> np.ndarray:
        rows = self.inner.ask()
        return np.tile(rows[:, :1], (1, len(self.trials()))) if self.racing else rows

    def patterns(self) -> str | None:
        if self.racing:
            return None if self.rivals else "uniform"
        return self.inner.patterns()

    @property
    def choice(self) -> np.ndarray:
        return np.full(self.n_clients, self._choice) if self.evidence or self.rivals else self.inner.choice

    @property
    def reports(self) -> frozenset[str]:  # type: ignore[override]
        if self.rivals:
            return frozenset()
        return frozenset({DIVERGED}) if self.racing else self.inner.reports

    def observe(self, clients: np.ndarray, deltas: Sequence[Tensor]) -> None:
        if not self.racing:
            self.inner.observe(clients, deltas)

    @property
    def done(self) -> bool:
        return not self.racing and self.inner.done

    def stats(self) -> dict[str, Any]:
        return {} if self.evidence else self.inner.stats()

    def state(self) -> dict[str, Any]:
        race = {
            "held": {"lr": self._won},
            "heats": [("lr", self._rungs)] if self._rungs else [],
            "heat": int(not self.racing),
            "round": self._round,
            "rival": self.rival,
            "field": self._field,
            "gain": [g if np.isfinite(g) else None for g in self._gain],
        }
        return {"race": race, "inner": self.inner.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        race = state["race"]
        self._field, self._won = list(race["field"]), race["held"]["lr"]
        self._rungs = [(n, rounds) for _, rungs in race["heats"] for n, rounds in rungs]
        self.racing, self._round, self.rival = race["heat"] < len(race["heats"]), race["round"], race.get("rival", 0)
        self._gain = [-np.inf if g is None else g for g in race["gain"]]
        self.inner.load_state(state["inner"])


def race_of(rates: RateStrategy) -> Race | None:
    """The race in front of a strategy; None if nothing is raced."""
    return rates if isinstance(rates, Race) else None


def racing(rates: RateStrategy, settings: Settings) -> RateStrategy:
    """The strategy, behind a race where ``local.lr`` is ``auto``."""
    if settings.local.lr != "auto":
        return rates
    if rates.searches == "lr":
        raise FedtailError("local.lr = 'auto' and rates.searches = 'lr' both search for a learning rate; use only one")
    if settings.privacy.mode == "central":
        raise FedtailError(
            "privacy.mode = 'central' covers one aggregate per round, but local.lr = 'auto' compares several; set a "
            "number, e.g. 0.1"
        )
    return Race(rates, settings.local.optimizer)


def usual_lrs(optimizer: str) -> tuple[float, ...]:
    """Learning rates that ``local.optimizer`` may want, the likeliest first."""
    return LRS.get(optimizer, LRS["sgd"])


def rungs(rounds: int) -> list[tuple[int, int]]:
    """How many values race on each rung and for how many rounds, within ``SHARE`` of a run's local runs.

    Half of what a race adds goes to a few rounds of all, which find out those that lead nowhere, the rest to the two
    best, which need more rounds to be told apart. A short run races fewer values, or none.
    """
    budget = int(SHARE * rounds + 1e-9)
    if budget < 3:
        return [(2, budget)] if budget else []
    n = min(len(LRS["sgd"]), budget)
    first = min(max(budget // (2 * (n - 1)), 1), FIRST)
    return [(n, first), (2, min(budget - (n - 1) * first, LONGER * first))]
