"""What the suite is: its sets, its protocol, and what is measured."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.errors import FedtailError, one_of

KINDS = ("table", "image")


@dataclass(frozen=True)
class Measure:
    """A column of the leaderboard."""

    title: str
    higher_is_better: bool
    digits: int = 3


MEASURES = {
    "macro_f1": Measure("macro F1", True),
    "tail_recall": Measure("tail recall", True),
    "worst_site": Measure("worst site's macro F1", True),
    "tail_pr_auc": Measure("PR-AUC, rarest third", True),
    "calibration_error": Measure("calibration error", False),
    "seconds": Measure("seconds", False, 1),
    "megabytes": Measure("MB of models", False, 2),
}
"""What a run of the suite is measured by, the first being what methods are tuned and ranked by. ``seconds`` are those
of the machine that ran it; ``megabytes`` the models that go to and from all clients in all rounds, without what a
method sends beside them (``Method.wire``)."""


@dataclass(frozen=True)
class Set:
    """One data set of the suite with its split and its rounds."""

    name: str
    title: str
    kind: str
    settings: dict[str, Any]
    by_name: bool = False
    """Run only where it is asked for by name: it needs what most machines have not."""


@dataclass(frozen=True)
class Apart:
    """What a method takes of the suite that trains no network."""

    kinds: tuple[str, ...]
    without: tuple[str, ...]
    """Sections of a set's settings that mean nothing to it."""
    set: Mapping[str, Any]
    grid: Mapping[str, list[Any]]


@dataclass(frozen=True)
class Suite:
    """The declared suite."""

    version: int
    seeds: int
    share: float
    """Of each method's grid, that is tried."""
    tuning_seeds: tuple[int, ...]
    """What trials are compared under; they do not count."""
    grid: Mapping[str, list[Any]]
    """What every method's grid has."""
    own: Mapping[str, Mapping[str, list[Any]]]
    """method -> its own part, where it is not that of other searches."""
    sets: tuple[Set, ...]
    apart: Mapping[str, Apart] = field(default_factory=dict)
    """By method."""

    def settings(self, one: Set, method: str) -> dict[str, Any]:
        """What a set means to a method."""
        if method not in self.apart:
            return one.settings
        apart = self.apart[method]
        kept = {key: value for key, value in one.settings.items() if key.partition(".")[0] not in apart.without}
        return {**kept, **apart.set}

    def kinds(self, method: str) -> tuple[str, ...]:
        """Kinds of sets that a method can be run on."""
        return self.apart[method].kinds if method in self.apart else KINDS

    def taken(self, sets: Sequence[Set], method: str) -> list[Set]:
        """Those of some sets that a method can be run on; one line where it is none."""
        kinds = self.kinds(method)
        found = [one for one in sets if one.kind in kinds]
        if not found:
            raise FedtailError(f"method {method!r} takes sets of kind {' or '.join(kinds)} only; name one by --only")
        return found

    def only(self, words: Sequence[str]) -> tuple[Set, ...]:
        """Sets by name or kind; without words all but those that are run by name only."""
        for word in words:
            if word not in KINDS and word not in {s.name for s in self.sets}:
                raise one_of("--only", word, (*KINDS, *(s.name for s in self.sets)))
        return tuple(s for s in self.sets if s.name in words or (not s.by_name and (not words or s.kind in words)))


@cache
def load_suite() -> Suite:
    raw = tomllib.loads(Path(__file__).with_name("suite.toml").read_text(encoding="utf-8"))
    sets = (
        Set(name, told["title"], told["kind"], {**raw["set"], **told["set"]}, told.get("by_name", False))
        for name, told in raw["sets"].items()
    )
    return Suite(
        version=raw["version"],
        seeds=raw["seeds"],
        share=raw["share"],
        tuning_seeds=tuple(raw["tuning_seeds"]),
        grid=raw["grid"],
        own=raw["own"],
        sets=tuple(sets),
        apart={
            name: Apart(tuple(told["kinds"]), tuple(told["without"]), told["set"], told["grid"])
            for name, told in raw["apart"].items()
        },
    )


def measured(result: Mapping[str, Any], train_counts: Sequence[int], model_bytes: int) -> dict[str, float]:
    """The columns of one finished run, from its ``result.json``, the global class counts and the size of what is sent.

    The tail is the rarest third of the classes, at least one; PR-AUC and recall are means over it.
    """
    test = result["test"]
    counts = np.asarray(train_counts)
    tail = np.argsort(counts, kind="stable")[: max(1, len(counts) // 3)]

    def over_tail(values: Sequence[float | None]) -> float:
        return float(np.mean([np.nan if values[c] is None else values[c] for c in tail]))

    clients = len(result["rates"])
    return {
        "macro_f1": number(test.get("macro_f1")),
        "tail_recall": over_tail(test["per_class_accuracy"]),
        "worst_site": number(result.get("worst", {}).get("value")),
        "tail_pr_auc": over_tail(test["per_class_pr_auc"]),
        "calibration_error": number(test.get("calibration_error")),
        "seconds": number(result.get("seconds")),
        "megabytes": 2 * clients * int(result["rounds"]) * model_bytes / 1e6,
    }


def number(value: Any) -> float:
    """NaN where there is none."""
    return float("nan") if value is None else float(value)
