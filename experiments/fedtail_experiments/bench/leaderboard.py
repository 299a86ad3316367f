"""Submissions side by side: ranks with intervals, tables, and two figures.

Within a set and a seed methods are ranked by macro F1 (1 is best, equal ones share the mean); a method's rank is the
mean over seeds, then over sets. Its interval is a bootstrap's: sets are kept, since they are the suite and no sample of
one, and seeds are drawn again within each, 2,000 times; 2.5 to 97.5 %, stretched by sqrt(n / (n - 1)), since draws of n
seeds spread too little by that. Two methods are told apart where the interval of the difference of their ranks leaves
out 0. One seed has no interval and tells none apart."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from fedtail.core.random import generator
from fedtail.errors import FedtailError, writing
from fedtail.files import write_atomically
from fedtail.methods import METHODS
from fedtail.plots import COLOURS, PAGE, STYLE
from fedtail.registry import is_own
from fedtail.rounds.history import plain
from fedtail.words import plural
from fedtail_experiments.bench.running import Submission
from fedtail_experiments.bench.suite import MEASURES, Suite

DRAWS = 2000
RANKED = "macro_f1"


@dataclass(frozen=True)
class Place:
    """A method on the leaderboard."""

    submission: Submission
    rank: float
    low: float
    high: float
    alike: tuple[str, ...]
    """Titles of methods that it cannot be told from."""

    @property
    def title(self) -> str:
        return self.submission.title

    def interval(self, between: str, digits: int) -> str:
        """From where to where."""
        return f"{self.low:.{digits}f}{between}{self.high:.{digits}f}" if np.isfinite(self.low) else "–"


@dataclass(frozen=True)
class Board:
    """Methods, best first, and what they are compared on."""

    places: tuple[Place, ...]
    sets: tuple[str, ...]
    seeds: int
    beside: tuple[Submission, ...] = ()
    """Submissions that have not all of these sets: shown beside the others on those they have."""


def rank_submissions(submissions: Sequence[Submission], only: Collection[str] = ()) -> Board:
    """Ranks over the sets that most methods have that train a network, or those of them that ``only`` names, and over
    the seeds that all who have these sets have; who has not is shown beside them."""
    if not submissions:
        raise FedtailError("no submissions to rank; run `fedtail bench --method NAME` first")
    if len(versions := {s.version for s in submissions}) > 1:
        raise FedtailError(
            f"the submissions are of versions {' and '.join(map(str, sorted(versions)))} of the suite, which do not "
            "compare; rank them in separate folders"
        )
    pool = [s for s in submissions if is_own(s.method) or s.method in list(METHODS)] or list(submissions)
    having = Counter(name for s in pool for name in s.sets if not only or name in only)
    wanted = {name for name, n in having.items() if 2 * n > len(pool)}
    ranked = [s for s in pool if wanted <= s.sets]
    beside = tuple(s for s in submissions if s not in ranked and s.sets & wanted)
    have = set.intersection(*(set(s.values(RANKED)) for s in ranked)) if wanted else set()
    if not (shared := sorted(key for key in have if key[0] in wanted)):
        raise FedtailError(
            "the submissions have no data set and seed in common; run them with the same --only and --seeds"
        )
    submissions = ranked
    sets = tuple(dict.fromkeys(name for name, _ in shared))
    seeds = min(sum(name == one for name, _ in shared) for one in sets)
    ranks = [set_ranks(submissions, one, [seed for name, seed in shared if name == one][:seeds]) for one in sets]
    means = np.mean([r.mean(1) for r in ranks], axis=0)
    rng = generator(0, "leaderboard")
    draws = np.stack(
        [np.mean([r[:, rng.integers(0, seeds, seeds)].mean(1) for r in ranks], axis=0) for _ in range(DRAWS)]
    )
    draws = means + (draws - means) * np.sqrt(seeds / (seeds - 1)) if seeds > 1 else np.full_like(draws, np.nan)
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    order = np.argsort(means, kind="stable")
    places = []
    for i in order:
        gaps = np.quantile(draws - draws[:, [i]], [0.025, 0.975], axis=0)
        alike = [submissions[j].title for j in order if j != i and not (gaps[0, j] > 0 or gaps[1, j] < 0)]
        places.append(
            Place(
                submission=submissions[i],
                rank=float(means[i]),
                low=float(low[i]),
                high=float(high[i]),
                alike=tuple(alike),
            )
        )
    return Board(tuple(places), sets, seeds, beside)


def set_ranks(submissions: Sequence[Submission], one: str, seeds: Sequence[int]) -> np.ndarray:
    """(methods, seeds) ranks on one set, 1 for the best; a run without a value is last."""
    values = np.array([[s.values(RANKED)[one, seed] for seed in seeds] for s in submissions])
    return np.asarray(rankdata(-np.nan_to_num(values, nan=-np.inf), axis=0))


def mean_spread(submission: Submission, measure: str, sets: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Per set: mean and standard deviation over seeds; NaN for a set that it has not."""
    out = {}
    for one in sets:
        values = np.array([v for (name, _), v in submission.values(measure).items() if name == one])
        spread = float(values.std(ddof=1)) if len(values) > 1 else float("nan")
        out[one] = (float(values.mean()) if len(values) else float("nan"), spread)
    return out


