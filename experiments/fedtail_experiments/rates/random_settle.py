"""The noise control of FedHOO: the same search, told rewards that are shuffled over the candidates of each round.

Rewards count from their round's mean (``reward = "drift"``): rounds at better boxes have better rewards throughout,
from which a search by raw rewards would learn even if they are shuffled.

A round costs as many local runs and validations; it ends by the same rules, often after fewer rounds, at rates that
mean nothing. What FedHOO is worth beyond settling *somewhere* is its lead over this strategy.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from fedtail.core.random import generator
from fedtail.rates.base import Present, Reports, Rewards, Setting
from fedtail.rates.fedhoo import FedHOO


@dataclass(eq=False)
class RandomSettle(FedHOO):
    """All of FedHOO's options apply. The model of a round is that of a random candidate too."""

    title = "settled at random"

    _: KW_ONLY
    reward: str = "drift"

    def __post_init__(self) -> None:
        self._seed = 0
        super().__post_init__()

    def begin(self, setting: Setting) -> None:
        super().begin(setting)
        self._seed = setting.seed

    def tell(self, rewards: Rewards = None, *, reports: Reports = None, present: Present = None) -> int:
        """Like FedHOO's; the rewards keep their values and lose their candidates."""
        if rewards is not None and not self.done:
            rewards = generator(self._seed, "random_settle", round=self._round).permutation(self._checked(rewards))
        return super().tell(rewards, reports=reports, present=present)
