"""CCVR (Luo et al., 2021): the classifier is calibrated on virtual features after the last round.

Training is FedAvg's. Then every client sends, for each of its classes, how many samples it has and the mean and
covariance of their features (the inputs of the output layer) under the final model. The server merges them exactly,
draws ``virtual`` features per class from N(mean_c, covariance_c), the same number for every class, and trains the
output layer on them. The features stay as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.core.random import torch_seed
from fedtail.core.records import Tensors
from fedtail.errors import check_range
from fedtail.methods.base import Method, Server
from fedtail_experiments.methods.measurements import CLASS_MOMENTS, Moments, merged_moments
from fedtail_experiments.methods.retraining import fit_linear


@dataclass(frozen=True)
class CCVR(Method):
    """``steps = 0`` is FedAvg."""

    title = "CCVR"
    paper = (
        "Luo et al., No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data, "
        "NeurIPS 2021"
    )
    wire = (
        "after the last round, from every client and for each class: its samples (a label histogram), and the mean and "
        "covariance of their features"
    )

    virtual: int = 500
    """Virtual features per class."""
    steps: int = 300
    """Passes over them."""
    step_lr: float = 0.1
    """Learning rate of these passes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.virtual", self.virtual, 1)
        check_range("method.steps", self.steps, 0)
        check_range("method.step_lr", self.step_lr, 0.0, open_low=True)

    @property
    def reveals_classes(self) -> bool:
        return True

    def conclude(self, server: Server, state: Tensors) -> Tensor:
        if not self.steps:
            return server.x
        weight, bias = (t.detach().double().cpu() for t in server.classifier(server.x))
        sent = server.measure(CLASS_MOMENTS, server.x)
        moments = merged_moments([Moments.unpacked(sent[k].double().cpu()) for k in sorted(sent)])
        rng = torch.Generator().manual_seed(torch_seed(server.seed, "ccvr"))
        features, labels = virtual_features(moments, self.virtual, rng)
        return server.with_classifier(
            server.x, *fit_linear(weight, bias, features, labels, steps=self.steps, lr=self.step_lr)
        )


def virtual_features(moments: Moments, per_class: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """(m, d) draws from the Gaussian of each class that anybody has, and (m,) their labels."""
    features, labels = [], []
    for c in torch.nonzero(moments.counts > 0).flatten().tolist():
        values, vectors = torch.linalg.eigh(moments.covariances[c])
        root = vectors * values.clamp_min(0.0).sqrt()
        drawn = torch.randn(per_class, len(values), generator=rng, dtype=torch.float64)
        features.append(moments.means[c] + drawn @ root.T)
        labels.append(torch.full((per_class,), c))
    return torch.cat(features), torch.cat(labels)
