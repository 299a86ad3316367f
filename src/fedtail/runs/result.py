"""What a finished run leaves in memory: a model, its numbers, and ways to look at them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedtail.boosting.model import TreesModule
from fedtail.core.decisions import Decision
from fedtail.core.metrics import majority_floor, metrics, shown
from fedtail.core.promise import cost_bound
from fedtail.core.scores import Scores
from fedtail.data.inspection import About
from fedtail.errors import FedtailError
from fedtail.registry import is_own
from fedtail.rounds.history import influence_of, plain
from fedtail.rounds.race import race_of
from fedtail.rounds.state import Problem, State
from fedtail.rounds.validation import kept_model
from fedtail.runs.decide import choose_decisions, describe_decision
from fedtail.runs.folder import append_round, begin_folder, clients_of, end_folder
from fedtail.runs.record import RunRecord
from fedtail.runs.saved import SavedModel
from fedtail.runs.split_scores import curves_of, metrics_of_test, score_splits, site_rows, tradeoff_of, worst_of
from fedtail.runs.verdict import Verdict, verdict
from fedtail.settings import Settings
from fedtail.words import aligned, html_table

TOLD = ("titles", "test", "confusion", "validation", "sites", "worst", "curves", "tradeoff", "floor", "rates")
"""What ``result.json`` has of a result as it is."""
MOST_COLUMNS = 6
"""Metrics of a printed result, those that say most."""


@dataclass
class Result:
    """A trained model with its history and test metrics."""

    module: nn.Module
    """The chosen model, ready to use."""
    x: Tensor
    """(n,) the chosen model as a vector."""
    test: dict[str, Any]
    confusion: np.ndarray
    before: dict[str, Any] | None
    """Test metrics of the plain argmax, where a decision was asked for."""
    decision: Decision
    site_decisions: dict[str, Decision]
    """Site -> its own, where sites have one and tell it."""
    validation: dict[str, Any]
    """Metrics on the private splits of all sites together; empty where sites keep them to themselves."""
    sites: list[dict[str, Any]]
    """Every metric of every site, on its private validation split and, where it has one, its own test set."""
    worst: dict[str, Any]
    """The worst site, the mean and the spread over sites of macro F1."""
    curves: dict[str, Any]
    """Precision-recall curves and reliability, on ``test`` and ``validation``."""
    tradeoff: dict[str, Any]
    """What each threshold of the class to find, or of the rarest, would give on validation."""
    floor: dict[str, float]
    """Metrics of always answering the majority class."""
    rates: np.ndarray
    """(K,) the resampling rates in force; what else was searched is in the summary."""
    history: list[dict[str, Any]]
    seconds: list[float]
    """Seconds of each round."""
    summary: dict[str, Any]
    titles: dict[str, Any]
    """How method, rate strategy and metrics of the user's own are called in tables and reports."""
    about: About
    settings: Settings
    verdict: Verdict | None = None
    """What is wrong with the run, if something is."""
    architecture: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    def _table(self) -> tuple[str, list[list[str]], list[str]]:
        """What a printed result says: a line, a table, and what is wrong."""
        known = shown(self.test, MOST_COLUMNS)
        rows = [["", *(m.title for m in known)], ["model", *(f"{self.test[m.name]:.3f}" for m in known)]]
        for title, of in (("likeliest class", self.before), ("majority only", self.floor)):
            if of:
                values = (of.get(m.name, np.nan) for m in known)
                rows.append([title, *("–" if not np.isfinite(v) else f"{v:.3f}" for v in values)])
        rates = "" if isinstance(self.module, TreesModule) else f" + {self.titles['rates']}"
        run = f"{self.about.name} · {len(self.about.sites)} sites · {self.titles['method']}{rates}"
        warning = [] if self.verdict is None else [f"warning: {self.verdict.line(self.folder)}"]
        return f"{run} · {self.summary['rounds']} rounds · {sum(self.seconds):.1f} s", rows, warning

    def __repr__(self) -> str:
        title, rows, warning = self._table()
        return "\n".join([title, *aligned(rows), *warning])

    def _repr_html_(self) -> str:
        return html_table(*self._table())

    def model(self) -> SavedModel:
        """The model with everything between raw data and class names."""
        saved = SavedModel.of_run(self.module, self.about, self.architecture)
        saved.decision, saved.sites = self.decision, self.site_decisions
        return saved

    def predict(self, data: Any) -> np.ndarray:
        """(N,) labels, of the type that they had in training; see ``SavedModel.predict``."""
        return self.model().predict(data)

    def predict_proba(self, data: Any) -> np.ndarray:
        """(N, C) class probabilities, in the order of ``about.classes``."""
        return self.model().predict_proba(data)

    def save(self, folder: str | Path) -> Path:
        """Write a run folder: what ``fedtail report``, ``fedtail predict`` and ``load_model`` read."""
        folder = Path(folder)
        if (folder / "config.toml").exists():
            raise FedtailError(f"{str(folder)!r} already contains a run; choose another folder")
        begin_folder(folder, self.settings, self.about, self.titles, [])
        for i, seconds in enumerate(self.seconds):
            append_round(folder, self.history[: i + 1], seconds)
        self.finish_folder(folder)
        return folder

    def finish_folder(self, folder: Path) -> None:
        """Write the model and ``result.json`` next to an existing history."""
        self.model().save(folder)
        self.folder = folder
        end_folder(folder, self.settings, self.about, self.history, self.outcome())

    def outcome(self) -> dict[str, Any]:
        """The contents of ``result.json``."""
        decided = describe_decision(self.decision, self.about.classes)
        return {
            **({"model": name} if (name := self.architecture.get("name")) else {}),
            **{name: getattr(self, name) for name in TOLD},
            **({} if self.before is None else {"decision": decided, "before": self.before}),
            **self.summary,
            **({} if self.verdict is None else {"verdict": self.verdict.record(self.folder)}),
        }

    def report(self, path: str | Path | None = None) -> Path:
        """One self-contained HTML page; in the run folder unless ``path`` is given."""
        if self.folder is None:
            if path is None:
                raise FedtailError(
                    "this result is in memory only; call result.save('runs/x') first, or pass a path to report()"
                )
            self.save(Path(path).with_suffix(""))
        assert self.folder is not None
        from fedtail.report import write_run_report  # a layer above, imported where a user asks for it

        page = write_run_report(self.folder)
        if path is None:
            return page
        Path(path).write_bytes(page.read_bytes())
        return Path(path)

    def plot(self, kind: str = "curves", metric: str = "macro_f1") -> Any:
        """A matplotlib figure: ``curves`` over rounds, precision and recall of ``classes``, a metric of ``sites``,
        ``reliability`` of probabilities, or precision against recall (``pr``)."""
        from fedtail.report.figures import plot  # a layer above, imported where a user asks for it

        return plot(self.record(), kind, metric)

    def record(self) -> RunRecord:
        """The run as its folder would tell it."""
        return RunRecord(
            folder=self.folder or Path(self.about.name),
            config=tomllib.loads(self.settings.to_toml()),
            history=plain(self.history),
            clients=plain(clients_of(self.about, self.titles)),
            result=plain(self.outcome()),
            timings=self.seconds,
        )


