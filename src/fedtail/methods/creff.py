"""CReFF (Shang et al., 2022): the classifier is re-trained on federated features, learnt from gradients.

Training is FedAvg's. Beside it the server keeps ``features`` vectors per class and a re-trained output layer. Each
round every client sends, for each of its classes, the mean gradient of cross-entropy with respect to the output layer,
under the round's global model with the re-trained layer in it. The server

1. averages these over the clients that have the class,
2. moves each class's features so that their own gradient points the same way: ``match_steps`` steps on the sum over
rows
   of 1 - cos,
3. trains the output layer on them from its start, ``steps`` passes.

What is judged and kept is the global model with the re-trained layer; training goes on from the averaged one. The
authors estimate a class's gradient from ten random batches of 32 under heavy augmentation and re-train by mini-batches;
here the gradient is over all of the class's samples and a pass takes all features, so that nothing is drawn in either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.core.random import torch_seed
from fedtail.core.records import Tensors, Update
from fedtail.core.retraining import fit_linear
from fedtail.errors import check_range
from fedtail.methods.base import Method, Server
from fedtail.methods.registry import METHODS


@METHODS.add("creff")
@dataclass(frozen=True)
class CReFF(Method):
    """``steps = 0`` is FedAvg."""

    title = "CReFF"
    paper = (
        "Shang et al., Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with "
        "Federated Features, IJCAI 2022"
    )
    wire = (
        "every round, from every client and for each class it has: the mean gradient of the output layer (which shows "
        "which classes it has)"
    )

    features: int = 100
    """Federated features per class."""
    match_steps: int = 100
    match_lr: float = 0.1
    """Learning rate of the features."""
    steps: int = 300
    """Passes that re-train the classifier."""
    step_lr: float = 0.1
    """Learning rate of these passes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.features", self.features, 1)
        check_range("method.match_steps", self.match_steps, 0)
        check_range("method.match_lr", self.match_lr, 0.0, open_low=True)
        check_range("method.steps", self.steps, 0)
        check_range("method.step_lr", self.step_lr, 0.0, open_low=True)

    @property
    def reveals_classes(self) -> bool:
        return True

    def before_round(self, server: Server, state: Tensors) -> Tensors:
        """Ask for gradients under the model of this round, and learn from them."""
        if not self.steps:
            return state
        weight, bias = (t.detach().double().cpu() for t in server.classifier(server.x))
        if not state:
            rng = torch.Generator().manual_seed(torch_seed(server.seed, "creff"))
            shape = (server.n_classes, self.features, weight.shape[1])
            state = {"features": torch.randn(shape, generator=rng), "weight": weight.float(), "bias": bias.float()}
        judged = server.with_classifier(server.x, state["weight"], state["bias"])
        sent = server.measure("class_gradients", judged)
        goal = mean_gradients([sent[k].double().cpu() for k in sorted(sent)])
        layer = state["weight"].double(), state["bias"].double()
        features = match_gradients(state["features"].double(), goal, *layer, self.match_steps, self.match_lr)
        return {**state, "features": features.float()}

    def after_round(self, server: Server, updates: Sequence[Update], choice: Sequence[int], state: Tensors) -> Tensors:
        if not state:
            return state
        n_classes, per_class, d = state["features"].shape
        labels = torch.arange(n_classes).repeat_interleave(per_class)
        start = torch.zeros(n_classes, d, dtype=torch.float64), torch.zeros(n_classes, dtype=torch.float64)
        flat = state["features"].double().reshape(-1, d)
        weight, bias = fit_linear(*start, flat, labels, steps=self.steps, lr=self.step_lr)
        return {**state, "weight": weight.float(), "bias": bias.float()}

    def serve(self, server: Server, state: Tensors) -> Tensor:
        return server.with_classifier(server.x, state["weight"], state["bias"]) if state else server.x


def mean_gradients(sent: Sequence[Tensor]) -> Tensor:
    """(C, C, d + 1) mean over the clients that have a class; NaN for a class that nobody has."""
    return torch.stack(list(sent)).nanmean(0)


def match_gradients(features: Tensor, goal: Tensor, weight: Tensor, bias: Tensor, steps: int, lr: float) -> Tensor:
    """(C, m, d) features moved so that each class's mean gradient of the output layer points as ``goal`` says."""
    known = torch.nonzero(~goal.flatten(1).isnan().any(1)).flatten()
    out = features.clone()
    with torch.enable_grad():
        f = features[known].clone().requires_grad_()
        for _ in range(steps):
            (grad,) = torch.autograd.grad(mismatch(f, known, goal[known], weight, bias), [f])
            f = (f - lr * grad).detach().requires_grad_()
    out[known] = f.detach()
    return out


def mismatch(f: Tensor, classes: Tensor, goal: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Sum over classes of 1 - cos between the gradients, row by row of the weight, and once for the bias. f: (c, m,
    d)."""
    pull = torch.softmax(f @ weight.T + bias, -1) - F.one_hot(classes, len(bias)).unsqueeze(1)
    of_weight, of_bias = pull.transpose(1, 2) @ f / f.shape[1], pull.mean(1)
    rows = 1 - F.cosine_similarity(of_weight, goal[..., :-1], dim=-1, eps=1e-12)
    return rows.sum() + (1 - F.cosine_similarity(of_bias, goal[..., -1], dim=-1, eps=1e-12)).sum()
