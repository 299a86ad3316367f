"""Learning rate and resampling rate found by a race: what ``local.lr = "auto"`` and ``rates.rate = "auto"`` do in the
first rounds of a run.

Learning rates race on models of their own (``rounds.rivals``): from the same beginning, each trains a few rounds at its
value, the clients compare the models on their private validation splits, and the better half goes on (successive
halving; Jamieson and Talwalkar, AISTATS 2016). The winner's model is then the run's, as if it had had that learning
rate from the start. Where clients may not be asked for several models (masked sums), all values start every round from
the leader's model, as further probes of the same step; so does the resampling rate, raced at the learning rate that won
once the model knows its way: a high rate is ahead in the first rounds, because its epochs are longer, whether or not it
is at the end. Aggregation is linear, so candidate j is the model in which all clients took value j; the best one is the
next global model, and no round is lost. Then the rate strategy takes over.

FedCGNM's delta is not raced: where gradients are shorter than it, only lr / delta counts, and from a common model the
value that makes the smallest steps wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
from torch import Tensor

from fedtail.core.halving import survivors
from fedtail.core.records import DIVERGED
from fedtail.errors import FedtailError
from fedtail.rates.base import RateStrategy, Setting
from fedtail.rates.uniform import Uniform
from fedtail.settings import Settings

LRS: Final[Mapping[str, tuple[float, ...]]] = {
    "sgd": (0.3, 0.1, 1.0, 0.03, 0.01),
    "adam": (0.001, 0.003, 0.0003, 0.01, 0.0001),
}
"""Learning rates raced, by optimizer, the likeliest first: it is in force before the first round, and a short run races
fewer. Another optimizer races those of ``sgd``; as many for each."""
RATES: Final = (0.6, 1.0)
"""Resampling rates raced, after the learning rate; the first is the default."""
WAIT: Final = 0.2
"""Share of the rounds before the resampling rate is raced."""
TIE: Final = 1e-9
"""What the likeliest value has ahead: networks that all answer one class still are equally good."""
MOST: Final[Mapping[str, int]] = {"lr": 10, "rate": 3}
"""Rounds of the first rung, at most."""
FEWEST: Final[Mapping[int, int]] = {1: 2, 2: 4}
"""Learning rates in the race, at least, by how many things are raced."""
LONGER: Final = 5
"""Times as many rounds go to the two best as to all, at most."""
SHARE: Final = 0.4
"""Most local runs that a race may add, as a share of those that the run has without it."""


class Race(RateStrategy):
    """Races what ``names`` says, then is the strategy ``inner``. Ties go to the likeliest, then to the larger value."""

    def __init__(self, inner: RateStrategy, names: Sequence[str] = ("lr",), optimizer: str = "sgd") -> None:
        """``names``: ``lr``, ``rate`` or both, in this order; ``optimizer``: whose learning rates."""
        self.values = {name: usual_lrs(optimizer) if name == "lr" else RATES for name in names}
        self.inner, self.n_clients = inner, inner.n_clients
        self.name, self.title = " and ".join(f"{name}=auto" for name in names), inner.title  # type: ignore[misc]
        self.held: dict[str, float] = {}
        for name, values in self.values.items():
            self._hold(name, values[0])
        self._heats: list[tuple[str, list[tuple[int, int]]]] | None = None
        self._heat = self._round = 0
        self._field: list[float] = []
        self._gain: list[float] = []
        self._choice = self._rival = 0
        self._apart = False
        self._last: list[dict[str, Any]] = []

    # -- the race -------------------------------------------------------------------------------------

    @property
    def lr(self) -> float | None:
        """The learning rate of the first round that is tried or has been found; None if it is not raced."""
        return self.values["lr"][self._rival] if self.rivals else self.held.get("lr")

    @property
    def rivals(self) -> tuple[int, ...]:
        """Numbers of the models that the coming round trains side by side; empty for a single model. ``enter`` is
        called with each before it is asked for rates."""
        if not self._apart or not self.racing or self._name != "lr" or len(self._runners()) == 1:
            return ()
        return tuple(map(self.values["lr"].index, self._runners()))

    @property
    def rival(self) -> int:
        """The number of the model that ``ask``, ``trials`` and ``lr`` refer to."""
        return self._rival

    def enter(self, rival: int) -> None:
        """Select the rival that the following calls refer to."""
        self._rival = rival

    def begin(self, setting: Setting) -> None:
        self._apart = setting.rivals
        if self._heats is None:
            self._heats = heats(setting.rounds, tuple(self.values))
        self.inner.begin(replace(setting, rounds=max(setting.rounds - self.length, 1)))

    @property
    def length(self) -> int:
        """Rounds of the race."""
        return sum(rounds for _, rungs in self._heats or [] for _, rounds in rungs)

    @property
    def racing(self) -> bool:
        """Whether ``judge`` is called after the coming round instead of ``tell``."""
        return self._heats is None or self._heat < len(self._heats)

    @property
    def _name(self) -> str:
        return (self._heats or [])[self._heat][0]

    def _runners(self) -> list[float]:
        """The values still in the race."""
        if self._heats is None:
            raise FedtailError("call begin() before the race")
        if not self._field:
            values, rungs = self.values.get(self._name, (0.0,)), self._heats[self._heat][1]
            self._field = sorted(values[: rungs[0][0]], reverse=True)
            self._gain = [TIE * (value == values[0]) for value in self._field]
        return self._field

    def trials(self) -> dict[str, np.ndarray]:
        """Scalars of the local step, by name, that all clients try in addition to ``ask``: (P,) each, or (1,)."""
        if not self.racing or self.rivals:
            held = {**self.held, "lr": self.lr} if self.rivals else self.held
            return {name: np.array([value]) for name, value in held.items()}
        n = len(self._runners())
        return {k: np.array(self._runners() if k == self._name else [v] * n) for k, v in self.held.items()}

    def tell(
        self,
        rewards: np.ndarray | None = None,
        *,
        reports: dict[str, np.ndarray] | None = None,
        present: np.ndarray | None = None,
    ) -> int:
        if not self.racing:
            self._last = []
            return self.inner.tell(rewards, reports=reports, present=present)
        if len(self._runners()) > 1:
            raise FedtailError("report the results of a race with judge()")
        self._last, self._choice = [], 0
        self._advance()
        return 0

    def judge(self, rewards: np.ndarray, told: Mapping[str, np.ndarray], failed: np.ndarray) -> int:
        """Process a round of all rivals or candidates and return the number of the leader.

        Rivals are compared by the models as they are now, since who was ahead before shows in them; probes from a
        common model by what they have gained in all rounds. (N,) each: rewards (higher is better); other known values,
        for ``evidence``; whether each has failed.
        """
        rivals, field, values = self.rivals, self._runners(), self.values[self._name]
        self._check(rewards)
        if rivals:
            gain = rewards + TIE * np.array([value == values[0] for value in field])
        else:
            gain = rewards - rewards.mean() + self._gain
        self._gain = np.where(failed, -np.inf, gain).tolist()
        first = int(np.argmax(self._gain))
        self._hold(self._name, field[first])
        self._last = [
            {self._name: value, **{name: float(v[i]) for name, v in told.items()}, **({"diverged": True} if f else {})}
            for i, (value, f) in enumerate(zip(field, failed, strict=True))
        ]
        self._choice, self._rival = (0, rivals[first]) if rivals else (first, self._rival)
        self._advance()
        return rivals[first] if rivals else first

    def _check(self, rewards: np.ndarray) -> None:
        n = len(self._runners())
        if rewards.shape != (n,) or not np.isfinite(rewards).all():
            raise FedtailError(f"a race of {n} needs as many finite rewards, got {rewards.tolist()}")

    def _hold(self, name: str, value: float) -> None:
        self.held[name] = value
        if name == "rate":
            cast(Uniform, self.inner).settle(value)  # or what stands in front of one

    def _advance(self) -> None:
        """The next round: of the same rung, of the next one with the better half, or of the next heat."""
        rungs = (self._heats or [])[self._heat][1]
        self._round += 1
        ends = np.cumsum([rounds for _, rounds in rungs]).tolist()
        if self._round >= ends[-1]:
            self._heat, self._round, self._field, self._gain = self._heat + 1, 0, [], []
        elif self._round in ends:
            size = rungs[ends.index(self._round) + 1][0]
            kept = sorted(survivors(self._gain, size))
            self._field, self._gain = [self._field[i] for i in kept], [self._gain[i] for i in kept]

    @property
    def evidence(self) -> list[dict[str, Any]]:
        """What was tried in the last round and its reward; empty once the race is over."""
        return self._last

    # -- what the strategy does -----------------------------------------------------------------------

    def ask(self) -> np.ndarray:
        rows = self.inner.ask()
        if not self.racing:
            return rows
        field = self._runners()
        if self.rivals:
            return rows[:, :1]
        return np.tile(field, (self.n_clients, 1)) if self._name == "rate" else np.tile(rows[:, :1], (1, len(field)))

    def patterns(self) -> str | None:
        if self.racing:
            return "uniform" if len(self._runners()) > 1 and not self.rivals else None
        return self.inner.patterns()

    @property
    def choice(self) -> np.ndarray:
        return np.full(self.n_clients, self._choice) if self._last or self.rivals else self.inner.choice

    @property
    def reports(self) -> frozenset[str]:  # type: ignore[override]
        if self.rivals:
            return frozenset()
        return frozenset({DIVERGED}) if self.racing else self.inner.reports

    @property
    def searches(self) -> str:  # type: ignore[override]
        return self.inner.searches

    @property
    def base_rates(self) -> np.ndarray:  # type: ignore[override]
        return self.inner.base_rates

    @property
    def axes(self) -> np.ndarray:
        return self.inner.axes

    @property
    def n_axes(self) -> int:
        return self.inner.n_axes

    def weights(self, p: np.ndarray, present: np.ndarray) -> np.ndarray:
        return self.inner.weights(p, present)

    def observe(self, clients: np.ndarray, deltas: Sequence[Tensor]) -> None:
        if not self.racing:
            self.inner.observe(clients, deltas)

    @property
    def rates(self) -> np.ndarray:
        return self.inner.rates

    @property
    def done(self) -> bool:
        return not self.racing and self.inner.done

    def stats(self) -> dict[str, Any]:
        return {} if self._last else self.inner.stats()

    def state(self) -> dict[str, Any]:
        race = {
            "held": self.held,
            "heats": self._heats,
            "heat": self._heat,
            "round": self._round,
            "rival": self._rival,
            "field": self._field,
            "gain": [g if np.isfinite(g) else None for g in self._gain],
        }
        return {"race": race, "inner": self.inner.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        race = state["race"]
        self._field = list(race["field"])
        self._heats = [(name, [(n, rounds) for n, rounds in rungs]) for name, rungs in race["heats"]]
        self._heat, self._round, self._rival = race["heat"], race["round"], race.get("rival", 0)
        self._gain = [-np.inf if g is None else g for g in race["gain"]]
        self.inner.load_state(state["inner"])
        for name, value in race["held"].items():
            self._hold(name, value)


def race_of(rates: RateStrategy) -> Race | None:
    """The race in front of a strategy; None if nothing is raced."""
    return rates if isinstance(rates, Race) else None


def racing(rates: RateStrategy, settings: Settings) -> RateStrategy:
    """The strategy, behind a race where ``local.lr`` or the rate is ``auto``."""
    lr, rate = settings.local.lr == "auto", bool(getattr(rates, "raced", False))
    if not lr and not rate:
        return rates
    if lr and rates.searches == "lr":
        raise FedtailError("local.lr = 'auto' and rates.searches = 'lr' both search for a learning rate; use only one")
    if settings.privacy.mode == "central":
        raise FedtailError(
            f"privacy.mode = 'central' covers one aggregate per round, but {'local.lr' if lr else 'rates.rate'} = "
            f"'auto' compares several; set a number, e.g. {0.1 if lr else 0.6}"
        )
    return Race(rates, [name for name, raced in (("lr", lr), ("rate", rate)) if raced], settings.local.optimizer)


def usual_lrs(optimizer: str) -> tuple[float, ...]:
    """Learning rates that ``local.optimizer`` may want, the likeliest first."""
    return LRS.get(optimizer, LRS["sgd"])


def heats(rounds: int, names: Sequence[str] = ("lr",)) -> list[tuple[str, list[tuple[int, int]]]]:
    """What is raced, and on each rung how many values for how many rounds, within ``SHARE`` of a run's local runs;
    where nothing is raced for a while, one value is. A run too short for both races the learning rate alone, then fewer
    of them; rounds that are left go to what is raced first."""
    budget = int(SHARE * rounds + 1e-9)
    kept = [tuple(names[: len(names) - gone]) for gone in range(len(names))]
    for some, size in ((k, n) for k in kept for n in range(len(LRS["sgd"]), FEWEST[len(k)] - 1, -1)):
        sizes = {name: size if name == "lr" else len(RATES) for name in some}
        left = budget - sum(least(n) for n in sizes.values())
        if left < 0:
            continue
        out: list[tuple[str, list[tuple[int, int]]]] = []
        for name, n in sizes.items():
            found = rungs(n, least(n) + left, MOST[name])
            left -= sum((each - 1) * length for each, length in found) - least(n)
            before = sum(length for _, each in out for _, length in each)
            if name == "rate" and before < (wait := round(WAIT * rounds)):
                out.append(("", [(1, wait - before)]))
            out.append((name, found))
        return out
    return []


def least(n: int) -> int:
    """Local runs that a race of ``n`` values adds at least: a round of all, and one of the two best."""
    return n if n > 2 else 1


def rungs(n: int, budget: int, most: int) -> list[tuple[int, int]]:
    """A race of ``n`` values that adds at most ``budget`` local runs: half of them for a few rounds of all, which find
    out those that lead nowhere, the others for the two best, which need more rounds to be told apart. ``most``: rounds
    of the first rung."""
    if n == 2:
        return [(2, min(budget, most))]
    first = min(max(budget // (2 * (n - 1)), 1), most)
    return [(n, first), (2, min(budget - (n - 1) * first, LONGER * first))]
