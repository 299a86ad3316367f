"""Successive halving: who goes on, for how long, and what happens when time runs out."""

from __future__ import annotations

import numpy as np

from fedtail.core.halving import halving, lengths, survivors


def test_the_better_part_goes_on_the_best_first_and_of_equals_the_earlier() -> None:
    assert survivors([0.1, 0.5, 0.5, 0.9, -np.inf], 3) == [3, 1, 2]
    assert survivors([-np.inf, -np.inf], 0) == [0], "somebody goes on"


def test_who_always_goes_on_is_second_at_the_latest() -> None:
    assert survivors([0.0, 0.5, 0.9], 2, always=[0]) == [2, 0, 1]
    assert survivors([0.9, 0.5, 0.1], 1, always=[0]) == [0], "and is not counted twice"


def test_the_last_rung_has_all_rounds_and_the_first_no_fewer_than_asked() -> None:
    assert lengths(50, 3, 2) == [13, 25, 50]
    assert lengths(9, 3, 3, least=3) == [3, 3, 9]


def played(field: str, rounds: list[int], keep: int, *, always: str = "", time: int = 99) -> list[str]:
    """The letters of each rung; a later letter is better, and so many of each rung are played."""
    rungs: list[str] = []

    def play(standing: list[str], rung: int) -> list[int]:
        rungs.append("".join(standing[:time]))
        return [ord(letter) for letter in standing[:time]]

    halving(list(field), rounds, play, keep=keep, always=lambda letter: letter in always)  # type: ignore[arg-type]
    return rungs


def test_every_rung_plays_what_the_one_before_left() -> None:
    assert played("abcdefg", [1, 3, 9], 3) == ["abcdefg", "gf", "g"]
    assert played("abcdefg", [1, 3, 9], 3, always="a") == ["abcdefg", "gaf", "ga"]


def test_a_rung_that_is_no_longer_than_the_one_before_is_left_out() -> None:
    assert played("abcdef", [3, 3, 9], 2) == ["abcdef", "fed"]


def test_what_was_not_played_for_want_of_time_does_not_go_on() -> None:
    assert played("abcdef", [1, 2, 4], 2, time=2) == ["ab", "b", "b"]
