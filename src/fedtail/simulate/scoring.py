"""What probabilities are worth, client by client: the same on every path of the simulator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.core.decisions import Decision, Decisions, SiteGoal
from fedtail.core.scores import Scores
from fedtail.data.federation import Federation
from fedtail.rounds.evaluation import (
    Logits,
    Split,
    client_confusions,
    client_splits,
    federation_split,
    probabilities_of,
    scores_on,
)

T = TypeVar("T")
P = TypeVar("P")


class Scoring:
    """Evaluation by probabilities, from the logits that a path computes."""

    tells_scores = True
    federation: Federation

    @abstractmethod
    def _logits(self, x: Tensor, split: Split) -> Logits:
        """Return the logits of the model ``x`` on a split, and the labels."""

    def confusions(self, x: Tensor) -> dict[int, np.ndarray]:
        parts = [z.argmax(-1) for z, _ in self._logits(x, federation_split(self.federation, "validation"))]
        guess = torch.cat(parts).cpu().numpy() if parts else np.empty(0, dtype=np.int64)
        return client_confusions(self.federation, guess)

    def _each(self, work: Callable[[P], T], pieces: Sequence[P], samples: int) -> list[T]:
        """``work`` of every piece, of so many samples in all, in order; a path may spread it over its workers."""
        return [work(piece) for piece in pieces]

    def scores(self, x: Tensor, split: str, decisions: Decisions | None = None) -> Iterator[tuple[int, Scores]]:
        def one(owned: tuple[int, Split]) -> tuple[int, Scores]:
            k, part = owned
            rule = None if decisions is None else decisions.at(k)
            return k, scores_on(self._logits(x, part), part.n_classes, rule)

        yield from self._clients(one, split)

    def site_decisions(self, x: Tensor, goal: SiteGoal) -> dict[int, Decision]:
        def one(owned: tuple[int, Split]) -> tuple[int, Decision]:
            k, part = owned
            p, y = probabilities_of(self._logits(x, part), part.n_classes)
            return k, goal.decide(p, y, self.federation.client(k).counts)

        return dict(self._clients(one, "validation"))

    def _clients(self, work: Callable[[tuple[int, Split]], T], split: str) -> list[T]:
        owned = list(client_splits(self.federation, split))
        return self._each(work, owned, sum(len(part) for _, part in owned))

    def validate_scores(self, candidates: Candidates, clients: Sequence[int]) -> Iterator[tuple[int, Scores]]:
        split = Split.of(self.federation, np.concatenate([self.federation.validation[k] for k in clients]))
        for s, vector in candidates.walk():
            yield s, scores_on(self._logits(vector, split), split.n_classes, tempered=False)