def means(submission: Submission, measure: str, sets: Sequence[str]) -> dict[str, float]:
    """Per set: the mean over seeds."""
    return {one: mean for one, (mean, _) in mean_spread(submission, measure, sets).items()}


def to_markdown(board: Board, suite: Suite) -> str:
    """The leaderboard page."""
    titles = {s.name: s.title for s in suite.sets}
    n, version = len(board.places), board.places[0].submission.version
    tried = sorted({tried_on(p.submission, one) for p in board.places for one in board.sets})
    trials = " to ".join(map(str, dict.fromkeys((tried[0], tried[-1]))))
    drawn = "seeds" if version == 1 else "seeds, each with a split of its own"
    lines = [
        "# Leaderboard",
        "",
        f"Suite version {version}, {plural(len(board.sets), 'data set')}: {'; '.join(titles[s] for s in board.sets)}. "
        f"{plural(board.seeds, 'seed')}, {trials} trials to tune each method on each data set. Generated by "
        "`fedtail bench`; `fedtail bench verify` recomputes a submission.",
        "",
        f"Methods are ranked 1 to {n} by macro F1 for each data set and seed; ranks are averaged over seeds, then over "
        f"data sets. Intervals are bootstrapped over {drawn}.",
        "",
        "| | method | mean rank | 95 % interval | not significantly different from |",
        "|---|---|---|---|---|",
    ]
    for i, p in enumerate(board.places, 1):
        alike = ", ".join(p.alike[:4]) + (f" and {len(p.alike) - 4} more" if len(p.alike) > 4 else "")
        lines.append(f"| {i} | {p.title} | {p.rank:.2f} | {p.interval(' to ', 2)} | {alike or 'none'} |")
    lines += ["", "![ranks](ranks.svg)", "", "![cost against quality](cost.svg)"]
    for one in board.sets:
        lines += ["", f"## {titles[one]}", "", "| method | " + " | ".join(m.title for m in MEASURES.values()) + " |"]
        lines.append("|---" * (len(MEASURES) + 1) + "|")
        shown = [p.submission for p in board.places] + [s for s in board.beside if one in s.chosen]
        for s in sorted(shown, key=lambda s: -np.nan_to_num(means(s, RANKED, [one])[one], nan=-1)):
            cells = []
            for key, m in MEASURES.items():
                mean, spread = mean_spread(s, key, [one])[one]
                varies = np.isfinite(spread) and key not in ("megabytes", "seconds")
                beside = f" ± {spread:.{m.digits}f}" if varies else ""
                cells.append(f"{mean:.{m.digits}f}{beside}" if np.isfinite(mean) else "–")
            lines.append(f"| {s.title}{' (beside the ranking)' if s in board.beside else ''} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tried_on(submission: Submission, one: str) -> int:
    """Points of its grid that a method tried on a set."""
    rounds = [trial["rounds"] for trial in submission.trials.get(one, [])]
    return rounds.count(min(rounds)) if rounds else 0


def board_json(board: Board) -> dict[str, Any]:
    """The ranking for machines."""
    answer: dict[str, Any] = plain(
        {
            "version": board.places[0].submission.version,
            "sets": list(board.sets),
            "seeds": board.seeds,
            "ranking": [
                {
                    "method": p.submission.method,
                    "title": p.title,
                    "rank": p.rank,
                    "low": p.low,
                    "high": p.high,
                    "alike": list(p.alike),
                    "mean": {key: means(p.submission, key, board.sets) for key in MEASURES},
                }
                for p in board.places
            ],
        }
    )
    return answer


def write_board(folder: Path, board: Board, suite: Suite) -> dict[str, Any]:
    """``leaderboard.md``, ``leaderboard.json``, ``ranks.svg`` and ``cost.svg``; returns what the JSON holds."""
    answer = board_json(board)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "leaderboard.md", to_markdown(board, suite))
        write_atomically(folder / "leaderboard.json", json.dumps(answer, indent=1))
        draw_ranks(board, folder / "ranks.svg")
        draw_cost(board, folder / "cost.svg")
    return answer


