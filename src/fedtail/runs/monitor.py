"""Does a trained model still fit the rows it meets? Counts of new rows against counts of reference rows, over its life.

A look compares the latest rows, and those of the last ``SPANS`` looks together, with the reference: what the model
answers, how sure it is, the bins of every input and the share of rows with a value like none before. With labels, which
may come late, the promised recall is tested too, and whether answers as sure are right as often. All looks of a model's
life share one error of ``ALPHA``, so that a scheduler may look every day. Everything is counts that sites can add up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.core.evidence import wilson
from fedtail.core.scores import CELLS
from fedtail.core.shift import (
    class_mix,
    drift_p,
    evidence_of_loss,
    prior_weights,
    spent,
)
from fedtail.data.inputs import saved_schema
from fedtail.errors import FedtailError, writing
from fedtail.runs.judged import Judged
from fedtail.words import percent

ALPHA = 0.05
"""Chance that anything is ever reported although nothing has changed: half of it for tests without labels, a quarter
each for the promised recall and for calibration."""
SPANS = (1, 3, 12)
"""Looks that are tested together: the last alone, and with those before it, which show what changes slowly."""
EDGES = np.array([-8.0, -4.0, -2.5, -1.5, -1.0, -0.5, -1e-6, 1e-6, 0.5, 1.0, 1.5, 2.5, 4.0, 8.0])
"""Cuts of an input, standardized as the model takes it; zero, where most of an encoded category lies, is a bin of its
own."""
MOST_INPUTS = 1000
"""A model with more inputs, such as pixels, is watched by its answers alone."""


@dataclass(frozen=True)
class Counts:
    """Rows in bins; sites add theirs up."""

    answers: np.ndarray
    """(C,) rows by answer."""
    sure: np.ndarray
    """(CELLS,) rows by the largest probability."""
    inputs: np.ndarray
    """(D, BINS) rows by the value of each input; D is 0 where inputs are not watched."""
    strange: int = 0
    """Rows with a value in a bin that no other reference row is in."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def n(self) -> int:
        return int(self.sure.sum())

    def to_json(self) -> dict[str, Any]:
        """Return plain lists."""
        return {name: np.asarray(value).tolist() for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Counts:
        """Read what ``to_json`` wrote."""
        inputs = np.asarray(fields["inputs"], dtype=np.int64).reshape(-1, len(EDGES) + 1)
        return cls(np.asarray(fields["answers"]), np.asarray(fields["sure"]), inputs, int(fields["strange"]))


def places_of(judged: Judged) -> np.ndarray:
    """(N, D) the bin of every input; D is 0 where inputs are not watched."""
    x = judged.x
    if x is None or x[:1].numel() > MOST_INPUTS or x.dim() != 2:
        return np.empty((len(judged.raw), 0), dtype=np.int64)
    return np.searchsorted(EDGES, x.double().numpy())


def right_by_cell(judged: Judged) -> np.ndarray:
    """(2, CELLS) wrong and right likeliest classes of labelled rows, by their probability."""
    assert judged.y is not None
    p = judged.p
    cell = np.minimum((p.max(1) * CELLS).astype(int), CELLS - 1)
    return np.bincount((p.argmax(1) == judged.y) * CELLS + cell, minlength=2 * CELLS).reshape(2, CELLS)


def count(judged: Judged, known: np.ndarray | None = None) -> Counts:
    """Count rows.

    known: (D, BINS) counts of the reference rows; None if these are the reference rows themselves.
    """
    places, p = places_of(judged), judged.p
    d, bins = places.shape[1], len(EDGES) + 1
    flat = places + np.arange(d) * bins
    inputs = np.bincount(flat.ravel(), minlength=d * bins).reshape(d, bins)
    others = inputs.ravel()[flat] - 1 if known is None else known.ravel()[flat]
    return Counts(
        answers=np.bincount(judged.decision.answers(p), minlength=len(judged.classes)),
        sure=np.bincount(np.minimum((p.max(1) * CELLS).astype(int), CELLS - 1), minlength=CELLS),
        inputs=inputs,
        strange=int((others <= 0).any(1).sum()) if d else 0,
    )


@dataclass
class Watch:
    """The life of a model after training: its reference, and one record per look."""

    classes: tuple[str, ...]
    inputs: tuple[str, ...]
    """Names of the inputs."""
    reference: Counts
    right: np.ndarray
    """(2, CELLS) wrong and right answers among the reference rows, by the largest probability."""
    shares: tuple[float, ...]
    """Class shares among the reference rows."""
    weights: tuple[float, ...]
    """Factors after which the model's probabilities stand for these shares."""
    find: str | None = None
    """The class whose recall is promised."""
    recall: float = 0.0
    looks: list[dict[str, Any]] = field(default_factory=list)

    def look(self, judged: Judged, name: str) -> dict[str, Any]:
        """Take note of new rows and return the record: what they are like, and what has changed."""
        now = count(judged, self.reference.inputs)
        self._check(now)
        record: dict[str, Any] = {
            "look": name,
            "rows": now.n,
            "counts": now.to_json(),
            "mix": dict(zip(self.classes, self.mix(judged).round(6).tolist(), strict=True)),
            "strange": {"rows": now.strange, "interval": list(wilson(now.strange / max(now.n, 1), now.n))},
        }
        if judged.y is not None and (judged.y >= 0).any():
            record["labels"] = self._labels(judged.labelled)
        self.looks.append(record)
        record["drift"] = self._drift()
        record["changed"] = [*self._named(record["drift"]), *self._broken()]
        return record

    def mix(self, judged: Judged) -> np.ndarray:
        """(C,) class shares among new rows, found without their labels."""
        p = judged.p * np.asarray(self.weights)
        return class_mix(p / p.sum(1, keepdims=True), self.shares)

    def _labels(self, judged: Judged) -> dict[str, Any]:
        p, y = judged.p, judged.y
        assert y is not None
        answers = judged.decision.answers(p)
        out: dict[str, Any] = {"rows": len(y), "right": right_by_cell(judged).tolist()}
        if self.find is not None:
            own = y == self.classes.index(self.find)
            out |= {"found": int((answers == y)[own].sum()), "cases": int(own.sum())}
        return out

    def _drift(self) -> list[dict[str, Any]]:
        """The smallest p-value of each kind over all spans, corrected for every test of this look."""
        found: dict[str, dict[str, Any]] = {}
        tests = 0
        for span in SPANS[: 1 + sum(len(self.looks) >= s for s in SPANS[1:])]:
            parts = [Counts.from_json(look["counts"]) for look in self.looks[-span:]]
            now = sum(parts[1:], parts[0])
            for what, p in self._tests(now):
                tests += 1
                if what not in found or p < found[what]["p"]:
                    found[what] = {"what": what, "p": p, "looks": span}
        corrected = [{**row, "p": min(1.0, row["p"] * tests)} for row in found.values()]
        return sorted(corrected, key=lambda row: float(row["p"]))[:10]

    def _tests(self, now: Counts) -> list[tuple[str, float]]:
        was = self.reference
        out = [
            ("answers", drift_p(was.answers, now.answers, ordered=False)),
            ("probabilities", drift_p(was.sure, now.sure)),
        ]
        if len(self.inputs):
            out.append(("strange rows", drift_p(*(np.array([c.n - c.strange, c.strange]) for c in (was, now)))))
        out += [
            (f"input {name}", drift_p(a, b))
            for name, a, b in zip(self.inputs, was.inputs, now.inputs, strict=True)
            if np.count_nonzero(a + b) > 1
        ]
        return out

    def _named(self, drift: Sequence[Mapping[str, Any]]) -> list[str]:
        limit = spent(ALPHA / 2, len(self.looks))
        return [str(row["what"]) for row in drift if row["p"] <= limit]

    def _broken(self) -> list[str]:
        """What labels say, over the whole life."""
        told = [look["labels"] for look in self.looks if "labels" in look]
        out, limit = [], np.log(4 / ALPHA)
        if self.find is not None and told:
            found, cases = (sum(row[key] for row in told) for key in ("found", "cases"))
            if cases and evidence_of_loss(found, cases - found, self.recall) >= limit:
                out.append(f"recall of {self.find} ({percent(found / cases)}, promised {percent(self.recall)})")
        looks = np.array([row["right"] for row in told])
        spans = [looks[-span:].sum(0) for span in SPANS if told]
        p = [drift_p(was, now) for span in spans for was, now in zip(self.right.T, span.T, strict=True)]
        if p and min(p) * len(p) <= spent(ALPHA / 4, len(looks)):
            out.append("calibration")
        return out

    def _check(self, now: Counts) -> None:
        if now.answers.shape != self.reference.answers.shape or now.inputs.shape != self.reference.inputs.shape:
            raise FedtailError("these rows were judged by another model than the one that is monitored")

    def sentence(self) -> str:
        """Say in one line, for a scheduler, what the last look found."""
        last = self.looks[-1]
        head = f"{last['look']}: {last['rows']:,} rows, "
        if last["changed"]:
            return head + "changed: " + ", ".join(last["changed"])
        return head + f"nothing has changed ({percent(last['strange']['rows'] / max(last['rows'], 1))} strange rows)"

    def save(self, path: Path) -> None:
        """Write the life as JSON, whole or not at all."""
        partial = path.with_name(f".{path.name}.partial")
        content = {**asdict(self), "reference": self.reference.to_json(), "right": self.right.tolist(), "alpha": ALPHA}
        with writing(path):
            partial.write_text(json.dumps(content), encoding="utf-8")
            partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Watch:
        """Read what ``save`` wrote."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                classes=tuple(fields["classes"]),
                inputs=tuple(fields["inputs"]),
                reference=Counts.from_json(fields["reference"]),
                right=np.asarray(fields["right"]),
                shares=tuple(fields["shares"]),
                weights=tuple(fields["weights"]),
                find=fields["find"],
                recall=fields["recall"],
                looks=fields["looks"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FedtailError(
                f"{str(path)!r} cannot be read as the state of a monitor ({error}); restore it, or begin anew with "
                "--reference"
            ) from None


def begin(judged: Judged, preprocessing: Mapping[str, Any], find: str | None = None, recall: float = 0.0) -> Watch:
    """Begin to monitor a model from labelled reference rows, which it must not have been trained on."""
    rows = judged.labelled
    assert rows.y is not None
    reference = count(rows)
    if find is not None and find not in rows.classes:
        raise FedtailError(f"there is no class {find!r}; the model has {', '.join(rows.classes)}")
    schema, d = saved_schema(dict(preprocessing)), len(reference.inputs)
    names = schema.features() if schema is not None and schema.width == d else [str(i + 1) for i in range(d)]
    counts = np.maximum(np.bincount(rows.y, minlength=len(rows.classes)), 0.5)
    shares = counts / counts.sum()
    weights = prior_weights(rows.p, shares)
    return Watch(
        classes=rows.classes,
        inputs=tuple(names),
        reference=reference,
        right=right_by_cell(rows),
        shares=tuple(shares.tolist()),
        weights=tuple(weights.tolist()),
        find=find,
        recall=recall,
    )
