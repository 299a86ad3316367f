"""HOO (Bubeck et al., X-Armed Bandits, JMLR 2011), truncated: what FedHOO is compared with.

One pull is one round at the centre of a box, so a round teaches about one point where FedHOO learns of 2^K:

    U = mean + sqrt(2 ln n / N) + nu rho^depth (unvisited: +inf),   B = min(U, max of the children's B)

Descend by B to a leaf, pull its centre, update the path, split the leaf along every axis.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from fedtail.errors import FedtailError, check_range
from fedtail.rates.base import Present, RateStrategy, Reports, Rewards, Setting, check_rate
from fedtail.rates.fedhoo import MAX_AXES
from fedtail.rates.tree import BoxTree


@dataclass(eq=False)
class HOO(RateStrategy):
    """Truncated HOO over [low, high]^K: PyXAB's ``T_HOO`` with its dimension-wise split, pull for pull.

    From the eighth pull on that holds for PyXAB 0.3.0 with one line corrected: there, the first box split in a layer
    takes the whole layer for its children (a shared list), and rewards go to the wrong branch.
    """

    title = "HOO"

    n_clients: int
    low: float = 0.4
    high: float = 0.8
    _: KW_ONLY
    rounds: int | None = None
    """Horizon n, the number of pulls; None takes the rounds of the run. Afterwards the rates are fixed."""
    nu: float = 1.0
    rho: float = 0.5

    def __post_init__(self) -> None:
        check_range("rates.low", self.low, 0.0)
        check_range("rates.high", self.high, self.low, open_low=True)
        check_rate("rates.high", self.high)
        check_range("rates.nu", self.nu, 0.0, open_low=True)
        check_range("rates.rho", self.rho, 0.0, 1.0, open_low=True, open_high=True)
        if self.rounds is not None:
            check_range("rates.rounds", self.rounds, 1)
        if self.n_clients > MAX_AXES:
            raise FedtailError(
                f"rates 'hoo' over {self.n_clients} clients would split a box into 2^{self.n_clients}; "
                f"at most {MAX_AXES} are allowed, use rates.name = 'uniform' or 'grid'"
            )
        self._horizon = self.rounds
        self._reset()

    def _reset(self) -> None:
        self._tree = BoxTree(np.full(self.n_clients, self.low), np.full(self.n_clients, self.high))
        self._visits, self._total = np.zeros(1), np.zeros(1)
        self._score = np.full(1, np.inf)
        self._pulls = 0
        self._split(0)
        self._node = self._descend()
        self._rates = self._tree.centre(0)

    def begin(self, setting: Setting) -> None:
        if setting.participation < 1:
            raise FedtailError(
                f"rates 'hoo' compares rates of all clients, but run.participation = {setting.participation:g}; "
                f"use rates.name = 'grid' or 'uniform' (or run.participation = 1)"
            )
        if self._horizon is None:
            self._horizon = setting.rounds

    def ask(self) -> np.ndarray:
        point = self._rates if self.done else self._tree.centre(self._node)
        return np.asarray(point[:, None].copy())

    def patterns(self) -> str | None:
        return None if self.done else "uniform"

    def tell(self, rewards: Rewards = None, *, reports: Reports = None, present: Present = None) -> int:
        if self.done:
            return 0
        if rewards is None or len(rewards) != 1:
            raise FedtailError(f"HOO needs one reward per round, got {0 if rewards is None else len(rewards)}")
        node = self._node
        self._rates = self._tree.centre(node)
        self._pulls += 1
        # A round with missing clients has pulled another arm than the box's centre: it teaches nothing.
        if present is None or bool(np.all(present)):
            path = self._tree.path(node)
            self._visits[path] += 1
            self._total[path] += float(rewards[0])
            if self._tree.depth(node) <= self._depth_cap():
                self._split(node)
            self._rescore()
        if self.done:
            self._rates = self._tree.centre(self._recommended())
        self._node = self._descend()
        return 0

    @property
    def rates(self) -> np.ndarray:
        return self._rates.copy()

    @property
    def done(self) -> bool:
        return self._horizon is not None and self._pulls >= self._horizon

    def stats(self) -> dict[str, Any]:
        return {
            "phase": "fixed" if self.done else "search",
            "rounds": self._pulls,
            "nodes": len(self._tree),
            "leaves": int(self._tree.is_leaf().sum()),
            "depth": int(self._tree.level.max()),
            "node_depth": self._tree.depth(self._node),
        }

    def state(self) -> dict[str, Any]:
        visited = np.flatnonzero(self._visits)
        return {
            "horizon": self._horizon,
            "pulls": self._pulls,
            "rates": self._rates.tolist(),
            "split": [node for node, _ in self._tree.expansions],
            "visited": visited.tolist(),
            "visits": self._visits[visited].tolist(),
            "total": self._total[visited].tolist(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._horizon = state["horizon"]
        self._reset()
        for node in state["split"][1:]:
            self._split(int(node))
        visited = np.array(state["visited"], dtype=np.int64)
        self._visits[visited], self._total[visited] = state["visits"], state["total"]
        self._pulls, self._rates = state["pulls"], np.array(state["rates"])
        if self._pulls:
            self._rescore()
        self._node = self._descend()

    def _depth_cap(self) -> float:
        n = self._horizon or math.inf
        return math.ceil((math.log(n) / 2 - math.log(1 / self.nu)) / math.log(1 / self.rho)) if n < math.inf else n

    def _split(self, node: int) -> None:
        kids = self._tree.split(node, tuple(range(self.n_clients)))
        zeros = np.zeros(len(kids))
        self._visits, self._total = np.concatenate([self._visits, zeros]), np.concatenate([self._total, zeros])
        self._score = np.concatenate([self._score, np.full(len(kids), np.inf)])

    def _rescore(self) -> None:
        """U of every node, then B from the leaves up; children always come after their parent."""
        n = self._horizon or max(self._pulls, 1)
        seen = self._visits > 0
        optimistic = np.full(len(self._tree), np.inf)
        depth = self._tree.level.min(axis=1)[seen]
        bound = np.sqrt(2 * math.log(n) / self._visits[seen]) + self.nu * self.rho**depth
        optimistic[seen] = self._total[seen] / self._visits[seen] + bound
        self._score = optimistic.copy()
        for node, _ in sorted(self._tree.expansions, reverse=True):
            self._score[node] = min(optimistic[node], self._score[self._tree.children(node)].max())

    def _descend(self) -> int:
        """To a leaf by the largest B; ties to the last child, as PyXAB does."""
        node = 0
        while len(kids := self._tree.children(node)):
            best = self._score[kids]
            node = int(kids[np.flatnonzero(best == best.max())[-1]])
        return node

    def _recommended(self) -> int:
        """The deepest box on the path of most visits: where the search spent its rounds."""
        node = 0
        while len(kids := self._tree.children(node)) and self._visits[kids].max() > 0:
            node = int(kids[np.argmax(self._visits[kids])])
        return node
