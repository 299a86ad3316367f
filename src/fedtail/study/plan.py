"""What a federation can be expected to give, before anyone federates: from class counts and from simulated trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedtail.boosting.model import TreesModule, with_site
from fedtail.core.decisions import Decision
from fedtail.core.metrics import summarize
from fedtail.core.promise import most_promised, samples_needed
from fedtail.core.random import generator
from fedtail.data.federation import Federation
from fedtail.runs.build import build
from fedtail.runs.execution import play
from fedtail.settings import Settings
from fedtail.words import percent, plural, signed

Z = 2.8
"""Standard errors that a difference must have to be seen in four cases of five at the 5 % level."""
MOST_SITES = 12
"""Most sites of which each is tried alone and left out: of more, the largest."""


@dataclass(frozen=True)
class ClassPlan:
    """What the cases of one class suffice for."""

    name: str
    cases: int
    """In training and validation together."""
    held: int
    """How many of these are in the private validation splits, by which thresholds are found."""
    sites: int
    """Sites that have the class."""
    promised: float
    """The highest recall that can be promised of it."""
    needed: int
    """Validation cases that the wanted recall takes."""
    detectable: float
    """The smallest difference in recall between two methods that its test cases would show."""


@dataclass(frozen=True)
class SitePlan:
    """What one site would gain, as macro F1 on its own rows."""

    name: str
    rows: int
    alone: float
    together: float
    without: float
    """Mean over the other sites, of a federation without this site, minus that with it."""


@dataclass(frozen=True)
class Plan:
    """What a federation would need, promise and gain."""

    recall: float
    confidence: float
    classes: tuple[ClassPlan, ...]
    """The rarest first."""
    sites: tuple[SitePlan, ...] = ()
    half: float | None = None
    """Macro F1 on all sites' own rows with half of every site's rows."""
    full: float | None = None
    """Macro F1 on them with all rows."""
    notes: tuple[str, ...] = field(default=())

    def markdown(self) -> str:
        """Write the plan as one page."""
        head = f"promise: recall {percent(self.recall)} with {percent(self.confidence)} confidence"
        lines = ["# Plan of a federation", "", *self.sentences(), "", f"## Classes ({head})", ""]
        lines += ["| class | cases | for thresholds | at sites | can be promised | needs | visible difference |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [
            f"| {c.name} | {c.cases:,} | {c.held:,} | {c.sites} | {percent(c.promised)} | {c.needed} "
            f"| {c.detectable:.3f} |"
            for c in self.classes
        ]
        if self.sites:
            lines += ["", "## Sites (macro F1 on each site's own rows)", ""]
            lines += ["| site | rows | alone | together | gain | others without it |", "|---|---|---|---|---|---|"]
            lines += [
                f"| {s.name} | {s.rows:,} | {s.alone:.3f} | {s.together:.3f} | {signed(s.together - s.alone)} "
                f"| {signed(s.without)} |"
                for s in self.sites
            ]
        return "\n".join(lines) + "\n"

    def _repr_markdown_(self) -> str:
        return self.markdown()

    def sentences(self) -> list[str]:
        """Say what matters in a few lines."""
        short = [c for c in self.classes if c.held < c.needed]
        out = [
            f"A recall of {percent(self.recall)} can be promised of every class."
            if not short
            else "No such promise for: "
            + ", ".join(f"{c.name} ({c.held} of {c.needed} cases, at most {percent(c.promised)})" for c in short)
            + "."
        ]
        if self.sites:
            gains = np.array([s.together - s.alone for s in self.sites])
            out.append(
                f"{plural(int((gains > 0).sum()), 'site')} of {len(gains)} would be better off together than alone, "
                f"by {signed(float(gains.mean()))} on average; least: "
                f"{self.sites[int(gains.argmin())].name} ({signed(float(gains.min()))})."
            )
        if self.half is not None and self.full is not None:
            out.append(
                f"From half of the rows to all of them macro F1 goes from {self.half:.3f} to {self.full:.3f}; "
                f"as many rows again would be worth at most about {signed(max(self.full - self.half, 0.0))}."
            )
        return [*out, *self.notes]


def plan_counts(federation: Federation, recall: float, confidence: float) -> tuple[ClassPlan, ...]:
    """Compute what class counts alone tell; the rarest class first."""
    held = np.sum([np.bincount(federation.pool.y[v], minlength=federation.n_classes) for v in federation.validation], 0)
    by_site = federation.label_map()
    trained, tested = by_site.sum(0), federation.test.counts(federation.n_classes)
    out = []
    for c in np.argsort(trained, kind="stable").tolist():
        n = int(held[c])
        out.append(
            ClassPlan(
                name=federation.classes[c],
                cases=int(trained[c]) + n,
                held=n,
                sites=int((by_site[:, c] > 0).sum()),
                promised=most_promised(n, confidence),
                needed=samples_needed(recall, confidence),
                detectable=min(1.0, Z * float(np.sqrt(2 * 0.25 / max(int(tested[c]), 1)))),
            )
        )
    return tuple(out)


def plan(
    federation: Federation,
    settings: Settings | None = None,
    recall: float = 0.95,
    confidence: float = 0.9,
    *,
    trials: bool = True,
) -> Plan:
    """Plan a federation; with ``trials`` also train it in the simulator: together, each site alone, without each."""
    settings = settings or Settings()
    classes = plan_counts(federation, recall, confidence)
    if not trials or federation.n_clients < 2:
        return Plan(recall, confidence, classes)
    owners = owner_of(federation)
    tried = sorted(np.argsort(-federation.sizes, kind="stable")[:MOST_SITES].tolist())
    every = range(federation.n_clients)
    together = own_scores(federation, settings, every, owners)
    sites = []
    for k in tried:
        others = [j for j in every if j != k]
        without = own_scores(federation, settings, others, owners)
        sites.append(
            SitePlan(
                name=federation.sites[k],
                rows=int(federation.sizes[k]),
                alone=own_scores(federation, settings, [k], owners)[k],
                together=together[k],
                without=float(np.nanmean([without[j] - together[j] for j in others])),
            )
        )
    halved = own_scores(halve(federation, settings.run.seed), settings, every, owners)
    notes = () if len(tried) == len(every) else (f"Tried: the {MOST_SITES} largest of {len(every)} sites.",)
    half, full = (float(np.nanmean(list(scores.values()))) for scores in (halved, together))
    return Plan(recall, confidence, classes, tuple(sites), half, full, notes)


def owner_of(federation: Federation) -> np.ndarray:
    """(N,) the client that each test row belongs to; dealt out by chance where the test set is nobody's own."""
    if federation.test_clients.size:
        return federation.test_clients
    return generator(0, "plan").integers(federation.n_clients, size=len(federation.test))


