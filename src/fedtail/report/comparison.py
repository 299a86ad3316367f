"""Which runs are compared: those on the same data, a contender per method and settings, over its seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedtail.core.metrics import signed
from fedtail.errors import FedtailError, one_of
from fedtail.runs.record import RunRecord, Yardstick, beside
from fedtail.settings import FREE_KEYS, flatten
from fedtail.words import plural, setting


def finite(values: Mapping[Any, float]) -> dict[Any, float]:
    """Return the values that there are."""
    return {k: v for k, v in values.items() if math.isfinite(v)}


@dataclass(frozen=True)
class Contender:
    """A method with its settings, over several seeds: one row of a table, one line of a chart."""

    label: str
    runs: tuple[RunRecord, ...]

    def values(self, metric: str) -> dict[Any, float]:
        """Seeds of run and data -> final test metric; seeds without it are left out."""
        return finite({pair_key(r): r.metric(metric) for r in self.runs})

    def mean(self, metric: str) -> float:
        values = list(self.values(metric).values())
        return float(np.mean(values)) if values else math.nan

    def spread(self, metric: str) -> float:
        """Standard deviation over seeds (n - 1); NaN with one seed."""
        values = list(self.values(metric).values())
        return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan

    def band(self, curve: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(rounds, mean, standard deviation) of a curve, over the rounds that every seed has."""
        curves = [
            pd.Series(values, index=rounds) for r in self.runs for rounds, values in [r.curve(curve)] if rounds.size
        ]
        if not curves:
            return np.empty(0), np.empty(0), np.empty(0)
        table = pd.concat(curves, axis=1, join="inner").sort_index()
        return table.index.to_numpy(), table.mean(axis=1).to_numpy(), table.std(axis=1).fillna(0.0).to_numpy()


@dataclass(frozen=True)
class Comparison:
    """All runs on the same data; runs on other data are compared separately."""

    title: str
    contenders: tuple[Contender, ...]
    reference: Contender
    """The one that the others are tested against."""
    notes: tuple[str, ...] = ()
    yardsticks: tuple[Yardstick, ...] = ()
    """What lies beside the runs to measure them against."""

    @property
    def runs(self) -> tuple[RunRecord, ...]:
        return tuple(run for _, run in self.each)

    @property
    def each(self) -> list[tuple[Contender, RunRecord]]:
        """Every run with its contender."""
        return [(one, run) for one in self.contenders for run in one.runs]

    @property
    def several(self) -> bool:
        return len(self.contenders) > 1

    @cached_property
    def colours(self) -> dict[str, int]:
        """Label -> colour: the baseline takes the neutral colour 0, the rest follow in order."""
        if not self.several:
            return {self.reference.label: 1}
        others = [one.label for one in self.contenders if one is not self.reference]
        return {self.reference.label: 0} | {label: i for i, label in enumerate(others, start=1)}

    @property
    def filtered(self) -> dict[str, int]:
        """Label -> the colour by which the page's filter hides what is about one contender; empty of the only one."""
        return self.colours if self.several else {}

    @cached_property
    def _data_vary(self) -> bool:
        return len({run.setting("data", "seed") for run in self.runs}) > 1

    def seed(self, run: RunRecord) -> str:
        """Return what tells a run from the others of its contender: its seed, with that of its data where they vary."""
        return f"{run.seed}, data {run.setting('data', 'seed')}" if self._data_vary else str(run.seed)

    def name(self, contender: Contender) -> str:
        """Return the label of a contender where there are others."""
        return contender.label if self.several else ""

    @property
    def floor(self) -> dict[str, float]:
        """Metrics of always answering the most frequent class; empty where not recorded."""
        return next((f for r in self.runs if isinstance(f := r.result.get("floor"), dict)), {})

    def scored(self, metric: str) -> list[Contender]:
        """Return the contenders that have a metric, best first."""
        known = [one for one in self.contenders if math.isfinite(one.mean(metric))]
        return sorted(known, key=lambda one: -signed(metric, one.mean(metric)))


