"""Run folders, read back, and the yardsticks beside them: the only thing a report is made from.

Yardsticks are what a federation is measured against. ``alone``: every site trains by itself. ``pooled``: one site has
all data. ``boosting`` and ``logistic``: what a table's owner would do with all data and scikit-learn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.core.metrics import METRICS, Metric, number_of
from fedtail.core.promise import Promise
from fedtail.errors import FedtailError
from fedtail.files import read_json, read_toml, write_atomically
from fedtail.rounds.history import parse_history, parse_timings, plain
from fedtail.words import percent, plural


@dataclass(frozen=True)
class RunRecord:
    """One run as its folder tells it: what was asked, what happened in each round, what came of it."""

    folder: Path
    config: dict[str, Any]
    history: list[dict[str, Any]]
    """One record per round, as the round loop wrote them."""
    clients: dict[str, Any]
    """``sites``, ``sizes``, ``classes`` and, in simulation only, ``label_map`` (K, C) and ``train_counts`` (C,)."""
    result: dict[str, Any]
    """Final metrics, floor, hardware and time; empty while the run is not finished."""
    timings: list[float] = field(default_factory=list)
    """Seconds of each round."""

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        """``config[section][key]``, or ``default``."""
        return self.config.get(section, {}).get(key, default)

    @property
    def method(self) -> str:
        return str(self.setting("method", "name", "unknown"))

    @property
    def rates(self) -> str:
        return str(self.setting("rates", "name", "none"))

    @property
    def _titles(self) -> dict[str, Any]:
        return dict(self.result.get("titles") or self.clients.get("titles") or {})

    @property
    def method_title(self) -> str:
        """What tables call the method; runs of version 0.1 do not say."""
        return str(self._titles.get("method", self.method))

    @property
    def rates_title(self) -> str:
        return str(self._titles.get("rates", self.rates))

    @property
    def encoder(self) -> str:
        """Whose features were trained on, in words; empty if a whole model was."""
        used = self.clients.get("encoder")
        if not used:
            return ""
        name = self.setting("model", "name", "auto")
        head = self.setting("model", "head", "linear") if name == "auto" else name
        frozen = f"last {used['unfreeze']} blocks trained" if used.get("unfreeze") else "frozen"
        return f"encoder {used['name']} ({frozen}), {head} head"

    @property
    def model(self) -> str:
        """The name of the network: as asked for, or as the data suggested."""
        name = str(self.setting("model", "name", "auto"))
        return str(self.result.get("model") or name) if name == "auto" else name

    @property
    def resamples(self) -> bool:
        """Whether the method resamples at rates; trees and logistic regression weigh samples instead."""
        return self.method not in ("trees", "logistic")

    @property
    def seed(self) -> int:
        return int(self.setting("run", "seed", 0))

    @property
    def rounds(self) -> int:
        """Rounds asked for; ``len(history)`` have been run."""
        return int(self.setting("run", "rounds", len(self.history)))

    @property
    def finished(self) -> bool:
        """Whether the run came to its end: all rounds, or the end of the search it was for."""
        return bool(self.result) or len(self.history) >= self.rounds

    @property
    def test(self) -> dict[str, Any]:
        """Test metrics of the final model: those of result.json, else of the last round that was evaluated."""
        final = self.result.get("test", self.result)
        if isinstance(final, dict) and "macro_f1" in final:
            return final
        return next((r["test"] for r in reversed(self.history) if "test" in r), {})

    @property
    def confusion(self) -> np.ndarray | None:
        """(C, C) test counts, row = true class, where the run recorded them; sites may reveal totals only."""
        recorded = self.test.get("confusion", self.result.get("confusion"))
        counts = None if recorded is None else np.asarray(recorded, dtype=np.float64)
        return None if counts is None or counts.ndim != 2 or counts.shape[0] != counts.shape[1] else counts

    @property
    def is_real(self) -> bool:
        """Whether sites trained, over a network, rather than the simulator."""
        engine = self.result.get("engine")
        return isinstance(engine, dict) and engine.get("path") == "remote"

    @property
    def classes(self) -> list[str]:
        named = self.clients.get("classes")
        return [str(c) for c in named] if named else [str(c) for c in range(len(self.per_class("accuracy")))]

    @property
    def train_counts(self) -> np.ndarray | None:
        """(C,) training samples per class over all clients; None in a real federation."""
        counts = self.clients.get("train_counts")
        return None if counts is None else np.asarray(counts, dtype=np.float64)

    @property
    def label_map(self) -> np.ndarray | None:
        """(K, C) training samples per client and class; None in a real federation."""
        counts = self.clients.get("label_map")
        return None if counts is None else np.asarray(counts, dtype=np.float64)

    @property
    def weights(self) -> np.ndarray:
        """(K,) p_k, each client's share of the training samples."""
        n_clients = len(self.history[0]["rates"]) if self.history else 1
        sizes = np.asarray(self.clients.get("sizes") or [1] * n_clients, dtype=np.float64)
        return sizes / sizes.sum()

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run's rounds."""
        return float(self.result.get("seconds") or sum(self.timings))

    def metric(self, name: str) -> float:
        """A final test metric, NaN where it is not recorded or not defined."""
        if name == "rare_pr_auc" and name not in self.test:  # runs of version 0.2 have the areas of all classes
            areas, counts = self.per_class("pr_auc"), self.train_counts
            known = areas.size and counts is not None and counts.size == areas.size
            return float(areas[int(np.argmin(counts))]) if known and counts is not None else float("nan")
        return number_of(self.test.get(name))

    def per_class(self, name: str = "accuracy") -> np.ndarray:
        """(C,) final ``per_class_accuracy`` or ``per_class_f1``; NaN where there is nothing to take a share of, be it
        answers or samples, and the metrics have 0."""
        values = np.array([number_of(v) for v in self.test.get(f"per_class_{name}", [])])
        counts, axis = self.confusion, {"precision": 0, "f1": 1}.get(name)
        if axis is not None and counts is not None and len(counts) == len(values):
            values[~counts.any(axis)] = np.nan
        return values

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(rounds, values) of ``train_loss``, ``alignment``, ``test.macro_f1`` ..., where recorded."""
        section, _, key = name.rpartition(".")
        rows = [(r["round"], r.get(section, {}).get(key) if section else r.get(key)) for r in self.history]
        kept = [(t, number_of(v)) for t, v in rows if isinstance(v, int | float) and not isinstance(v, bool)]
        return np.array([t for t, _ in kept], dtype=np.int64), np.array([v for _, v in kept], dtype=np.float64)

    def rate_path(self) -> np.ndarray:
        """(T, K) the resampling rates in force after each round."""
        lists = [r.get("rates", []) for r in self.history]
        arrays = {id(values): np.array([number_of(v) for v in values]) for values in lists}  # most rounds share one
        rows = [arrays[id(values)] for values in lists]
        return np.broadcast_to(rows[0], (len(rows), rows[0].size)) if len(arrays) == 1 else np.array(rows)

    def search_rounds(self) -> int:
        """Rounds in which rates were still searched."""
        return sum(bool(r.get("searching")) for r in self.history)


def load_run(folder: Path | str) -> RunRecord:
    """Read a run folder; a run that was interrupted is read as far as it came."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FedtailError(f"{str(folder)!r} is not a folder; give the run folders that 'fedtail run' printed")
    missing = [name for name in ("config.toml", "history.jsonl") if not (folder / name).is_file()]
    if missing:
        raise FedtailError(f"{str(folder)!r} is not a run folder: it has no {' and no '.join(missing)}")
    run = RunRecord(
        folder=folder,
        config=read_toml(folder / "config.toml"),
        history=read_history(folder),
        clients=read_json(folder / "clients.json"),
        result=read_json(folder / "result.json"),
        timings=read_timings(folder),
    )
    for name, title in run._titles.get("metrics", {}).items():  # the user's own, whose values are in the run folder
        METRICS.remember(name, Metric(name=name, title=title, function=lambda e: np.full(e.counts.shape[:-2], np.nan)))
    return run


