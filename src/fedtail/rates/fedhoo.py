"""FedHOO: joint search of the clients' rates by hierarchical optimistic optimization (paper 3.4, B).

Aggregation is linear in the clients' updates. So two local runs per client, at the two probes of a box, give
the server all 2^K combinations, and one round evaluates the 2^K children of the box at their centres:

1. select the leaf with the highest score, and probe each client at (3L+U)/4 and (L+3U)/4;
2. validate all candidates; the best, s*, becomes the global model and its probes the rates in force;
3. halve the box along every axis, and value each child by a moving average down its branch,
   V(child) = (1 - a) V(parent) + a R (the paper's implementation details: rewards of different rounds compare fairly);
   update the boxes on the path to the root.

The search ends on pure noise too, after as many rounds, so "it settles" says nothing: ``random_settle`` is the control.

Where the paper is silent or contradicts itself, the decision is written where it is made.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from fedtail.core.candidates import binary_patterns
from fedtail.errors import FedtailError, check_range, one_of
from fedtail.rates.base import RATES, Present, RateStrategy, Reports, Rewards, Setting, base_rates, check_rate
from fedtail.rates.tree import BoxTree

WARN_AXES, MAX_AXES = 6, 12
NO_EFFECT = 1e-12
"""Main effects below this are rounding, not a preference."""
TAU, ALPHA = 0.01, 1.0
"""Weight of the bonus of boxes on the path. In the pseudocode only the leaf at the depth cap ever competes with one,
and it stays selected whatever these are."""


@RATES.add("fedhoo")
@dataclass(eq=False)
class FedHOO(RateStrategy):
    """Ask / tell search over [low, high]^K, one axis per client.

    >>> search = FedHOO(n_clients=2, low=0.0, high=1.0)
    >>> search.ask().tolist()
    [[0.25, 0.75], [0.25, 0.75]]
    >>> search.tell([0.1, 0.4, 0.2, 0.3])  # rewards of s = 00, 01, 10, 11; bit k = client k
    1
    >>> search.rates.tolist()
    [0.75, 0.25]
    """

    title = "FedHOO"

    n_clients: int
    low: float = 0.4
    high: float = 0.8
    _: KW_ONLY
    searches: str = "rate"
    """What is searched: ``rate``, ``lr`` (the schedule's first value) or a tunable field of the method (``beta``)."""
    log: bool = False
    """Halve boxes on a logarithmic scale: for learning rates and other scale parameters."""
    base_rate: float | Sequence[float] = 0.6
    """Resampling rate, one or one per client, while something else is searched."""
    score: str = "pseudocode"
    """Which reading of the paper scores leaves: ``pseudocode`` or ``equation``."""
    reward: str = "raw"
    """``raw`` compares rewards of different rounds as they are; ``drift`` removes each round's mean."""
    select: str = "joint"
    """``joint`` takes the best candidate; ``main_effect`` the better half along each axis on average."""
    cold_rounds: int = 3
    max_depth: int = 5
    stable_rounds: int = 5
    max_rounds: int = 30
    """Rounds with two probes, cold start included; then the rates are fixed whatever was found."""
    tau: float = TAU
    """With ``score = "equation"``: bonus of the root for its width, halved with each halving of a box."""
    alpha: float = ALPHA
    """With ``score = "equation"``: exploration, in units of the rewards' variance."""
    ema: float = 0.5
    """Weight a of a new reward in the moving average that values a box; 1 forgets what the boxes around it were
    worth."""

    def __post_init__(self) -> None:
        for option, value, allowed in (
            ("score", self.score, ("pseudocode", "equation")),
            ("reward", self.reward, ("raw", "drift")),
            ("select", self.select, ("joint", "main_effect")),
        ):
            if value not in allowed:
                raise one_of(f"rates.{option}", value, allowed)
        check_range("rates.low", self.low, 0.0, open_low=self.log)
        check_range("rates.high", self.high, self.low, open_low=True)
        if self.searches == "rate":
            check_rate("rates.high", self.high)
        check_range("rates.cold_rounds", self.cold_rounds, 0)
        check_range("rates.max_depth", self.max_depth, 1, 30)
        check_range("rates.stable_rounds", self.stable_rounds, 1)
        check_range("rates.max_rounds", self.max_rounds, 1)
        check_range("rates.tau", self.tau, 0.0)
        check_range("rates.alpha", self.alpha, 0.0)
        check_range("rates.ema", self.ema, 0.0, 1.0, open_low=True)
        for bonus, given, default in (("tau", self.tau, TAU), ("alpha", self.alpha, ALPHA)):
            if self.score == "pseudocode" and given != default:
                warnings.warn(
                    f"rates.{bonus} = {given:g} has no effect: it belongs to rates.score = 'equation'", stacklevel=3
                )
        self.base_rates = base_rates(self.base_rate, self.n_clients)
        check_axes(self.n_axes, self.n_clients)
        self._reset()

    def _reset(self) -> None:
        bounds = np.full((2, self.n_axes), [[self.low], [self.high]], dtype=np.float64)
        if self.log:
            bounds = np.log(bounds)
        self._tree = BoxTree(*bounds)
        self._value, self._visits = np.zeros(1), np.zeros(1)
        self._score = np.full(1, np.inf)
        self._node = 0
        self._round = 0
        self._point = self._tree.centre(0)
        self._choice = np.zeros(self.n_clients, dtype=np.int64)
        self._cells: list[int] = []
        self._streak = 0
        self._stopped = ""
        self._variance = 0.0
        self._missing: list[int] = []
        self._missing_rounds = 0

    # -- what the loop sees ---------------------------------------------------------------------------

    def begin(self, setting: Setting) -> None:
        # The paper leaves partial participation undefined; a client that is usually absent would
        # leave its axis unsearched, so this is refused here and solved by clusters.
        if setting.participation < 1:
            raise FedtailError(
                f"rates 'fedhoo' needs every client in every round, but run.participation = {setting.participation:g}; "
                f"use rates.name = 'fedhoo_clusters' (or run.participation = 1)"
            )

    def ask(self) -> np.ndarray:
        """(K, 2) while searching; (K, 1) afterwards."""
        if self.done:
            return self.rates[:, None]
        return np.asarray(self._from_axis(self._tree.probes(self._node))[self.axes])

    def patterns(self) -> str | None:
        return None if self.done else "binary"

    def tell(self, rewards: Rewards = None, *, reports: Reports = None, present: Present = None) -> int:
        """rewards: (2^A,), candidate s having taken the upper probe on the axes whose bit of s is set."""
        if self.done:
            self._choice = np.zeros(self.n_clients, dtype=np.int64)
            return 0
        r = self._checked(rewards)
        here = np.ones(self.n_axes, dtype=bool)
        if present is not None:
            here[:] = False
            here[self.axes[np.asarray(present, dtype=bool)]] = True
        if self.select == "main_effect":
            r = additive_fit(r, self.n_axes)
        # Ties go to the smallest s (argmax takes the first); bit a of s is axis a.
        winner = int(np.argmax(r))
        bits = (winner >> np.arange(self.n_axes)) & 1
        self._choice = bits[self.axes]
        chosen = self._tree.probes(self._node)[np.arange(self.n_axes), bits]
        self._point = np.where(here, chosen, self._point)  # an absent axis keeps its rate
        self._missing = sorted(set(self.axes.tolist()) - set(np.flatnonzero(here).tolist()))
        self._missing_rounds += bool(self._missing)
        self._count_stable(self._node)
        # A cold round probes the root and adopts the best candidate, but creates and records nothing:
        # rewards of a model that has learnt nothing yet would steer the tree for good.
        if self._round >= self.cold_rounds:
            self._learn(r, here)
        self._round += 1
        if self._streak >= self.stable_rounds:
            self._stopped = "stable"
        elif self._round >= self.max_rounds:
            self._stopped = "limit"
        self._node = self._best_leaf()
        return winner

    @property
    def choice(self) -> np.ndarray:
        return self._choice.copy()

    @property
    def rates(self) -> np.ndarray:
        return np.asarray(self._from_axis(self._point)[self.axes])

    @property
    def done(self) -> bool:
        return bool(self._stopped)

    def stats(self) -> dict[str, Any]:
        """The tree after the last round; ``missing`` lists axes that had no client in it and did not split."""
        depth = int(self._tree.level.max())
        out: dict[str, Any] = {
            "phase": "fixed" if self.done else "cold" if self._round < self.cold_rounds else "search",
            "rounds": self._round,
            "nodes": len(self._tree),
            "leaves": int(self._tree.is_leaf().sum()),
            "depth": depth,
            "node_depth": self._tree.depth(self._node),
            "stable_rounds": self._streak,
            "missing": list(self._missing),
            "missing_rounds": self._missing_rounds,
        }
        return {**out, "stopped": self._stopped} if self.done else out

    def state(self) -> dict[str, Any]:
        return {
            "n_axes": self.n_axes,
            "round": self._round,
            "node": self._node,
            "point": self._point.tolist(),
            "tree": self._tree.state(),
            "value": self._value.tolist(),
            "visits": self._visits.tolist(),
            "score": [v if math.isfinite(v) else None for v in self._score.tolist()],
            "cells": list(self._cells),
            "streak": self._streak,
            "stopped": self._stopped,
            "variance": self._variance,
            "missing": list(self._missing),
            "missing_rounds": self._missing_rounds,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        if state["n_axes"] != self.n_axes:
            raise FedtailError(
                f"the saved search has {state['n_axes']} axes, this one {self.n_axes}; resume with the same clients"
            )
        self._reset()
        self._round, self._node, self._streak = state["round"], state["node"], state["streak"]
        self._point = np.array(state["point"])
        self._tree.load_state(state["tree"])
        self._value, self._visits = np.array(state["value"]), np.array(state["visits"])
        self._score = np.array([math.inf if v is None else v for v in state["score"]])
        self._cells, self._stopped = list(state["cells"]), state["stopped"]
        self._variance = state["variance"]
        self._missing, self._missing_rounds = list(state["missing"]), state["missing_rounds"]

    # -- the search -------------------------------------------------------------------------------------

    def _learn(self, r: np.ndarray, here: np.ndarray) -> None:
        """Split the probed box and update every box around it. r: (2^A,) rewards; here: (A,) axes with clients."""
        tree, node, mean = self._tree, self._node, float(r.mean())
        # Accuracy rises over rounds, so with raw rewards an old leaf hardly ever beats a new one.
        # ``drift`` counts a child's reward from its round's mean, on top of the parent's value: leaves of
        # different rounds compare, and a constant added to a round changes nothing.
        shift = self._value[node] - mean if self.reward == "drift" else 0.0
        # An axis at the depth cap is not halved any more; a box with all axes there stays a leaf,
        # is probed at its quarter points and only updates its own statistics. An axis whose clients are all
        # missing had a zero direction: the rewards say nothing about it, so its interval stays as it is.
        axes = np.flatnonzero(here & (tree.level[node] < self.max_depth))
        if axes.size:
            tree.split(node, axes)
            value = _marginal(r, axes, self.n_axes) + shift
            if self._visits[node]:  # the root has no value yet when it is split first
                value = (1 - self.ema) * self._value[node] + self.ema * value
            self._value = np.concatenate([self._value, value])
            self._visits = np.concatenate([self._visits, np.ones(len(value))])
            self._score = np.concatenate([self._score, value])
        n_rounds = self._round - self.cold_rounds + 1
        self._variance += (float(r.var()) - self._variance) / n_rounds
        for box in tree.path(node):
            # The pseudocode has a running mean, the text an exponential one, which is taken for all boxes: those on
            # the path move towards the round's mean by ``ema``, the first time all the way.
            rate = self.ema if self._visits[box] else 1.0
            self._value[box] += rate * (mean + shift - self._value[box])
            self._visits[box] += 2.0 ** here.sum()
            self._score[box] = self._value[box] + self._bonus(np.array([box]), TAU, ALPHA)[0]

    def _bonus(self, boxes: np.ndarray, tau: float, alpha: float) -> np.ndarray:
        """tau 2^-depth + sqrt(alpha ln(t+1) / N).

        The paper's tau diam^depth vanishes below depth 1 (.2, .01, 1e-4 ...), and its loop uses the
        selected node's diameter for every ancestor. This is HOO's nu rho^depth of each box's own depth.
        """
        depth = self._tree.level[boxes].min(axis=1)
        width = tau * 2.0**-depth
        return np.asarray(width + np.sqrt(alpha * math.log(self._round + 1) / np.maximum(self._visits[boxes], 1)))

    def _best_leaf(self) -> int:
        """The leaf to probe next; ties go to the older one.

        In the pseudocode a new leaf's score is its value, and only the selected box and its
        ancestors get a bonus. That is a greedy descent in which the leaf at the depth cap stays selected: the
        only reading under which the stop rule fires and rates settle as reported, hence the default.
        ``equation`` gives every leaf its bonus, anew each round. With alpha = 1 it would dwarf
        differences of accuracy (1.2 against 0.01), so alpha is in units of the reward's variance there.
        """
        score = self._score
        if self.score == "equation":
            boxes = np.arange(len(self._tree))
            score = self._value + self._bonus(boxes, self.tau, self.alpha * self._variance)
            score[self._visits == 0] = np.inf
        return int(np.argmax(np.where(self._tree.is_leaf(), score, -np.inf)))

    def _count_stable(self, node: int) -> None:
        """Count rounds in a row whose rates lie in the same cell of the finest grid for every axis.

        Nested boxes meet "the same search intervals" trivially during descent, the identical
        probes of the cold start too. So only rounds count whose box is at most one halving above the cap.
        """
        if self._round < self.cold_rounds or self._tree.depth(node) < self.max_depth - 1:
            self._cells, self._streak = [], 0
            return
        low, high = self._tree.low[0], self._tree.high[0]
        cells = np.floor((self._point - low) / (high - low) * 2**self.max_depth).astype(int).tolist()
        self._streak = self._streak + 1 if cells == self._cells else 1
        self._cells = cells

    def _from_axis(self, point: np.ndarray) -> np.ndarray:
        return np.exp(point) if self.log else point

    def _checked(self, rewards: np.ndarray | Sequence[float] | None) -> np.ndarray:
        r = np.asarray([] if rewards is None else rewards, dtype=np.float64)
        if r.shape != (2**self.n_axes,):
            raise FedtailError(f"FedHOO over {self.n_axes} axes needs {2**self.n_axes} rewards, got shape {r.shape}")
        if not np.isfinite(r).all():
            raise FedtailError("FedHOO got a non-finite reward; check that the clients have validation data")
        return r


def additive_fit(rewards: np.ndarray, n_axes: int) -> np.ndarray:
    """(2^A,) rewards under the best additive model: the mean plus each axis's main effect.

    An effect averages over 2^(A-1) pairs of candidates, so noise shrinks by as much; interactions are given up.
    """
    bits = binary_patterns(n_axes)
    signs = 2.0 * bits - 1.0
    half_effects = signs.T @ rewards / len(rewards)
    half_effects[np.abs(half_effects) < NO_EFFECT] = 0.0
    return np.asarray(rewards.mean() + signs @ half_effects)


def _marginal(rewards: np.ndarray, axes: np.ndarray, n_axes: int) -> np.ndarray:
    """(2^len(axes),) mean reward for each combination of halves along ``axes``."""
    if len(axes) == n_axes:
        return rewards.copy()
    cell = binary_patterns(n_axes)[:, axes] @ (1 << np.arange(len(axes)))
    return np.asarray(np.bincount(cell, weights=rewards) / np.bincount(cell))


def check_axes(n_axes: int, n_clients: int) -> None:
    """Warn where 2^A validations get dear, refuse where they get absurd."""
    if n_axes > MAX_AXES:
        raise FedtailError(
            f"rates 'fedhoo' over {n_axes} clients would validate 2^{n_axes} = {2**n_axes:,} models a round (at most "
            f"{MAX_AXES} clients are allowed); use rates.name = 'fedhoo_clusters' to search over up to "
            f"{WARN_AXES} clusters"
        )
    if n_axes > WARN_AXES:
        warnings.warn(
            f"FedHOO over {n_axes} axes validates {2**n_axes:,} models in every search round, {2 ** (n_axes - 5)} "
            f"times as many as over 5; 'fedhoo_clusters' searches {n_clients} clients in up to {WARN_AXES} clusters",
            stacklevel=4,
        )
