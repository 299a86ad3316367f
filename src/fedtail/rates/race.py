"""Learning rate and resampling rate found by a race: what ``local.lr = "auto"`` and ``rates.rate = "auto"`` do in the
first rounds of a run.

Every client trains at every value still in the race, from the same global model and as further probes of the same step.
Aggregation is linear, so candidate j is the model in which all clients took value j; the clients compare the candidates
on their private validation splits, and the better half goes on (successive halving; Jamieson and Talwalkar, AISTATS
2016). The round's best candidate becomes the global model, so no round is lost. A method's own scale, such as FedCGNM's
delta, is raced at the learning rate that won, and the resampling rate at both, once the model knows its way: a high
rate is ahead in the first rounds, because its epochs are longer, whether or not it is at the end. Then the rate
strategy takes over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from torch import Tensor

from fedtail.core.records import DIVERGED
from fedtail.errors import FedtailError
from fedtail.rates.base import RateStrategy, Setting

LRS: Final[Mapping[str, tuple[float, ...]]] = {
    "sgd": (0.1, 0.3, 0.03, 1.0, 0.01),
    "adam": (0.001, 0.003, 0.0003, 0.01, 0.0001),
}
"""Learning rates raced, by optimizer, the likeliest first: it is in force before the first round, and a short run races
fewer. Another optimizer races those of ``sgd``; as many for each."""
VALUES: Final[Mapping[str, tuple[float, ...]]] = {"delta": (0.1, 0.01, 1.0), "rate": (0.6, 1.0)}
"""What else is raced after the learning rate, in this order; the first value is the default. A short run leaves out the
first of them first. All but ``rate`` are scales of a method."""
WAIT: Final = 0.2
"""Share of the rounds before the resampling rate is raced."""
HEAD_START: Final[Mapping[str, float]] = {"delta": 0.01}
"""What another value than the default must gain in every round to replace it: validation splits are small."""
TIE: Final = 1e-9
"""What the likeliest value has ahead otherwise: networks that all answer one class still are equally good."""
MOST: Final[Mapping[str, int]] = {"lr": 3, "rate": 3, "delta": 1}
"""Rounds of a rung, at most."""
FEWEST: Final[Mapping[int, int]] = {1: 2, 2: 4}
"""Learning rates in the race, at least, by how many things are raced; all of them where more are."""
SHARE: Final = 0.3
"""Most local runs that a race may add, as a share of those that the run has without it."""


class Race(RateStrategy):
    """Races what ``names`` says, then is the strategy ``inner``. Ties go to the likeliest, then to the larger value."""

    def __init__(self, inner: RateStrategy, names: Sequence[str] = ("lr",), optimizer: str = "sgd") -> None:
        """``names``: ``lr`` and those of ``VALUES``, in the order in which they are raced; ``optimizer``: whose
        learning rates."""
        self.values = {name: usual_lrs(optimizer) if name == "lr" else VALUES[name] for name in names}
        self.inner, self.n_clients = inner, inner.n_clients
        self.name, self.title = " and ".join(f"{name}=auto" for name in names), inner.title  # type: ignore[misc]
        self.held = {name: values[0] for name, values in self.values.items()}
        if "rate" in self.held:
            inner.settle(self.held["rate"])
        self._heats: list[tuple[str, list[tuple[int, int]]]] | None = None
        self._heat = self._round = 0
        self._field: list[float] = []
        self._gain: list[float] = []
        self._choice = 0
        self._last: list[dict[str, Any]] = []

    # -- the race -------------------------------------------------------------------------------------

    @property
    def lr(self) -> float | None:
        return self.held.get("lr")

    def begin(self, setting: Setting) -> None:
        if self._heats is None:
            self._heats = heats(setting.rounds, tuple(self.values))
        self.inner.begin(replace(setting, rounds=max(setting.rounds - self.length, 1)))

    @property
    def length(self) -> int:
        """Rounds of the race."""
        return sum(rounds for _, rungs in self._heats or [] for _, rounds in rungs)

    @property
    def racing(self) -> bool:
        return self._heats is None or self._heat < len(self._heats)

    @property
    def _name(self) -> str:
        return (self._heats or [])[self._heat][0]

    def _runners(self) -> list[float]:
        """The values in the race."""
        if self._heats is None:
            raise FedtailError("a race must be told of the run first: call begin()")
        if not self._field:
            values, rungs = self.values.get(self._name, (0.0,)), self._heats[self._heat][1]
            self._field = sorted(values[: rungs[0][0]], reverse=True)
            ahead = HEAD_START.get(self._name, 0.0) * sum(rounds for _, rounds in rungs) or TIE
            self._gain = [ahead * (value == values[0]) for value in self._field]
        return self._field

    def trials(self) -> dict[str, np.ndarray]:
        if not self.racing:
            return {name: np.array([value]) for name, value in self.held.items()}
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
        field = self._runners()
        if len(field) == 1:
            self._last, self._choice = [], 0
            self._advance()
            return 0
        r = np.asarray([] if rewards is None else rewards, dtype=np.float64)
        if r.shape != (len(field),) or not np.isfinite(r).all():
            raise FedtailError(f"a race of {len(field)} needs as many finite rewards, got {r.tolist()}")
        failed = np.nan_to_num((reports or {}).get(DIVERGED, np.zeros((1, len(field))))).max(axis=0) > 0
        self._gain = [g + v if not f else -np.inf for g, v, f in zip(self._gain, r - r.mean(), failed, strict=True)]
        self._choice = int(np.argmax(self._gain))
        self._hold(self._name, field[self._choice])
        self._last = [
            {self._name: value, "reward": float(v), **({"diverged": True} if f else {})}
            for value, v, f in zip(field, r, failed, strict=True)
        ]
        self._advance()
        return self._choice

    def _hold(self, name: str, value: float) -> None:
        self.held[name] = value
        if name == "rate":
            self.inner.settle(value)

    def _advance(self) -> None:
        """The next round: of the same rung, of the next one with the better half, or of the next heat."""
        rungs = (self._heats or [])[self._heat][1]
        self._round += 1
        ends = np.cumsum([rounds for _, rounds in rungs]).tolist()
        if self._round >= ends[-1]:
            self._heat, self._round, self._field, self._gain = self._heat + 1, 0, [], []
        elif self._round in ends:
            size = rungs[ends.index(self._round) + 1][0]
            kept = sorted(np.argsort([-g for g in self._gain], kind="stable")[:size].tolist())
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
        return np.tile(field, (self.n_clients, 1)) if self._name == "rate" else np.tile(rows[:, :1], (1, len(field)))

    def patterns(self) -> str | None:
        if self.racing:
            return "uniform" if len(self._runners()) > 1 else None
        return self.inner.patterns()

    @property
    def choice(self) -> np.ndarray:
        return np.full(self.n_clients, self._choice) if self._last else self.inner.choice

    @property
    def reports(self) -> frozenset[str]:  # type: ignore[override]
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
            "field": self._field,
            "gain": [g if np.isfinite(g) else None for g in self._gain],
        }
        return {"race": race, "inner": self.inner.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        race = state["race"]
        self._field = list(race["field"])
        self._heats = [(name, [(n, rounds) for n, rounds in rungs]) for name, rungs in race["heats"]]
        self._heat, self._round = race["heat"], race["round"]
        self._gain = [-np.inf if g is None else g for g in race["gain"]]
        self.inner.load_state(state["inner"])
        for name, value in race["held"].items():
            self._hold(name, value)


def usual_lrs(optimizer: str) -> tuple[float, ...]:
    """Learning rates that ``local.optimizer`` may want, the likeliest first."""
    return LRS.get(optimizer, LRS["sgd"])


def heats(rounds: int, names: Sequence[str] = ("lr",)) -> list[tuple[str, list[tuple[int, int]]]]:
    """What is raced, and on each rung how many values for how many rounds, within ``SHARE`` of a run's local runs;
    where nothing is raced for a while, one value is. A run too short for everything races less, then fewer learning
    rates; rounds that are left go to what is raced first."""
    budget = SHARE * rounds
    kept = [(*names[:1], *names[1 + gone :]) for gone in range(len(names))]
    most = len(LRS["sgd"])
    for some, size in ((k, n) for k in kept for n in range(most, FEWEST.get(len(k), most) - 1, -1)):
        sizes = {name: size if name == "lr" else len(VALUES[name]) for name in some}
        left = budget - sum(cost(n) for n in sizes.values())
        if left < 0:
            continue
        out: list[tuple[str, list[tuple[int, int]]]] = []
        for name, n in sizes.items():
            more = min(int(left // cost(n)), MOST[name] - 1)
            left -= more * cost(n)
            before = sum(each for _, rungs in out for _, each in rungs)
            if name == "rate" and before < (wait := round(WAIT * rounds)):
                out.append(("", [(1, wait - before)]))
            out.append((name, [(each, 1 + more) for each in halves(n)]))
        return out
    return []


def cost(n: int) -> int:
    """Local runs that a race of ``n`` values adds, a round to each rung."""
    return sum(size - 1 for size in halves(n))


def halves(n: int) -> list[int]:
    """How many values are on each rung: 5, 3, 2."""
    return [n, *halves(-(-n // 2))] if n > 2 else [n] if n == 2 else []
