"""Whether a run came to anything: one line with the likely reason and what to try next, where it did not."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.core.decisions import Decision
from fedtail.runs.config import parse_value
from fedtail.settings import WHOLE_SECTIONS, Settings
from fedtail.words import listing

CLOSE = 0.005
"""Macro F1 that is no further above the floor is at the floor."""
MOVED = 0.01
"""A training loss that changed by a smaller share, and a macro F1 that changed by less, stood still."""
EXPLODED = 2.0
"""A training loss that ends so many times above its lowest value diverged."""
LOST = 0.05
"""Macro F1 that a training which diverged ends below its best, at least."""
ENOUGH = 5
"""Rounds before a run can be said to stand still."""
RISING = 0.01
"""A validation macro F1 that gained more over the last fifth of the rounds, against the fifth before, was rising."""
LONG = 20
"""Rounds before a run can be said to have been rising still."""
MANY = 200
"""Validation samples before it can: of fewer, one or two that are newly recognized make such a rise."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a run that finished."""

    kind: str
    """``diverged``, ``unpromised``, ``one class``, ``floor``, ``still``, ``silenced``, ``never`` or ``rising``."""
    said: str
    """What happened, and why that is likely."""
    change: str
    """Overrides that are worth a try; empty where only a wider search is."""

    def command(self, folder: Path | None = None) -> str:
        """What to type next. Without a run folder, the call of ``fit``."""
        if folder is None:
            return f"fit(..., {_keyword(self.change)})" if self.change else "another method or model"
        where = shlex.quote(str(folder))
        if not self.change:
            return f"fedtail tune {where} --budget 5m"
        return f"fedtail run {where} {self.change} --name {shlex.quote(f'{folder.name}-again')}"

    def line(self, folder: Path | None = None) -> str:
        """All of it in one line."""
        return f"{self.said}; try: {self.command(folder)}"

    def record(self, folder: Path | None = None) -> dict[str, str]:
        """For ``result.json``."""
        return {"kind": self.kind, "said": self.said, "try": self.command(folder)}


def verdict(
    test: Mapping[str, Any],
    confusion: np.ndarray,
    floor: Mapping[str, float],
    history: Sequence[Mapping[str, Any]],
    classes: Sequence[str],
    settings: Settings,
    n_validation: int = 0,
    before: np.ndarray | None = None,
    decision: Decision | None = None,
) -> Verdict | None:
    """What is wrong with a run, the gravest first; None if nothing is.

    confusion: (C, C) of the chosen model on the test set; less where sites reveal totals only, and then only what the
    history tells is judged. ``n_validation`` are the samples of all validation splits. before: (C, C) of the likeliest
    class, where a decision makes other answers. decision: what was found for the settings.
    """
    (why, change), losses = _advice(settings, len(history)), [float(r["train_loss"]) for r in history]
    if exploded := _diverged(history, losses):
        low = "" if settings.local.lr == "auto" else f"local.lr={float(settings.local.lr) / 10:g}"
        return Verdict("diverged", f"training diverged: {exploded}; the learning rate is probably too high", low)
    goal = settings.decision.goal
    if goal == "recall" and decision is not None and decision.target is None:
        said = f"no validation sample is of {settings.decision.find!r}, so goal 'recall' has no threshold to find it by"
        more = "data.validation=0.3" if (settings.data.validation or 0.0) < 0.3 else "data.validation=0.5"
        return Verdict("unpromised", f"{said}: answers are the likeliest class", more)
    if before is not None and (lost := _silenced(before, confusion, classes)):
        other = "balanced_accuracy" if goal != "balanced_accuracy" else "macro_f1"
        said = f"the decision (goal {goal!r}) finds nothing of {lost}"
        return Verdict("silenced", said, f"decision.goal={other}")
    if still := _still(history, losses):
        why = "the model barely changed, so the learning rate is probably too low"
    if confusion.shape[0] == confusion.shape[1] and (confusion.sum(1) > 0).sum() > 1:
        answers = np.flatnonzero(confusion.sum(0))
        if answers.size == 1:
            only, n = classes[int(answers[0])], int(confusion.sum())
            return Verdict("one class", f"the model predicts {only!r} for all {n:,} test samples; {why}", change)
        reached, least = test.get("macro_f1", np.nan), floor.get("macro_f1", np.nan)
        if reached <= least + CLOSE:
            said = f"macro F1 {reached:.3f} is no better than always predicting the most common class ({least:.3f})"
            return Verdict("floor", f"{said}; {why}", change)
    if still:
        return Verdict("still", f"training made no progress in {len(history)} rounds; {why}", change)
    if silent := _never(confusion, classes):
        rare = "decision.goal=balanced_accuracy" if goal == "argmax" and n_validation else change
        return Verdict("never", f"the model never predicts {silent}", rare)
    if n_validation >= MANY and (rose := _rising(history, settings.run.rounds)):
        said = f"validation macro F1 was still rising when the {len(history)} rounds ended ({rose}): more may help"
        return Verdict("rising", said, f"run.rounds={3 * settings.run.rounds}")
    return None


