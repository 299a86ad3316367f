"""Models on samples without training: logits, confusion matrices, and what is told of candidates and local runs.

Passes here are plain, for the reference path, sites and servers; the fast simulator paths have passes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.core.decisions import Decision
from fedtail.core.evidence import class_counts, confusion_matrix
from fedtail.core.metrics import score_of
from fedtail.core.records import DIVERGED, Task
from fedtail.core.scores import Scores
from fedtail.data.federation import Client, Federation, Samples, Transform
from fedtail.models.flat import FlatModel

EVAL_BATCH = 1024

Batches = Iterable[tuple[Tensor, Tensor]]
"""Model input and labels, batch by batch."""
Logits = Iterable[tuple[Tensor, Tensor]]
"""(B, C) logits and (B,) labels, batch by batch."""


@dataclass(frozen=True)
class Split:
    """Samples that models are evaluated on: a whole set, or some rows of it. Nothing is augmented."""

    samples: Samples
    transform: Transform
    n_classes: int
    rows: np.ndarray | None = None

    @classmethod
    def of(cls, owner: Client | Federation, rows: np.ndarray) -> Split:
        """Some rows of the pool that a client or a federation has."""
        return cls(owner.pool, owner.transform, owner.n_classes, rows)

    def __len__(self) -> int:
        return len(self.samples) if self.rows is None else len(self.rows)

    @property
    def labels(self) -> np.ndarray:
        y = self.samples.y.numpy()
        return y if self.rows is None else y[self.rows]

    def batches(self, size: int = EVAL_BATCH, device: torch.device | str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
        """Model input and labels, ``size`` samples at a time."""
        for part in self.parts(size):
            yield self.batch(part, device)

    def parts(self, size: int = EVAL_BATCH) -> list[slice]:
        """The slices that ``batches`` go through; batches can be had one by one, in any order."""
        return [slice(i, min(i + size, len(self))) for i in range(0, len(self), size)]

    def share(self, i: int, n: int) -> Split:
        """Every n-th of the batches, from the i-th on, as a split that has the very same ones."""
        rows = np.arange(len(self)) if self.rows is None else self.rows
        return replace(self, rows=np.concatenate([rows[:0], *(rows[part] for part in self.parts()[i::n])]))

    def batch(self, part: slice, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        x, y = self.samples.x, self.samples.y
        if self.rows is None:
            here, labels = x[part], y[part]
        else:
            index = torch.as_tensor(self.rows[part])
            here, labels = x.index_select(0, index), y.index_select(0, index)
        return self.transform(here.to(device)), labels.to(device)


def federation_split(federation: Federation, name: str) -> Split:
    """``test`` or ``validation`` of a whole federation."""
    if name == "validation":
        return Split.of(federation, federation.validation_rows)
    return Split(federation.test, federation.transform, federation.n_classes)


def client_splits(federation: Federation, name: str) -> Iterator[tuple[int, Split]]:
    """The private split of each client (of a panel, where there are very many), or its own test set; test samples that
    are nobody's own are those of client -1."""
    if name == "test":
        for k, rows in federation.own_tests().items():
            yield k, Split(federation.test, federation.transform, federation.n_classes, rows)
        return
    for k in federation.panel:
        yield k, Split.of(federation, federation.validation[k])


def client_confusions(federation: Federation, guess: np.ndarray) -> dict[int, np.ndarray]:
    """client -> (C, C) confusion matrix on its private split, from the answers to ``federation.validation_rows``."""
    c, panel = federation.n_classes, federation.panel
    owner = np.repeat(np.arange(len(panel)), [len(federation.validation[k]) for k in panel])
    cells = (owner * c + federation.pool.y.numpy()[federation.validation_rows]) * c + guess
    return dict(zip(panel, np.bincount(cells, minlength=len(panel) * c * c).reshape(-1, c, c), strict=True))


