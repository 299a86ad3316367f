"""What reviewers of the paper asked for and no table of runs shows: measurements inside a run, one line each in
``studies.jsonl`` beside the records.

A candidate model of FedHOO is a sum of the clients' updates, so it is the very model that training at its rates gives,
as long as the draws are the same. What can differ is luck: ``candidates`` trains every candidate with draws of its own
and asks whether the 2^K rewards and the winner are still the same. Two such trainings against each other show how much
of a reward is luck. ``controls`` runs FedHOO against a uniform rate at the mean of what it found and against the same
search told shuffled rewards, both by the same reward. ``clients`` counts regret on a problem with a known answer, and
time, by the number of clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from fedtail.core.candidates import Candidates, binary_patterns, separate_candidates
from fedtail.core.metrics import score
from fedtail.core.random import generator
from fedtail.core.records import Task
from fedtail.errors import FedtailError, one_of, writing
from fedtail.rates import FedHOO, RateStrategy, Setting, Uniform
from fedtail.rounds.loop import train_rounds
from fedtail.rounds.state import Engine, Problem, State
from fedtail.runs.build import build as build_run
from fedtail.runs.build import build_federation
from fedtail.runs.config import changed
from fedtail.settings import Settings
from fedtail_experiments.paper.declared import load_grid
from fedtail_experiments.paper.records import DIGITS, commit, numbers

FILE = "studies.jsonl"
FRESH = 10_000
"""Draws are keyed by round; candidates that are trained take theirs from rounds that no run has."""


@dataclass(frozen=True)
class Study:
    """One measurement."""

    study: str
    place: str
    """What it was measured on."""
    seed: int
    values: Mapping[str, float]
    commit: str = ""

    def line(self) -> str:
        rounded = {key: round(float(value), DIGITS) for key, value in self.values.items()}
        return json.dumps({**asdict(self), "values": rounded}, separators=(",", ":"))


def read_studies(path: Path) -> list[Study]:
    """Every line of a file; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [Study(**json.loads(line)) for line in lines if line.strip()]


def run_studies(
    names: Sequence[str], places: Sequence[str], seeds: Sequence[int], path: Path, scale: str
) -> Iterator[Study]:
    """Measure what the file does not have yet, and add each line as it is known."""
    there = {(s.study, s.place, s.seed) for s in read_studies(path)}
    for name in names or STUDIES:
        if name not in STUDIES:
            raise one_of("study", name, STUDIES)
        measure, known = STUDIES[name]
        for place in [p for p in known if not places or p in places]:
            for seed in seeds:
                if (name, place, seed) in there:
                    continue
                found = Study(name, place, seed, measure(place, seed, scale), commit())
                with writing(path.parent):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("a", encoding="utf-8") as file:
                        file.write(found.line() + "\n")
                yield found


# -- candidates: sums of updates against models that were trained