def comparisons(runs: Sequence[RunRecord], baseline: str | None = None) -> list[Comparison]:
    """Group runs by their data, then by method, rates and whatever else differs.

    ``baseline`` is the label of the contender that the others are tested against; by default FedAvg, else the first.
    """
    if not runs:
        raise FedtailError("a report needs at least one run")
    by_data: dict[str, list[RunRecord]] = {}
    for run in runs:
        # the same settings can mean other files, so the classes must be the same too
        data = sorted(_flat(run, "data").items()), run.clients.get("classes")
        by_data.setdefault(repr(data), []).append(run)
    groups = list(by_data.values())
    common = common_keys([_flat(g[0], "data") for g in groups])
    out = []
    for group in groups:
        contenders, notes = _contenders(group)
        wanted = [one for one in contenders if one.label == baseline]
        fedavg = [one for one in contenders if one.runs[0].method == "fedavg"]
        reference, measures = [*wanted, *fedavg, *contenders][0], tuple(beside(run.folder for run in group))
        out.append(Comparison(_data_title(group[0], common), tuple(contenders), reference, tuple(notes), measures))
    if baseline is not None and all(c.reference.label != baseline for c in out):
        raise one_of("baseline", baseline, {contender.label for c in out for contender in c.contenders})
    return out


def pair_key(run: RunRecord) -> tuple[int, Any]:
    """Runs of two contenders are a pair if this is the same: the seed of the run and that of the data."""
    return run.seed, run.setting("data", "seed")


def _contenders(runs: Sequence[RunRecord]) -> tuple[list[Contender], list[str]]:
    rates_differ = len({(r.rates, setting(r.setting("rates", "rate"))) for r in runs}) > 1
    by_name: dict[str, list[RunRecord]] = {}
    for run in runs:
        name = run.method_title
        by_name.setdefault(f"{name} + {_rates(run)}" if rates_differ else name, []).append(run)
    labelled: dict[str, dict[object, RunRecord]] = {}
    notes = []
    for name, members in by_name.items():
        flats = [_flat(r) for r in members]
        common = common_keys(flats)
        for run, flat in zip(members, flats, strict=True):
            extra = [
                f"{k.rpartition('.')[2]} {setting(flat.get(k, 'unset'))}" for k in keys_of(flats) if k not in common
            ]
            label = ", ".join([name, *extra])
            seeds = labelled.setdefault(label, {})
            if pair_key(run) in seeds:
                notes.append(f"{label}: seed {run.seed} was run more than once; showing {run.folder.name}.")
            seeds[pair_key(run)] = run
    return [Contender(label, tuple(seeds.values())) for label, seeds in labelled.items()], notes


def _rates(run: RunRecord) -> str:
    name = run.rates_title
    rate = run.setting("rates", "rate")
    return f"{name} {setting(rate)}" if run.rates == "uniform" and rate is not None else name


OWN = ("table", "tables", "site_tables", "images")
"""Data sets that are the user's own files, and are called like them."""


def _data_title(run: RunRecord, common: set[str]) -> str:
    name, path = str(run.setting("data", "name", "data")), run.setting("data", "path")
    files = Path(str(path)).absolute()
    parts = [(files.parent if "*" in files.name else files).stem if path and name in OWN else name]
    parts.append(plural(len(run.clients.get("sizes") or run.rate_path()[0]), "client"))
    split, alpha = run.setting("data", "partition"), run.setting("data", "alpha")
    if split == "auto":  # the data's own sites where it has some, else Dirichlet
        own = any(not str(s).startswith("client ") for s in run.clients.get("sites") or [])
        split = "own sites" if own else "dirichlet"
    if split:
        parts.append(f"{split} {alpha:g}" if "dirichlet" in str(split) and alpha is not None else str(split))
    named = common | {"data.name", "data.clients", "data.partition", "data.alpha"}
    parts += [f"{k.rpartition('.')[2]} {setting(v)}" for k, v in _flat(run, "data").items() if k not in named]
    return " · ".join(parts)


def _flat(run: RunRecord, section: str = "") -> dict[str, Any]:
    return {k: v for k, v in flatten(run.config).items() if makes_a_difference(k) and k.startswith(section)}


def makes_a_difference(key: str) -> bool:
    """Whether runs that differ in a setting are different contenders; seeds and the engine do not matter."""
    section, _, name = key.partition(".")
    return section != "engine" and name != "seed" and key not in FREE_KEYS


def keys_of(flats: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(k for flat in flats for k in flat))


def common_keys(flats: Sequence[dict[str, Any]]) -> set[str]:
    """Keys with the same value everywhere."""
    return {k for k in keys_of(flats) if all(k in f and f[k] == flats[0][k] for f in flats)}
