"""Does a trained model still fit the rows it meets? Counts of new rows against counts of reference rows, over its life.

A look compares the latest rows, and those of the last ``SPANS`` looks together, with the reference: what the model
answers, how sure it is, the bins of every input and the share of rows with a value like none before. With labels, which
may come late, the promised recall is tested too, and whether answers as sure are right as often. All looks of a model's
life share one error of ``ALPHA``, so that a scheduler may look every day. Everything is counts that sites can add up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedtail.core.decisions import Decision
from fedtail.core.evidence import wilson
from fedtail.core.scores import ONE
from fedtail.core.shift import PRIOR, cell_density, class_mix, drift_p, evidence_of_loss, prior_weights, spent, tail
from fedtail.core.totals import Counts
from fedtail.data.inputs import saved_schema
from fedtail.errors import FedtailError, writing
from fedtail.files import write_atomically
from fedtail.runs.judged import Judged
from fedtail.words import percent, plural

ALPHA = 0.05
"""Chance that anything is ever reported although nothing has changed: half of it for tests without labels, a quarter
each for the promised recall and for calibration."""
SPANS = (1, 3, 12)
"""Looks that are tested together: the last alone, and with those before it, which show what changes slowly."""
EDGES = np.array([-8.0, -4.0, -2.5, -1.5, -1.0, -0.5, -1e-6, 1e-6, 0.5, 1.0, 1.5, 2.5, 4.0, 8.0])
"""Cuts of an input, standardized as the model takes it; zero, where most of an encoded category lies, is a bin of its
own."""
SURE = np.array([-6.0, -4.5, -3.0, -2.0, -1.0, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0])
"""Cuts of the log-odds of an answer's probability."""
GRADES = 6
"""Neighbouring cells that make so many are joined to test whether answers as sure are right as often."""
MOST_INPUTS = 1000
"""A model with more inputs, such as pixels, is watched by its answers alone."""


@dataclass(frozen=True)
class Seen(Counts):
    """What rows are like: all that a monitor learns of them. A cell is an answer and how probable it was."""

    cells: np.ndarray
    """(C, len(SURE) + 1) rows by answer and its probability."""
    truth: np.ndarray
    """(C, C, len(SURE) + 1) labelled rows by class and cell."""
    mass: np.ndarray
    """(C, len(SURE) + 1, C) the rows' probabilities of each class, summed in fixed point."""
    inputs: np.ndarray
    """(D, len(EDGES) + 1) rows by the value of each input; D is 0 where inputs are not watched."""
    strange: np.ndarray
    """() rows with a value in a bin that no reference row is in."""

    @classmethod
    def none(cls, n_classes: int, n_inputs: int) -> Seen:
        """Return the counts of no rows."""
        c, cells = n_classes, len(SURE) + 1
        shapes = ((c, cells), (c, c, cells), (c, cells, c), (n_inputs, len(EDGES) + 1), ())
        return cls(*(np.zeros(shape, dtype=np.int64) for shape in shapes))

    @property
    def n(self) -> int:
        """How many rows there are."""
        return int(self.cells.sum())

    @property
    def right(self) -> np.ndarray:
        """(GRADES, 2) wrong and right answers of labelled rows, by their probability."""
        right = np.trace(self.truth).reshape(GRADES, -1).sum(1)
        return np.stack([self.truth.sum((0, 1)).reshape(GRADES, -1).sum(1) - right, right], 1)

    def found(self, target: int) -> tuple[int, int]:
        """Return how many labelled rows of a class were found, and how many there are."""
        return int(self.truth[target, target].sum()), int(self.truth[target].sum())


def count(judged: Judged, known: np.ndarray | None = None, *, among: bool = False) -> Seen:
    """Count rows of one site, or of all.

    known: (D, BINS) inputs of all reference rows, by which strange rows are counted; none are without. among: these
    rows are among the reference rows, and each is compared with the others.
    """
    n, c, x = len(judged.raw), len(judged.classes), judged.x
    d = 0 if x is None or x.dim() != 2 or x.shape[1] > MOST_INPUTS else x.shape[1]
    p = judged.p.astype(np.float64)
    answers = judged.decision.answers(judged.p)
    own = np.clip(p[np.arange(n), answers], 1e-9, 1 - 1e-9)
    none = Seen.none(c, d)
    cell = answers * (len(SURE) + 1) + np.searchsorted(SURE, np.log(own) - np.log1p(-own))
    mass = np.zeros((none.cells.size, c), dtype=np.int64)
    np.add.at(mass, cell, np.rint(p * ONE).astype(np.int64))
    y = np.full(n, -1) if judged.y is None else judged.y
    truth = np.bincount((y * none.cells.size + cell)[y >= 0], minlength=none.truth.size)
    places = np.searchsorted(EDGES, x.double().numpy()) if d and x is not None else np.empty((n, 0), dtype=np.int64)
    flat = places + np.arange(d) * (len(EDGES) + 1)
    strange = 0 if known is None or not d else (known.ravel()[flat] <= among).any(1).sum()
    return Seen(
        cells=np.bincount(cell, minlength=none.cells.size).reshape(none.cells.shape),
        truth=truth.reshape(none.truth.shape),
        mass=mass.reshape(none.mass.shape),
        inputs=np.bincount(flat.ravel(), minlength=none.inputs.size).reshape(none.inputs.shape),
        strange=np.array(strange, dtype=np.int64),
    )


