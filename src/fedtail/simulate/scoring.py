"""What probabilities are worth, client by client: the same on every path of the simulator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

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


class Scoring:
    """Evaluation by probabilities, from the logits that a path computes."""

    tells_scores = True
    federation: Federation

    @abstractmethod
    def _logits(self, x: Tensor, split: Split) -> Logits:
        """Of the model ``x`` on a split, and the labels."""

    def confusions(self, x: Tensor) -> dict[int, np.ndarray]:
        parts = [z.argmax(-1) for z, _ in self._logits(x, federation_split(self.federation, "validation"))]
        guess = torch.cat(parts).cpu().numpy() if parts else np.empty(0, dtype=np.int64)
        return client_confusions(self.federation, guess)

    def scores(self, x: Tensor, split: str, decisions: Decisions | None = None) -> Iterator[tuple[int, Scores]]:
        for k, part in client_splits(self.federation, split):
            rule = None if decisions is None else decisions.at(k)
            yield k, scores_on(self._logits(x, part), part.n_classes, rule)

    def site_decisions(self, x: Tensor, goal: SiteGoal) -> dict[int, Decision]:
        out = {}
        for k, split in client_splits(self.federation, "validation"):
            p, y = probabilities_of(self._logits(x, split), split.n_classes)
            out[k] = goal.decide(p, y, self.federation.client(k).counts)
        return out

    def validate_scores(self, candidates: Candidates, clients: Sequence[int]) -> Iterator[tuple[int, Scores]]:
        split = Split.of(self.federation, np.concatenate([self.federation.validation[k] for k in clients]))
        for s, vector in candidates.walk():
            yield s, scores_on(self._logits(vector, split), split.n_classes, tempered=False)