def load_runs(paths: Iterable[Path | str]) -> list[RunRecord]:
    """Read run folders, or every run below a folder that is none itself; each run once, in the order given."""
    by_folder: dict[Path, RunRecord] = {}
    for path in map(Path, paths):
        below = [path]
        if path.is_dir() and not (path / "history.jsonl").exists():
            below = sorted(
                f.parent
                for f in path.rglob("history.jsonl")
                if (f.parent / "config.toml").exists()
                and not any(part.startswith(".") for part in f.relative_to(path).parts)  # copies of other processes
            )
            if not below:
                raise FedtailError(f"{str(path)!r} is not a run folder and contains none; see 'fedtail run --help'")
        for folder in below:
            if folder.resolve() not in by_folder:
                by_folder[folder.resolve()] = load_run(folder)
    runs = list(by_folder.values())
    if not runs:
        raise FedtailError("no run given; give one or more run folders, e.g. runs/*")
    empty = [str(r.folder) for r in runs if not r.history]
    if empty:
        raise FedtailError(f"{empty[0]!r} has not finished a round yet, so there is nothing to report")
    return runs


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The records of complete rounds."""
    path = folder / "history.jsonl"
    return parse_history(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else []


def read_timings(folder: Path) -> list[float]:
    """Seconds of each round done."""
    path = folder / "timings.csv"
    return parse_timings(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else []


def promises(run: RunRecord) -> list[str]:
    """Return what a run promises of answers to come, a sentence each; none where nothing was asked."""
    decision, out = run.result.get("decision") or {}, []
    if decision.get("promise"):
        out.append(Promise.from_json(decision["promise"]).sentence(str(decision.get("find"))))
        own = sum(bool((site.get("decision") or {}).get("promise")) for site in run.result.get("sites") or [])
        if own:
            out.append(f"{plural(own, 'site')} promised this with a threshold of its own")
    if cost := run.result.get("cost"):
        most = f"at most {cost['bound']:.3g} with {percent(cost['confidence'])} confidence"
        out.append(f"an answer costs {cost['mean']:.3g} on average, {most} (from {cost['samples']:,} cases)")
    return out


FOLDER = "yardsticks"
TITLES = {
    "alone": "each site alone",
    "pooled": "all data pooled",
    "boosting": "pooled gradient boosting",
    "logistic": "pooled logistic regression",
}


@dataclass(frozen=True)
class AtSite:
    """One site by itself, and the federated model at that site; macro F1 each, None where it is not defined."""

    site: str
    samples: int
    test: float | None
    """What the model that the site trained alone reaches on the common test set."""
    own: float | None
    """What that model reaches on the site's own test samples, or its validation split where the test set is nobody's
    own."""
    federated: float | None
    """What the federated model reaches on the same samples."""


@dataclass(frozen=True)
class Yardstick:
    """One yardstick under one seed."""

    kind: str
    seed: int
    run: str
    """Name of the run folder that it is measured against."""
    test: dict[str, Any]
    """Test metrics; of ``alone`` their means over sites."""
    seconds: float
    sites: tuple[AtSite, ...] = field(default=())
    confusions: dict[str, list[list[int]]] = field(default_factory=dict)
    """Site -> counts on its own test rows, row = true class; empty where the test set is nobody's own."""

    @property
    def title(self) -> str:
        return TITLES.get(self.kind, self.kind)

    def __str__(self) -> str:
        reached = self.test.get("macro_f1", float("nan"))
        return f"{self.title}, seed {self.seed}: macro F1 {reached:.3f} in {self.seconds:.1f} s"

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(plain(asdict(self)), indent=1))


def load_yardstick(path: Path) -> Yardstick:
    """Read one back."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Yardstick(**{**fields, "sites": tuple(AtSite(**site) for site in fields["sites"])})
    except (ValueError, TypeError, KeyError) as error:
        raise FedtailError(f"{path}: not a yardstick ({error}); delete it") from None


def beside(folders: Iterable[Path]) -> list[Yardstick]:
    """The yardsticks that lie beside run folders and were measured against one of them."""
    known = list(folders)
    yardsticks = [
        load_yardstick(path)
        for parent in dict.fromkeys(folder.parent for folder in known)
        for path in sorted((parent / FOLDER).glob("*.json"))
    ]
    names = {folder.name for folder in known}
    return [yardstick for yardstick in yardsticks if yardstick.run in names]