def _silenced(before: np.ndarray, after: np.ndarray, classes: Sequence[str]) -> str:
    """The classes of which the likeliest class finds some and the decision none, in words."""
    if before.shape != after.shape or after.shape[0] != after.shape[1]:
        return ""
    found, support = np.diag(before), after.sum(1)
    lost = np.flatnonzero((found > 0) & (np.diag(after) == 0)).tolist()
    named = [f"{classes[c]!r} (without it {int(found[c]):,} of {int(support[c]):,} test samples)" for c in lost]
    return listing(named, 5)


def _never(confusion: np.ndarray, classes: Sequence[str]) -> str:
    """The classes that have test samples and are never the answer, in words."""
    if confusion.shape[0] != confusion.shape[1]:
        return ""
    support, answered = confusion.sum(1), confusion.sum(0)
    missed = np.flatnonzero((support > 0) & (answered == 0)).tolist()
    return listing([f"{classes[c]!r} ({int(support[c]):,} test samples)" for c in missed], 5)


def _keyword(change: str) -> str:
    """An override as the keyword of ``fit`` that does the same: ``method.name=fedcgnm`` is ``method='fedcgnm'``."""
    key, _, text = change.partition("=")
    section, _, name = key.partition(".")
    if section in WHOLE_SECTIONS:
        return f"{section}={ {name: parse_value(text)}!r}"
    return f"{section if name == 'name' else name}={parse_value(text)!r}"


def _advice(settings: Settings, rounds: int) -> tuple[str, str]:
    """The likely reason, and the override most likely to help among what the settings have not tried yet; more rounds
    only where all of them were run, rather than ended by ``run.patience``."""
    own_lr = settings.local.lr != "auto" and settings.method.name != "trees"
    few = rounds >= settings.run.rounds < 30
    why = f"{rounds} rounds are probably too few" if few else "the model is probably wrong for this data"
    why = "the learning rate is probably wrong for this data" if own_lr else why
    if own_lr and settings.privacy.mode == "none":
        return why, "local.lr=auto"
    if few:
        return why, f"run.rounds={max(50, 2 * settings.run.rounds)}"
    return why, "method.name=fedcgnm" if settings.method.name == "fedavg" else ""


def _diverged(history: Sequence[Mapping[str, Any]], losses: Sequence[float]) -> str:
    """How a training diverged, in words; empty if it did not."""
    lost = sum(any("finite" in r["reason"] or "loss became" in r["reason"] for r in t["refused"]) for t in history)
    if history and 2 * lost >= len(history):
        return f"non-finite updates in {lost} of {len(history)} rounds"
    settled = [loss for loss, r in zip(losses, history, strict=True) if not r.get("searching")]
    if len(settled) > 1 and settled[-1] > EXPLODED * max(min(settled), 0.1) and _lost_ground(history):
        return f"the loss rose from {min(settled):.3g} to {settled[-1]:.3g}"
    return ""


def _lost_ground(history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether macro F1 ended well below its best, or is not known. A loss that rises while it does not is the
    schedule's doing: small sites fit their own rows in a round of large steps, and no longer once steps are small."""
    splits = (macro_f1(history, split) for split in ("validation", "test"))
    known = next((values for values in splits if np.isfinite(values).any()), None)
    return known is None or not known[-1] >= np.nanmax(known) - LOST


def _still(history: Sequence[Mapping[str, Any]], losses: Sequence[float]) -> bool:
    """Whether neither loss nor macro F1 moved from the first round to the last."""
    if len(history) < ENOUGH or abs(losses[-1] - losses[0]) > MOVED * abs(losses[0]):
        return False
    known = np.concatenate([macro_f1(history, split) for split in ("test", "validation")])
    known = known[np.isfinite(known)]
    return not known.size or bool(np.ptp(known) < MOVED)


def macro_f1(history: Sequence[Mapping[str, Any]], split: str) -> np.ndarray:
    """Macro F1 on a split after each round that was scored there, NaN where it is not defined."""
    return np.array([r[split]["macro_f1"] for r in history if r.get(split)], dtype=np.float64)


def _rising(history: Sequence[Mapping[str, Any]], rounds: int) -> str:
    """How validation macro F1 still rose when all the rounds had been run, in words; empty if it did not."""
    known = macro_f1(history, "validation")
    fifth = len(known) // 5
    if len(history) < max(LONG, rounds) or len(known) < len(history):
        return ""
    before, last = float(np.mean(known[-2 * fifth : -fifth])), float(np.mean(known[-fifth:]))
    return f"{before:.3f}, then {last:.3f} over the last {fifth}" if last > before + RISING else ""
