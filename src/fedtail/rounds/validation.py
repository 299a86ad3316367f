"""Validating candidate models on one set of samples: each candidate goes over all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.core.metrics import class_counts, confusion_matrix
from fedtail.data.federation import Samples, Transform
from fedtail.models.flat import FlatModel
from fedtail.rounds.local import EVAL_BATCH


def count_candidates(
    model: FlatModel, candidates: Candidates, inputs: Sequence[Tensor], labels: np.ndarray, n_classes: int
) -> np.ndarray:
    """(N, 3, C) correct, true and predicted samples per class of every candidate.

    inputs: model input in batches; labels: (M,) of all of them. Only counts leave this function, and counts
    add up: pooling the samples of several clients gives what summing over the clients gives.
    """
    counts = np.zeros((len(candidates), 3, n_classes), dtype=np.int64)
    if not len(labels):
        return counts
    model.module.eval()
    with torch.no_grad():
        for s, vector in candidates.walk():
            model.load(vector)
            guess = torch.cat([model.module(part).argmax(-1) for part in inputs]).cpu().numpy()
            counts[s] = class_counts(confusion_matrix(labels, guess, n_classes))
    return counts


def model_inputs(x: Tensor, transform: Transform, device: torch.device) -> list[Tensor]:
    """Stored samples as model input, in batches on the device."""
    return [transform(part.to(device)) for part in x.split(EVAL_BATCH)]


def holdout_validator(
    model: FlatModel, samples: Samples, transform: Transform, n_classes: int
) -> Callable[[Candidates], np.ndarray]:
    """The server's own validation on a hold-out set it owns: candidates never leave the server."""

    def validate(candidates: Candidates) -> np.ndarray:
        inputs = model_inputs(samples.x, transform, model.vector.device)
        return count_candidates(model, candidates, inputs, samples.y.numpy(), n_classes)

    return validate