def own_scores(
    federation: Federation, settings: Settings, members: Sequence[int], owners: np.ndarray
) -> dict[int, float]:
    """Train some of the sites together and return each site's macro F1 on its own test rows; NaN without any."""
    model = play(build(settings, subset(federation, members))).model()
    x, y = federation.test.x, federation.test.y.numpy()
    if isinstance(model.module, TreesModule) and federation.test_clients.size:  # which may ask for a row's site
        number = np.full(federation.n_clients + 1, -1)  # the last of which is that of rows of no site
        number[list(members)] = np.arange(len(members))
        x = with_site(x, model.module.shape.columns, number[owners])
    p = replace(model, decision=Decision()).probabilities(x)
    own = [model.sites.get(name, model.decision) for name in federation.sites]
    scores = (decision.scores(p[owners == k], y[owners == k]) for k, decision in enumerate(own))
    return {k: float(summarize(one.confusion)["macro_f1"]) if one.n else np.nan for k, one in enumerate(scores)}


def subset(federation: Federation, members: Sequence[int]) -> Federation:
    """Some sites of a federation; the test rows stay."""
    return replace(
        federation,
        train=tuple(federation.train[k] for k in members),
        validation=tuple(federation.validation[k] for k in members),
        sites=tuple(federation.sites[k] for k in members),
        clusters=tuple(federation.clusters[k] for k in members) if federation.clusters else (),
        test_clients=np.empty(0, dtype=np.int64),
    )


def halve(federation: Federation, seed: int) -> Federation:
    """Half of every site's training rows, drawn class by class; at least one row of each class stays."""
    y, kept = federation.pool.y.numpy(), []
    for k, rows in enumerate(federation.train):
        shuffled = generator(seed, "plan", client=k).permutation(rows)
        order = shuffled[np.argsort(y[shuffled], kind="stable")]
        first = np.concatenate([[0], np.flatnonzero(np.diff(y[order])) + 1])
        place = np.arange(len(order)) - np.repeat(first, np.diff([*first, len(order)]))
        kept.append(np.sort(order[place % 2 == 0]))
    return replace(federation, train=tuple(kept))
