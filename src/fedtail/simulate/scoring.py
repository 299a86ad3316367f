"""What probabilities are worth, client by client: the same on every path of the simulator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.core.decisions import Decisions
from fedtail.core.scores import Scores
from fedtail.data.federation import Federation
from fedtail.rounds.evaluation import Logits, Split, client_confusions, client_splits, federation_split, scores_on


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

    def validate_scores(self, candidates: Candidates, clients: Sequence[int]) -> Iterator[tuple[int, Scores]]:
        split = Split.of(self.federation, np.concatenate([self.federation.validation[k] for k in clients]))
        for s, vector in candidates.walk():
            yield s, scores_on(self._logits(vector, split), split.n_classes, tempered=False)
