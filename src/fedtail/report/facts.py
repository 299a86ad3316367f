"""What a run comes to, in counts and sentences that need no knowledge of metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.core.evidence import area_interval
from fedtail.core.metrics import METRICS
from fedtail.report.blocks import say
from fedtail.report.comparison import Comparison
from fedtail.report.pictures import class_order
from fedtail.runs.record import RunRecord
from fedtail.words import plural

METRIC = "macro_f1"
SPLITS = {"test": "Test set", "validation": "Private validation splits"}
SMALL = 30
"""Samples of a site or a class below which its numbers say little."""


@dataclass(frozen=True)
class Found:
    """One class on the test set, in counts."""

    name: str
    support: int
    found: int
    false_alarms: int
    place: int = 0
    """Which class it is."""

    def __str__(self) -> str:
        alarms = plural(self.false_alarms, "false alarm")
        return f"Of {self.support:,} test cases of {self.name} it finds {self.found:,}, with {alarms}."


def found_and_missed(run: RunRecord, most: int = 1) -> list[Found]:
    """Return what is found of the rarest classes that have test samples; empty where sites reveal no counts."""
    return [one for one in in_counts(run) if one.support][:most]


def in_counts(run: RunRecord) -> list[Found]:
    """Return every class, the rarest first: one without test samples can be answered all the same."""
    table = run.confusion
    if table is None or len(table) != len(run.classes) or not table.any():
        return []
    order = class_order(run).tolist()
    if run.train_counts is None:
        order.sort(key=lambda c: float(table[c].sum()))
    return [
        Found(_called(run.classes[c]), int(table[c].sum()), int(table[c, c]), int(table[:, c].sum() - table[c, c]), c)
        for c in order
    ]


def _called(name: str) -> str:
    """Return the name of a class as it can stand in a sentence: ``class 9`` for ``9``."""
    return f"class {name}" if name.replace(".", "").isdigit() else name


@dataclass(frozen=True)
class AtSite:
    """The final model at one site."""

    name: str
    values: dict[str, Any]
    before: dict[str, Any]
    """Metrics of the plain argmax; empty where that is what the answers are."""

    @property
    def support(self) -> list[int]:
        return [int(n) for n in self.values.get("per_class_support") or []]

    @property
    def samples(self) -> int:
        return sum(self.support)

    def value(self, metric: str = METRIC, *, plain: bool = False) -> float:
        """A metric, ``plain`` that of the argmax; NaN where the site cannot tell: of samples of one class alone, F1
        would be 1 for nothing."""
        one_class = sum(n > 0 for n in self.support) == 1
        return math.nan if one_class else number_in(self.before if plain else self.values, metric)

    def positives(self, c: int) -> int:
        """Samples of a class."""
        return self.support[c] if len(self.support) > c else 0


def at_sites(run: RunRecord) -> tuple[str, list[AtSite]]:
    """Return (split, sites), worst first, those that cannot tell last: by the split that the run names its worst site
    by; where it names none, on their own test sets if all have one, else on their private splits."""
    rows = [row for row in run.result.get("sites") or [] if isinstance(row, dict)]
    split = (run.result.get("worst") or {}).get("split")
    if split not in ("test", "validation"):
        split = "test" if rows and all(row.get("test") for row in rows) else "validation"
    sites = [
        AtSite(str(row["site"]), row[split], (row.get("before") or {}).get(split) or {})
        for row in rows
        if row.get(split) and math.isfinite(number_in(row[split], METRIC))
    ]
    return split, sorted(sites, key=lambda site: (math.isnan(site.value()), site.value()))


def rarest_there(run: RunRecord, sites: Sequence[AtSite]) -> int:
    """Return the rarest class that sites have samples of: a column of another would say nothing of any of them."""
    order: list[int] = class_order(run).tolist()
    return next((c for c in order if any(site.positives(c) for site in sites)), order[0])


def telling(run: RunRecord) -> list[AtSite]:
    """Return the sites that can tell how good the model is there, worst first."""
    return [site for site in at_sites(run)[1] if math.isfinite(site.value())]


def number_in(values: Any, name: str) -> float:
    """Return a number of a record, NaN where it has none."""
    value = values.get(name) if isinstance(values, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def outcome(comparison: Comparison, metric: str = METRIC) -> dict[str, Any]:
    """Return what came of it, as tiles and the paragraph ``in_short`` say it; empty where nothing was scored."""
    if not (scored := comparison.scored(metric)):
        return {}
    best, run = scored[0], scored[0].runs[0]
    sites, worst = telling(run), [sites[0].value() for r in best.runs if (sites := telling(r))]
    rare = "rare_pr_auc" if len(run.classes) == 2 else "tail"
    return {
        "run": run,
        "best": best,
        "n_sites": len(run.clients.get("sites") or run.rate_path()[0]),
        "n_test": int(np.nansum(run.per_class("support"))),
        "found": found_and_missed(run),
        "untested": [one.name for one in in_counts(run) if not one.support],
        "sites": sites,
        "worst": float(np.mean(worst or [math.nan])),
        "floor": number_in(run.result.get("floor"), metric),
        "mean": best.mean(metric),
        "words": METRICS[metric].words,
        "rare": (METRICS[rare].words, best.mean(rare)),
        "interval": area_with_interval(run, int(class_order(run)[0]))[1] if rare == "rare_pr_auc" else "",
        "site_words": METRICS[METRIC].words,
        "site_mean": float(np.mean([site.value() for site in sites] or [math.nan])),
    }


def in_short(comparison: Comparison, metric: str = METRIC) -> str:
    """Return the paragraph for somebody who only wants to know what came of it."""
    return say("in_short", o=values) if (values := outcome(comparison, metric)) else ""


def area_with_interval(run: RunRecord, c: int) -> tuple[float, str]:
    """Return the PR-AUC of a class and its 95 % interval in words."""
    areas, support = run.per_class("pr_auc"), run.per_class("support")
    if areas.size <= c or support.size <= c or not math.isfinite(areas[c]):
        return math.nan, ""
    low, high = area_interval(float(areas[c]), int(support[c]))
    return float(areas[c]), f"{low:.2f} to {high:.2f}"


def provenance(run: RunRecord) -> list[tuple[str, str]]:
    """Return what tells a reader how to get the same again: (what, value), as far as it was recorded."""
    made = run.clients.get("made") or {}
    keys = (("date", "date"), ("version", "fedtail"), ("command", "command"), ("commit", "commit"))
    rows = [(title, str(made[key])) for key, title in keys if made.get(key)]
    return rows + ([("data digest", str(run.clients["digest"]))] if run.clients.get("digest") else [])
