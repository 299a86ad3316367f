"""Successive halving (Jamieson and Talwalkar, AISTATS 2016): many candidates for a short while, the best for longer.

It finds the learning rate where ``local.lr`` is ``auto`` (``rounds.race``), the settings of ``fedtail tune --budget``
(``study.tuning``), and those of every method in the searches of the experiments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

Candidate = TypeVar("Candidate")


def survivors(scores: Sequence[float], n: int, always: Collection[int] = ()) -> list[int]:
    """Return the indices of the ``n`` best scores, at least one, the best first and of equals the earlier.

    ``always`` go on however they did, right behind the best.

    >>> survivors([0.1, 0.3, 0.2, 0.3], 2), survivors([0.1, 0.3, 0.2], 1, always=[0])
    ([1, 3], [1, 0])
    """
    best, *rest = sorted(range(len(scores)), key=lambda i: -scores[i])[: max(n, 1)]
    return [best, *(i for i in always if i != best), *(i for i in rest if i not in always)]


def lengths(rounds: int, rungs: int, factor: int, least: int = 1) -> list[int]:
    """Return the rounds of each rung: the last has all, each one before a part of the next.

    >>> lengths(50, 3, 2)
    [13, 25, 50]
    """
    return [max(least, -(-rounds // factor ** (rungs - 1 - rung))) for rung in range(rungs)]


def halving(
    field: Sequence[Candidate],
    rounds: Sequence[int],
    play: Callable[[Sequence[Candidate], int], Sequence[float]],
    *,
    keep: int,
    always: Callable[[Candidate], bool] = lambda _: False,
) -> None:
    """Play a field of candidates rung by rung; one in ``keep`` goes on to the next.

    Args:
        rounds: of each rung; one that is no longer than the rung before it is left out.
        play: candidates and the number of a rung -> their scores, higher is better; fewer than asked for, of the first
            ones, where time has run out.
        always: whether a candidate goes on however it did.
    """
    standing = list(field)
    for rung in range(len(rounds)):
        if rung and rounds[rung] <= rounds[rung - 1]:
            continue
        scores = play(standing, rung)
        if not scores:
            return
        safe = [i for i in range(len(scores)) if always(standing[i])]
        standing = [standing[i] for i in survivors(scores, len(scores) // keep, safe)]