def titles_of(problem: Problem) -> dict[str, Any]:
    """Return what tables and reports call the parts of a run."""
    own = {m.name: m.title for m in metrics() if is_own(m.name)}
    return {"method": problem.method.title, "rates": problem.rates.title, "metrics": own}


def conclude(problem: Problem, state: State, about: About, settings: Settings, seconds: list[float]) -> Result:
    """The chosen model and its test metrics."""
    best = state.best if settings.run.select == "best" else None
    x = kept_model(problem, settings, state)
    decisions = choose_decisions(problem, x, settings.decision, about.classes)
    common, splits = decisions.common, score_splits(problem, x, decisions)
    before = None if decisions.plain else score_splits(problem, x)
    pooled, validated = splits["test"].pooled, splits["validation"].pooled
    confusion = problem.engine.confusion(x, "test") if pooled is None or decisions.plain else pooled.confusion
    problem.model.load(x)
    problem.model.module.eval()
    last, rates = state.history[-1] if state.history else {}, problem.rates
    race, floor = race_of(rates), {}
    if about.test_counts is not None:
        counts = about.train_counts
        majority = None if counts is None else int(counts.argmax())
        floor = majority_floor(about.test_counts, majority, problem.background)
    optional = {
        "importance": importance_of(problem.model.module),
        "found": {**problem.settled, **({} if race is None or race.racing else {"lr": race.lr})},
        "influence": influence_of(state.history, problem.engine.n_clients),
    }
    info = problem.engine.info()
    last = {**last, **info.pop("told", {})}  # what has changed since the last round
    summary: dict[str, Any] = {
        "rounds": state.round,
        "selected_round": state.round if best is None else best.round,
        **{key: last.get(key, 0.0) for key in ("path_variation", "path_variation_per_root_round")},
        "refused": sum(len(r["refused"]) for r in state.history),
        **{name: value for name, value in optional.items() if value},
        **{key: last[key] for key in ("searched", "privacy") if key in last},
        **_cost(validated, common, settings.decision.confidence),
        "engine": info,
    }
    test = metrics_of_test(problem, splits, confusion)
    plainly = None if before is None or before["test"].pooled is None else before["test"].pooled.confusion
    n_validation = 0 if validated is None else int(validated.confusion.sum())
    return Result(
        module=problem.model.module,
        x=x,
        test=test,
        before=None if before is None or plainly is None else metrics_of_test(problem, before),
        decision=common if validated is None or not decisions.plain else common.with_sets(validated),
        site_decisions={about.sites[k]: decision for k, decision in decisions.sites.items()},
        validation={} if validated is None else problem.metrics(validated.confusion, validated),
        sites=site_rows(about, splits, before, decisions),
        worst=worst_of(about.sites, splits, before),
        curves=curves_of(splits, before, about.classes),
        tradeoff=tradeoff_of(validated, common, about.classes),
        confusion=confusion,
        floor=floor,
        rates=rates.rates if rates.searches == "rate" else rates.base_rates,
        history=state.history,
        seconds=seconds,
        summary=summary,
        titles=titles_of(problem),
        about=about,
        settings=settings,
        verdict=verdict(test, confusion, floor, state.history, about.classes, settings, n_validation, plainly, common),
    )


def importance_of(module: nn.Module) -> dict[str, float]:
    """Each column's share of what all splits of trees gain, the largest first; empty of networks."""
    if not isinstance(module, TreesModule):
        return {}
    shares = dict(zip((c.name for c in module.shape.columns), module.read().importance().tolist(), strict=True))
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _cost(scores: Scores | None, decision: Decision, confidence: float) -> dict[str, Any]:
    """The mean cost of an answer on validation, and what it will be at most with the confidence of ``decision``."""
    if scores is None or not scores.n or not decision.costs:
        return {}
    mean, bound = cost_bound(scores.confusion, np.asarray(decision.costs), confidence)
    return {"cost": {"mean": mean, "bound": bound, "confidence": confidence, "samples": scores.n}}