def draw_ranks(board: Board, path: Path) -> None:
    """Mean ranks with their intervals, best on top; those not told from the best are joined by a band."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    n = len(board.places)
    with rc_context({**STYLE, "svg.hashsalt": "fedtail"}):
        figure = Figure(figsize=(PAGE, 0.6 + 0.22 * n), layout="constrained")
        ax = figure.add_subplot()
        first = board.places[0]
        for i, p in enumerate(board.places):
            colour = COLOURS[1] if i == 0 or p.title in first.alike else "#67707d"
            ax.plot([p.low, p.high], [i, i], color=colour, linewidth=2.2, solid_capstyle="round", alpha=0.55)
            ax.plot([p.rank], [i], "o", color=colour, markersize=4.5)
        ax.set_yticks(range(n), [p.title for p in board.places])
        ax.set(ylim=(n - 0.4, -0.6), xlim=(0.8, n + 0.2), xlabel="mean rank by macro F1 (1 is best), 95 % interval")
        ax.grid(axis="x", alpha=0.3)
        figure.savefig(path, metadata={"Date": None})


def draw_cost(board: Board, path: Path) -> None:
    """Macro F1 against seconds, one panel for each set; names in a column beside it, in the order of macro F1."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    line = {"arrowstyle": "-", "color": "#b8bec7", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)}
    with rc_context({**STYLE, "svg.hashsalt": "fedtail"}):
        height = 0.8 + 0.115 * len(board.places)
        figure = Figure(figsize=(PAGE, height * len(board.sets)), layout="constrained")
        for i, one in enumerate(board.sets):
            ax = figure.add_subplot(len(board.sets), 1, i + 1)
            mean = {m: [means(p.submission, m, [one])[one] for p in board.places] for m in ("seconds", RANKED)}
            named = zip(mean[RANKED], mean["seconds"], [p.title for p in board.places], strict=True)
            points = sorted((n for n in named if np.isfinite(n[:2]).all()), reverse=True)
            ax.set(xscale="log", title=one, ylabel="macro F1")
            for k, (quality, seconds, title) in enumerate(points):
                at = 1 - (k + 0.5) / len(points)
                ax.annotate(
                    title,
                    (seconds, quality),
                    (1.06, at),
                    textcoords="axes fraction",
                    fontsize=6,
                    va="center",
                    arrowprops=line,
                )
            ax.plot([s for _, s, _ in points], [q for q, _, _ in points], "o", color=COLOURS[1], markersize=4)
            ax.margins(0.06, 0.08)
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.set_minor_formatter(NullFormatter())
        figure.axes[-1].set_xlabel("seconds per run")
        figure.savefig(path, metadata={"Date": None})
