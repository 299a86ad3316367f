"""The loop over trees and levels: it asks for sums over sites, and tells rows where to go.

A question (``Level`` and those of ``bins``) is answered with integers, and what comes back is the sum over all sites.
The loop needs nothing else, so that a simulator, a server, or each site by itself can run it, and all of them come to
the same trees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedtail.boosting.bins import Count, Weigh, find_bins
from fedtail.boosting.histograms import Rows
from fedtail.boosting.predictor import Forest, Plan, Start
from fedtail.boosting.splits import Finder, Split
from fedtail.core.totals import Totals

LOSS_BITS, SQUARE_BITS, LEAST_PROBABILITY = 20, 8, 1e-9


@dataclass(frozen=True)
class Level:
    """The question of a level: the histograms of some of its nodes. First, rows take the splits of the level before."""

    start: Start
    tree: int
    """Which round's trees grow."""
    columns: tuple[int, ...]
    """The columns that they may ask for."""
    built: tuple[int, ...]
    """The nodes asked for."""
    trees: tuple[int, ...]
    """The tree of each."""
    split: tuple[tuple[int, np.ndarray] | float, ...] | None = None
    """What became of every node of the level before; None at the roots."""
    before: tuple[int, ...] = ()
    """The tree of each of those."""

    @property
    def size(self) -> int:
        return len(self.built) * int(self.start.bins.sizes[list(self.columns)].sum())

    def answer(self, train: Rows, held: Rows) -> np.ndarray:
        if self.split is None:
            train.begin()
            held.begin()
            train.differentiate(self.start.fields, self.start.weights, self.tree)
        else:
            train.move(self.split, self.before)
            held.move(self.split, self.before)
        return train.histograms(self.built, self.trees, self.columns, self.start.bins.sizes).ravel()


@dataclass(frozen=True)
class Check:
    """The question after a round: the weighted log loss of training rows and of held-out rows, the squares of the
    latter, and how held-out rows are answered.

    (3 + C * C,) integers, the last of them a confusion matrix, row by row.
    """

    start: Start

    @property
    def size(self) -> int:
        return 3 + len(self.start.counts) ** 2

    def answer(self, train: Rows, held: Rows) -> np.ndarray:
        weights, losses = self.start.weights, []
        for rows in (train, held):
            p = rows.probabilities()
            own = np.maximum(p[rows.y, np.arange(len(rows))], LEAST_PROBABILITY)
            loss = -np.log(own) * weights[rows.y]
            losses.append(int(np.rint(np.ldexp(loss, LOSS_BITS)).sum()))
        losses.append(int(np.rint(np.ldexp(loss**2, SQUARE_BITS)).sum()))
        answers = (p / weights[:, None]).argmax(0)
        return np.array([*losses, *np.bincount(held.y * len(weights) + answers, minlength=len(weights) ** 2)])


@dataclass
class _Node:
    tree: int
    place: int
    """Its number in its tree."""
    total: int
    """Its packed sum."""
    sums: np.ndarray | None = None
    """(T,) its histogram, where it may be split."""
    split: Split | None = None


Question = Count | Weigh | Level | Check
Ask = Callable[[Question], np.ndarray]
"""A question -> the sum of all sites' answers. One of size 0 is not sent: by it, rows only move."""


def boost(
    plan: Plan, ask: Ask, forest: Forest | None = None, on_round: Callable[[Forest], bool | None] | None = None
) -> Forest:
    """Grow a forest, or go on with one, until its last round or until held-out rows find nothing better.

    ``on_round`` is called after each round; if it returns True, that was the last.
    """
    if forest is None:  # bins, and what rows weigh
        start = Start.of(plan, *find_bins(plan.columns, plan.n_classes, plan.method.bins, ask))
        forest = Forest.begin(start, plan)
    while not ended(plan, forest):
        grow(plan, forest, ask)
        forest.checks.append(ask(Check(forest.start)))
        if on_round is not None and on_round(forest):
            break
    return forest


def ended(plan: Plan, forest: Forest) -> bool:
    """Whether all rounds are done, or held-out rows have found nothing better for as many as the plan is patient."""
    done = forest.rounds
    return done >= plan.rounds or (plan.patience > 0 and done - lowest_round(forest) >= plan.patience)


def lowest_round(forest: Forest) -> int:
    """The number of rounds with the least loss on held-out rows; all of them where there are none."""
    losses = [int(check[1]) for check in forest.checks]
    return 1 + int(np.argmin(losses)) if any(losses) else forest.rounds


def best_round(forest: Forest) -> int:
    """The number of rounds to keep: the most whose loss on held-out rows is within half a standard error of the least.

    What few rows cannot tell apart is decided by training for longer.
    """
    if not any(int(check[1]) for check in forest.checks):
        return forest.rounds
    checks = np.array([check[1:3] for check in forest.checks], dtype=np.float64)
    n = float(forest.checks[0][3:].sum())
    mean, square = np.ldexp(checks[:, 0], -LOSS_BITS) / n, np.ldexp(checks[:, 1], -SQUARE_BITS) / n
    least = int(mean.argmin())
    error = np.sqrt(max(square[least] - mean[least] ** 2, 0.0) / n)
    return 1 + int(np.flatnonzero(mean <= mean[least] + 0.5 * error)[-1])


