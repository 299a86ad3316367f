"""Several models side by side in a round, each on its own way from the same beginning, of which one is kept in the end.

What a learning rate is worth shows after some rounds: after one, a small step from a common model nearly always looks
better than a large one (short-horizon bias; Wu et al., ICLR 2018). So a race gives every value a model of its own, a
*rival*: vector, server moments and method state, and what clients keep. The rival that wins is the run that had its
value from the start, bit by bit; what was spent is the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.core.candidates import separate_candidates
from fedtail.core.records import DIVERGED, Refusal, Task
from fedtail.methods.base import Server
from fedtail.rounds.acceptance import QuorumError
from fedtail.rounds.race import race_of
from fedtail.rounds.search import race_values
from fedtail.rounds.state import Problem, Rival, State
from fedtail.settings import Settings


@dataclass(frozen=True)
class Played:
    """What a round made of one model, for the round's record."""

    task: Task
    server: Server
    present: np.ndarray
    """Clients whose updates were taken."""
    refused: list[Refusal]
    record: dict[str, Any]
    more: dict[str, Any]
    """What the record says last: privacy, diagnostics, reward."""


def play_rivals(
    problem: Problem, settings: Settings, state: State, play: Callable[[dict[str, Any] | None], Played]
) -> Played:
    """Play a round of every rival, after which ``state`` is that of the leading one; of the one model, if there are no
    rivals. ``play``: the round of the model that ``state`` holds, given the record with what privacy has cost so far.

    A rival in which a client's loss is not finite, or too few clients are left, has failed; its model stays where it
    was.
    """
    race = race_of(problem.rates)
    if race is None or not race.rivals:
        return play(None)
    start, rivals, played, trouble = leave(problem, state), race.rivals, dict[int, Played](), None
    spent: dict[str, Any] | None = None
    for rival in rivals:
        enter(problem, state, state.rivals.setdefault(rival, start))
        race.enter(rival)
        try:
            played[rival] = play(spent)
        except QuorumError as error:
            trouble = error
            continue
        state.rivals[rival], spent = leave(problem, state), played[rival].more
    if trouble is not None and not played:
        raise trouble
    silent = np.array([n not in played for n in rivals])
    failed = silent | [n in played and any(r.code == DIVERGED for r in played[n].refused) for n in rivals]
    present = np.unique(np.concatenate([one.present for one in played.values()]))
    models = separate_candidates([state.rivals[n].x for n in rivals])
    values, told = race_values(problem, settings, models, present)
    leader = race.judge(values, told, silent if failed.all() else failed)
    enter(problem, state, state.rivals[leader])
    state.rivals = {n: state.rivals[n] for n in race.rivals}
    refused = {(r.client, r.reason): r for one in played.values() for r in one.refused if r.code != DIVERGED}
    best = played[leader]
    cost = {"privacy": spent["privacy"]} if spent is not None and "privacy" in spent else {}
    return Played(
        task=best.task,
        server=best.server,
        present=best.present,
        refused=list(refused.values()),
        record=best.record,
        more={**best.more, **cost},
    )


def leave(problem: Problem, state: State) -> Rival:
    """What the state is of one model."""
    return Rival(state.x, state.method, state.server, dict(problem.engine.state()))


def enter(problem: Problem, state: State, rival: Rival) -> None:
    """Make a rival's model that of the state, and of the clients."""
    state.x, state.method, state.server = rival.x, rival.method, rival.server
    problem.engine.load_state(rival.clients)