@torch.no_grad()
def model_logits(model: FlatModel, x: Tensor, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """(B, C) logits of the model ``x``, and labels, batch by batch."""
    model.load(x)
    model.module.eval()
    for inputs, y in batches:
        yield model.module(inputs), y


def confusion_on(model: FlatModel, split: Split) -> Callable[[Tensor], np.ndarray]:
    """x -> (C, C) confusion matrix of the model ``x``. The split is read once, however many models follow."""
    batches, labels = list(split.batches(device=model.vector.device)), split.labels

    def confusion(x: Tensor) -> np.ndarray:
        guesses = [z.argmax(-1) for z, _ in model_logits(model, x, batches)]
        guess = torch.cat(guesses).cpu().numpy() if guesses else labels[:0]
        return confusion_matrix(labels, guess, split.n_classes)

    return confusion


def scores_on(logits: Logits, n_classes: int, decision: Decision | None = None, *, tempered: bool = True) -> Scores:
    """Counts of a model's probabilities and answers, from its (B, C) logits and labels batch by batch."""
    return (decision or Decision()).scores(*probabilities_of(logits, n_classes), tempered=tempered)


def probabilities_of(logits: Logits, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """(N, C) probabilities and (N,) labels."""
    parts = [(torch.softmax(z.double(), -1).nan_to_num(0.0).cpu().numpy(), y.cpu().numpy()) for z, y in logits]
    if not parts:
        return np.empty((0, n_classes)), np.empty(0, dtype=np.int64)
    return np.concatenate([p for p, _ in parts]), np.concatenate([y for _, y in parts])


def score_candidates(model: FlatModel, candidates: Candidates, split: Split) -> Iterator[tuple[int, Scores]]:
    """(s, counts of the probabilities of candidate s), one after another: those of all at once would be large."""
    batches = list(split.batches(device=model.vector.device))
    for s, vector in candidates.walk():
        yield s, scores_on(model_logits(model, vector, batches), split.n_classes, tempered=False)


def count_candidates(model: FlatModel, candidates: Candidates, split: Split) -> np.ndarray:
    """(N, 3, C) correct, true and predicted samples per class of every candidate; sums over clients are exact."""
    confusion = confusion_on(model, split)
    counts = np.zeros((len(candidates), 3, split.n_classes), dtype=np.int64)
    for s, vector in candidates.walk():
        counts[s] = class_counts(confusion(vector))
    return counts


def judged(logits: Logits, metric: str, n_classes: int, background: int | None = None) -> float:
    """What logits on a client's validation samples are worth by a metric, higher is better; NaN without samples: a
    client that cannot compare must not seem to have a tie."""
    scores = scores_on(logits, n_classes, tempered=False)
    return score_of(scores, metric, background) if scores.n else float("nan")


def run_reports(
    task: Task,
    client: Client,
    delta: Tensor,
    metric: str,
    mean_losses: Callable[[Tensor], Sequence[float] | np.ndarray],
    held: Callable[[Tensor], Iterable[Logits]],
    failed: Sequence[int] = (),
) -> dict[str, np.ndarray]:
    """The (P,) scalars that ``task.reports`` asks of a client about its runs, delta: (P, n).

    mean_losses: models (m, n) -> (m,) mean loss on its training samples; held: models (m, n) -> logits of each on its
    validation samples, which are judged by ``metric``; failed: runs that diverged.
    """
    reports, x = {}, task.x.to(delta.device)
    if "local_gain" in task.reports:  # relative fall of the local loss, FAST's reward
        before, *after = mean_losses(torch.cat([x.unsqueeze(0), x + delta]))
        reports["local_gain"] = np.clip((before - np.array(after)) / max(before, 1e-12), 0.0, 1.0)
    if "local_validation" in task.reports:
        classes = client.n_classes, client.background
        reports["local_validation"] = np.array([judged(logits, metric, *classes) for logits in held(x + delta)])
    if DIVERGED in task.reports:
        reports[DIVERGED] = np.isin(np.arange(len(delta)), failed).astype(np.float64)
    return reports