class Retraining:
    """An engine that also trains every candidate of a search round by itself, with draws of its own."""

    def __init__(self, engine: Engine, other: Engine, metric: str, *, every: int, follow: bool) -> None:
        self.engine, self.other, self.metric = engine, other, metric
        self.every, self.follow = every, follow
        self.task: Task | None = None
        self.rounds: list[dict[str, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, task: Task) -> Any:
        self.task = task
        return self.engine.train(task)

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        """Counts of the candidates as they are, or with ``follow`` of those that were trained."""
        summed, task = self.engine.validate(candidates, clients), self.task
        assert task is not None
        if task.n_probes != 2 or (task.round % self.every and not self.follow):
            return summed
        one = self._trained(task, candidates, clients, draw=1)
        if not task.round % self.every:
            same = self._trained(task, candidates, clients, draw=0) if not self.rounds else summed
            two = self._trained(task, candidates, clients, draw=2)
            self.rounds.append(agreement(*(score(c, self.metric) for c in (summed, one, two, same))))
        return one if self.follow else summed

    def _trained(self, task: Task, candidates: Candidates, clients: Sequence[int], draw: int) -> np.ndarray:
        """Counts of the models that training at the rates of each candidate gives. ``draw`` 0 takes the round's own
        draws, every other number draws of its own for each candidate."""
        assert task.weights is not None and task.axes is not None
        models = []
        for s, bits in enumerate(candidates.patterns):
            chosen = {key: np.take_along_axis(v, bits[task.axes][:, None], 1) for key, v in task.probes.items()}
            at = task.round + (FRESH * (1 + 2 * s + draw) if draw else 0)
            updates, refused = self.other.train(replace(task, round=at, probes=chosen, advance=lambda part: None))
            if refused:
                raise FedtailError(f"a candidate could not be trained: {refused[0].reason}")
            total = task.x.double()
            for u, weight in zip(updates, task.weights, strict=True):
                total = total + float(weight) * u.delta[0].double()
            models.append(total.to(task.x.dtype))
        return self.engine.validate(separate_candidates(models), clients)


def agreement(summed: np.ndarray, one: np.ndarray, two: np.ndarray, same: np.ndarray) -> dict[str, float]:
    """How the rewards of summed candidates compare with those of trained ones, and two trainings with each other.

    ``lost`` is what the winner among the sums is behind the best by the rewards of another training."""
    first, second = int(summed.argmax()), int(one.argmax())
    return {
        "rank": _rank(summed, one),
        "rank_luck": _rank(one, two),
        "winner": float(one[first] == one.max()),
        "winner_luck": float(two[second] == two.max()),
        "lost": float(one.max() - one[first]),
        "lost_luck": float(two.max() - two[second]),
        "distance": float(np.abs(summed - one).mean()),
        "distance_luck": float(np.abs(one - two).mean()),
        "same_draws": float(np.abs(summed - same).max()),
    }


def _rank(one: np.ndarray, two: np.ndarray) -> float:
    """Spearman's rank correlation; 1 where neither tells its candidates apart, 0 where one of them does not."""
    flat = [np.ptp(v) == 0 for v in (one, two)]
    return float(all(flat)) if any(flat) else float(spearmanr(one, two).statistic)


def measure_candidates(place: str, seed: int, scale: str) -> dict[str, float]:
    """One run that follows the sums and one that follows the trained candidates."""
    settings, every = settings_of(place, "FedHOO", seed, scale), 3
    runs = {}
    for follow in (False, True):
        problem, other = build(settings), build(settings)
        engine = Retraining(problem.engine, other.engine, settings.run.metric, every=every, follow=follow)
        state = finished(replace(problem, engine=engine), settings)
        runs[follow] = (tested(problem, state), engine.rounds)
    told = runs[False][1]
    out = {key: float(np.mean([r[key] for r in told])) for key in told[0] if key != "same_draws"}
    out |= {"same_draws": told[0]["same_draws"], "rounds": len(told)}
    for metric in ("accuracy", "macro_f1"):
        summed, trained = (runs[follow][0][metric] for follow in (False, True))
        out |= {f"{metric}_summed": summed, f"{metric}_trained": trained}
    return out


# -- controls: FedHOO against its own mean rate, by the same reward


def measure_controls(place: str, seed: int, scale: str) -> dict[str, float]:
    """FedHOO, a uniform rate at the mean of what it found, and the noise control by FedHOO's own reward."""
    settings = settings_of(place, "FedHOO", seed, scale)
    found = finished(problem := build(settings), settings)
    rates = np.array(found.history[-1]["rates"])
    sizes = problem.engine.sizes
    mean = float(rates @ sizes / sizes.sum())
    shuffled = {"rates.name": "random_settle", "rates.reward": "raw"}
    out = {"rate": mean, "spread": float(rates.std())} | suffixed(tested(problem, found), "fedhoo")
    for name, change in (("mean_rate", {"rates.name": "uniform", "rates.rate": mean}), ("shuffled", shuffled)):
        other = changed(settings, change)
        out |= suffixed(tested(built := build(other), finished(built, other)), name)
    return out


def suffixed(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    """The two figures of a run under its name."""
    return {f"{metric}_{name}": metrics[metric] for metric in ("accuracy", "macro_f1")}


# -- clients: regret and overhead by their number

ROUNDS, NOISE = 60, 0.01
"""Of the problem with a known answer; the noise of a reward is about that of 1,000 validation samples."""


def measure_clients(place: str, seed: int, scale: str) -> dict[str, float]:
    """Mean regret a round where the best rates are known, and what a search round costs of digits."""
    k = int(place.removeprefix("K="))
    rounds = 12 if scale == "smoke" else ROUNDS
    best = generator(seed, "studies/best").uniform(0.42, 0.78, k)
    strategies: dict[str, Callable[[], RateStrategy]] = {
        "fedhoo": lambda: FedHOO(k),
        "main_effects": lambda: FedHOO(k, select="main_effect"),
        "uniform": lambda: Uniform(k, 0.6),
    }
    out: dict[str, float] = {"models": 2.0**k}
    for name, make in strategies.items():
        path = known_answer(make(), best, rounds, generator(seed, "studies/noise"))
        out |= {
            f"regret_{name}": float(((path - best) ** 2).mean()),
            f"error_{name}": float(np.abs(path[-1] - best).mean()),
        }
    for name, rates in (
        ("search", {"rates.name": "fedhoo", "rates.max_rounds": 12}),
        ("plain", {"rates.name": "uniform"}),
    ):
        settings = changed(
            settings_of("digits-20", "FedHOO", seed, "cpu"), {"data.clients": k, "run.rounds": 12, **rates}
        )
        out[f"seconds_{name}"] = round_seconds(build(settings), settings)
    out["times"] = out["seconds_search"] / out["seconds_plain"]
    return out


def known_answer(strategy: RateStrategy, best: np.ndarray, rounds: int, rng: np.random.Generator) -> np.ndarray:
    """(rounds, K) rates in force where accuracy rises over rounds and falls with the squared distance from ``best``."""
    strategy.begin(Setting(rounds, 1.0, np.full(len(best), 100)))
    path = []
    for t in range(rounds):
        probes, rewards = strategy.ask(), None
        if strategy.patterns() is not None:
            bits = binary_patterns(len(best))
            each = np.where(bits == 1, probes[:, 1], probes[:, 0])
            level = 0.9 - 0.5 * np.exp(-t / 15) - ((each - best) ** 2).sum(1)
            rewards = level + NOISE * rng.standard_normal(len(each))
        strategy.tell(rewards)
        path.append(np.array(strategy.rates))
    return np.array(path)


def round_seconds(problem: Problem, settings: Settings) -> float:
    """Median seconds of a round after the first two."""
    took: list[float] = []
    train_rounds(problem, settings, problem.begin(), lambda state, record, seconds: took.append(seconds))
    problem.engine.close()
    return float(np.median(took[2:]))


# -- runs


def settings_of(place: str, row: str, seed: int, scale: str) -> Settings:
    """Settings of a cell of the grid ``fedhoo`` with Dirichlet clients; few rounds where it is only tried."""
    ((_, cell),) = [
        (p, c)
        for p, c in load_grid("fedhoo").cells("cpu", [seed], ["Dirichlet", place], tuned=True)
        if p.row == row and p.column == place and p.block == "Dirichlet"
    ]
    short = {"run.rounds": 6, "data.clients": 3} if scale == "smoke" else {}
    return changed(cell.config, {**short, "run.evaluate_every": 1000, "run.validate_every": 0})


def build(settings: Settings) -> Problem:
    """The problem that the settings describe."""
    return build_run(settings, build_federation(settings)).problem


def finished(problem: Problem, settings: Settings) -> State:
    """All rounds."""
    state = train_rounds(problem, settings, problem.begin())
    problem.engine.close()
    return state


def tested(problem: Problem, state: State) -> dict[str, float]:
    """Test metrics of the last model."""
    return numbers(problem.metrics(problem.engine.confusion(state.x, "test")))


PLACES = ("digits-20", "Adult-10", "NB15-MLP")
STUDIES: dict[str, tuple[Callable[[str, int, str], dict[str, float]], tuple[str, ...]]] = {
    "candidates": (measure_candidates, PLACES),
    "controls": (measure_controls, PLACES),
    "clients": (measure_clients, ("K=2", "K=5", "K=8", "K=10")),
}
"""What can be measured, and on what."""