@dataclass
class Look:
    """New rows, what they are like, and what has changed."""

    name: str
    seen: Seen
    mix: dict[str, float]
    """Class shares, found without labels."""
    drift: list[dict[str, Any]] = field(default_factory=list)
    """The smallest p-values of what was tested without labels, corrected for all tests of this look."""
    changed: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return all but the counts, for people and programs."""
        out = {name: value for name, value in vars(self).items() if name != "seen"}
        n, strange, labels = self.seen.n, int(self.seen.strange), int(self.seen.truth.sum())
        interval = list(wilson(strange / max(n, 1), n))
        return {**out, "rows": n, "labels": labels, "strange": strange, "interval": interval}

    def sentence(self) -> str:
        """Say in one line, for a scheduler, what this look found."""
        head = f"{self.name}: {self.seen.n:,} rows, "
        if self.changed:
            return head + "changed: " + ", ".join(self.changed)
        return head + f"nothing has changed ({percent(int(self.seen.strange) / max(self.seen.n, 1))} strange rows)"


@dataclass
class Watch:
    """The life of a model after training: its reference, and the looks at what came later."""

    classes: tuple[str, ...]
    inputs: tuple[str, ...]
    """The column of each input that is watched."""
    reference: Seen
    find: str | None = None
    """The class whose recall is promised."""
    recall: float = 0.0
    looks: list[Look] = field(default_factory=list)

    @classmethod
    def begin(cls, judged: Judged, promised: tuple[str, float] | None = None) -> Watch:
        """Begin to monitor a model from labelled reference rows, which it must not have been trained on.

        promised: a class and its recall; by default what the model's decision promises.
        """
        rows = judged.labelled
        seen = count(rows, count(rows).inputs, among=True)
        return cls.of(seen, rows.classes, rows.preprocessing, promised or promised_recall(rows.decision, rows.classes))

    @classmethod
    def of(
        cls,
        reference: Seen,
        classes: tuple[str, ...],
        preprocessing: Mapping[str, Any],
        promised: tuple[str, float] | None = None,
    ) -> Watch:
        """Begin from counts of reference rows, such as sums over sites."""
        find, recall = promised or (None, 0.0)
        if find is not None and find not in classes:
            raise FedtailError(f"there is no class {find!r}; the model has {', '.join(classes)}")
        n, c = int(reference.truth.sum()), int(reference.truth.any((1, 2)).sum())
        if n < PRIOR or c < 2:
            who = plural(n, "labelled row") + " of " + plural(c, "class", "classes")
            least = f"{PRIOR:g} of two classes or more, and {PRIOR:g} of each to find a class mix without labels"
            raise FedtailError(f"{who} cannot be a reference; give {least}")
        schema, d = saved_schema(dict(preprocessing)), len(reference.inputs)
        columns = schema.columns if schema is not None else ()
        names = [column.name for column in columns for _ in range(column.width)]
        if len(names) == d - 1:  # trees take the site as one more column
            names.append(str(preprocessing.get("site") or "site"))
        if len(names) != d:
            names = [str(i + 1) for i in range(d)]
        return cls(classes, tuple(names), reference, find, recall)

    @property
    def shares(self) -> np.ndarray:
        """(C,) class shares among the reference rows."""
        counts = np.maximum(self.reference.truth.sum((1, 2)), 0.5)
        return np.asarray(counts / counts.sum())

    @property
    def weights(self) -> np.ndarray:
        """(C,) factors after which the model's probabilities stand for these shares."""
        mass = self.reference.mass.reshape(-1, len(self.classes))
        return prior_weights(mass, self.reference.cells.ravel(), self.shares)

    def mix(self, seen: Seen) -> np.ndarray:
        """(C,) class shares among new rows, found without their labels."""
        c = len(self.classes)
        density = cell_density(self.reference.truth.reshape(c, -1), self.reference.mass.reshape(-1, c))
        return class_mix(seen.cells.ravel(), density, self.shares)

    def look(self, rows: Judged | Seen, name: str = "") -> Look:
        """Take note of new rows, or of labels that came late for those of an earlier look, and say what has changed.

        name: of the look, such as 2026-11, by default its number. Rows with the name of an earlier look are that look's
        rows, now with labels.
        """
        seen = count(rows, self.reference.inputs) if isinstance(rows, Judged) else rows
        if seen.cells.shape != self.reference.cells.shape or seen.inputs.shape != self.reference.inputs.shape:
            raise FedtailError("these rows were judged by another model than the one that is monitored")
        name = name or str(len(self.looks) + 1)
        look = next((look for look in self.looks if look.name == name), None)
        if look is None:
            look = Look(name, seen, dict(zip(self.classes, self.mix(seen).round(6).tolist(), strict=True)))
            self.looks.append(look)
            look.drift = self._drift()
            limit = spent(ALPHA / 2, len(self.looks))
            look.changed = [row["what"] for row in look.drift if row["p"] <= limit]
        elif look.seen.truth.any() or not seen.truth.any():
            raise FedtailError(f"there is a look {name!r} already; name this one otherwise, or give its labels, once")
        else:
            look.seen = replace(look.seen, truth=seen.truth)
        if seen.truth.any():
            look.changed += self._broken()
        return look

    def _drift(self) -> list[dict[str, Any]]:
        """The smallest p-value of each kind over all spans, corrected for every test of this look."""
        was, names = self.reference, ["answers", "probabilities"]
        if self.inputs:
            names += ["strange rows", *(f"input {name}" for name in self.inputs)]
        spans, p = spans_of(len(self.looks)), []
        for span in spans:
            last, *others = (look.seen for look in self.looks[-span:])
            now = sum(others, last)
            p.append(drift_p(was.cells.sum(1), now.cells.sum(1), ordered=False))
            p.append(drift_p(was.cells.sum(0), now.cells.sum(0)))
            if self.inputs:
                # Only more of them: what a lone reference row had is known by now, so fewer are no drift.
                p.append(tail(was.strange, now.strange, np.array(was.n), np.array(now.n)))
                p.extend(drift_p(was.inputs, now.inputs))
        table = np.reshape(p, (len(spans), -1))
        table[:, :2] *= 2 * len(spans) * (1 + bool(self.inputs))  # half of the error is for what the model says,
        table[:, 2:] *= 2 * len(spans) * max(table.shape[1] - 2, 1)  # half for the rows, however many their inputs
        strongest: dict[str, dict[str, Any]] = {}
        for i in np.argsort(table.min(0), kind="stable").tolist():
            least = {"p": float(min(1.0, table[:, i].min())), "looks": spans[int(table[:, i].argmin())]}
            strongest.setdefault(names[i], {"what": names[i], **least})
        return list(strongest.values())[:10]

    def _broken(self) -> list[str]:
        """What labels say, over the whole life."""
        labelled = [look.seen for look in self.looks if look.seen.truth.any()]
        out = []
        if self.find is not None:
            found, cases = np.sum([seen.found(self.classes.index(self.find)) for seen in labelled], 0).tolist()
            if cases and evidence_of_loss(found, cases - found, self.recall) >= np.log(4 / ALPHA):
                out.append(f"recall of {self.find} ({percent(found / cases)}, promised {percent(self.recall)})")
        p = [
            drift_p(self.reference.right, np.sum([seen.right for seen in labelled[-span:]], 0))
            for span in spans_of(len(labelled))
        ]
        if np.min(p) * np.size(p) <= spent(ALPHA / 4, len(labelled)):
            out.append("calibration")
        return out

    def _repr_html_(self) -> str:
        return pd.DataFrame([look.to_json() for look in self.looks]).drop(columns="drift", errors="ignore").to_html()

    def save(self, path: Path) -> None:
        """Write the life as JSON, whole or not at all."""
        looks = [{**vars(look), "seen": look.seen.to_json()} for look in self.looks]
        content = {**vars(self), "reference": self.reference.to_json(), "looks": looks, "alpha": ALPHA}
        with writing(path):
            write_atomically(path, json.dumps(content))

    @classmethod
    def load(cls, path: Path) -> Watch:
        """Read what ``save`` wrote."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                classes=tuple(fields["classes"]),
                inputs=tuple(fields["inputs"]),
                reference=Seen.from_json(fields["reference"]),
                find=fields["find"],
                recall=fields["recall"],
                looks=[Look(**{**look, "seen": Seen.from_json(look["seen"])}) for look in fields["looks"]],
            )
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise FedtailError(
                f"{str(path)!r} cannot be read as the state of a monitor ({error}); restore it, or begin anew with "
                "--reference"
            ) from None


def promised_recall(decision: Decision, classes: tuple[str, ...]) -> tuple[str, float] | None:
    """Return the class and the recall that a decision promises, if it does."""
    target, promise = decision.target, decision.promise
    return None if target is None or promise is None or not promise.kept else (classes[target], promise.recall)


def spans_of(looks: int) -> tuple[int, ...]:
    """Return the spans that so many looks fill."""
    return SPANS[: 1 + sum(looks >= span for span in SPANS[1:])]