def grow(plan: Plan, forest: Forest, ask: Ask) -> None:
    """Add the trees of the next round."""
    start, t, method = forest.start, forest.rounds, plan.method
    seen, counts, most = plan.seen(t), [1] * plan.trees, 2 * method.leaves - 1  # nodes so far, and at most
    finder = Finder(start.bins, start.fields, method.least_rows, seen)
    bins, roots = finder.bins, tuple(range(plan.trees))
    forest.add_round()
    sums = ask(Level(start, t, seen, roots, roots)).reshape(-1, bins.total)
    nodes = [_Node(k, 0, int(row[: bins.sizes[0]].sum()), row) for k, row in enumerate(sums)]
    for depth in range(method.depth):
        open_ = [n for n in nodes if n.sums is not None]
        for node, found in zip(open_, finder.best(np.array([n.sums for n in open_])), strict=True):
            node.split = found
        _limit(nodes, counts, most)
        parents = [n for n in nodes if n.split is not None]
        split, children = _children(nodes, counts, forest, finder, t, method.lr)
        built: list[tuple[int, np.ndarray]] = []
        for j, parent in enumerate(parents if depth < method.depth - 1 else []):
            pair = children[2 * j : 2 * j + 2]
            rows = [start.fields.rows(n.total) for n in pair]
            if counts[parent.tree] < most and max(rows) >= 2 * method.least_rows:
                assert parent.sums is not None
                built.append((2 * j + int(rows[1] < rows[0]), parent.sums))  # that of fewer rows; the other is the rest
        asked = tuple(i for i, _ in built)
        before, nodes = tuple(n.tree for n in nodes), children
        sums = ask(Level(start, t, seen, asked, tuple(children[i].tree for i in asked), split, before))
        if not built:
            break
        for (i, whole), own in zip(built, sums.reshape(-1, bins.total), strict=True):
            children[i].sums, children[i ^ 1].sums = own, whole - own
    if nodes:
        ends = _children(nodes, counts, forest, finder, t, method.lr)[0]
        ask(Level(start, t, seen, (), (), ends, tuple(n.tree for n in nodes)))


def _limit(nodes: Sequence[_Node], counts: Sequence[int], most: int) -> None:
    """Of more splits than a tree may have, those that gain most: each adds two nodes."""
    for k, count in enumerate(counts):
        wanted = [n for n in nodes if n.tree == k and n.split is not None]
        wanted.sort(key=lambda n: -n.split.gain if n.split else 0.0)
        for node in wanted[(most - count) // 2 :]:
            node.split = None


def _children(
    nodes: Sequence[_Node], counts: list[int], forest: Forest, finder: Finder, t: int, lr: float
) -> tuple[tuple[tuple[int, np.ndarray] | float, ...], list[_Node]]:
    """What becomes of every node, written into the forest, and the nodes of the next level."""
    out: list[tuple[int, np.ndarray] | float] = []
    children: list[_Node] = []
    for node in nodes:
        at = t, node.tree, node.place
        if node.split is None:
            forest.value[at] = lr * finder.value(node.total)
            out.append(float(forest.value[at]))
            continue
        first, forest.column[at], forest.gain[at] = counts[node.tree], node.split.column, node.split.gain
        forest.left[at], forest.child[at] = np.packbits(node.split.left, bitorder="little"), first
        out.append((node.split.column, node.split.left))
        children += [_Node(node.tree, first + i, int(s)) for i, s in enumerate(node.split.sums)]
        counts[node.tree] += 2
    return tuple(out), children


class Site:
    """The rows of a site, or of all sites together, and its answers."""

    def __init__(
        self, train: tuple[np.ndarray, np.ndarray], held: tuple[np.ndarray, np.ndarray], forest: Forest | None = None
    ) -> None:
        """train, held: the values of ``read_columns``, (F, N), and the classes, (N,). ``forest``: one to go on with."""
        self._given, self._forest = (train, held), forest
        self.rows: tuple[Rows, Rows] | None = None
        """Training and held-out rows in bins, from the first tree on."""

    def answer(self, question: Question) -> np.ndarray:
        """Return this site's integers."""
        if isinstance(question, Count | Weigh):
            return question.answer(*self._given[0])
        if self.rows is None:
            start = question.start
            train, held = (Rows(start.bins.of(x), y, start.scores) for x, y in self._given)
            if self._forest is not None:
                train.scores, held.scores = self._forest.scores(train.bins), self._forest.scores(held.bins)
            self.rows = (train, held)
        return question.answer(*self.rows)


def asking(totals: Totals, sites: Mapping[int, Site]) -> Ask:
    """Questions to sites that add up their answers; ``sites``: those that are here, by client."""

    def ask(question: Question) -> np.ndarray:
        if question.size:
            return totals.total(question.size, lambda k: sites[k].answer(question))
        for site in sites.values():
            site.answer(question)
        return np.zeros(0, dtype=np.int64)

    return ask
