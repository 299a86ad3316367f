"""CReFF (Shang et al., 2022): the classifier is re-trained on federated features, learnt from gradients.

Training is FedAvg's. Beside it the server keeps ``features`` vectors per class and a re-trained output layer. Each
round every client sends, for each of its classes, the mean gradient of cross-entropy with respect to the output layer,
under the round's global model with the re-trained layer in it. The server

1. averages these over the clients that have the class,
2. moves each class's features so that their own gradient points the same way: ``match_steps`` steps on 1 - cos, row by
   row,
3. trains the output layer on them from zero, ``steps`` passes.

What is judged and kept is the global model with the re-trained layer; training goes on from the averaged one.

The authors draw the first features from N(0, 1), whatever the model's own are like. Where these are far from 0 and
close to each other, as those of most encoders, all classes' gradients point nearly the same way, and cosines are slow
to tell them apart. Yet a class's gradient at the weight over that at the bias is a mean of its features: here the first
ones are drawn around it, and steps go by the features' own length. The authors estimate a class's gradient from ten
random batches of 32 under heavy augmentation and re-train by mini-batches; here the gradient is over all of the class's
samples and a pass takes all features, so that nothing is drawn in either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.core.random import torch_seed
from fedtail.core.records import Tensors, Update
from fedtail.errors import FedtailError, check_range
from fedtail.methods.base import Method, Server
from fedtail_experiments.methods.measurements import CLASS_GRADIENTS
from fedtail_experiments.methods.retraining import fit_linear

FARTHEST = 1.0
"""What all features of a class may move together in a step, where their length is 1; with ``match_lr`` = 0.1 they move
about a tenth of it. Where a layer is sure of its answers, gradients have hardly any length and steps along their
direction no bound."""


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
    spread: float = 1.0
    """How far the first features lie from the mean of their class, against the distance of these from each other."""
    match_steps: int = 100
    match_lr: float = 0.1
    """Learning rate of the features, where their length is 1."""
    steps: int = 100
    """Passes that re-train the classifier; these move it as far as the authors' 300 epochs in batches of 32."""
    step_lr: float = 0.1
    """Learning rate of these passes."""
    decay: float = 0.3
    """Weight decay in them: with more dimensions than features, the layer learns their noise by heart otherwise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.features", self.features, 1)
        check_range("method.spread", self.spread, 0.0, open_low=True)
        check_range("method.match_steps", self.match_steps, 0)
        check_range("method.match_lr", self.match_lr, 0.0, open_low=True)
        check_range("method.steps", self.steps, 0)
        check_range("method.step_lr", self.step_lr, 0.0, open_low=True)
        check_range("method.decay", self.decay, 0.0)

    @property
    def reveals_classes(self) -> bool:
        return True

    def before_round(self, server: Server, state: Tensors) -> Tensors:
        """Ask for gradients under the model of this round, and learn from them."""
        if not self.steps:
            return state
        if not state:
            weight, bias = (t.detach().float().cpu() for t in server.classifier(server.x))
            nothing = torch.full((server.n_classes, self.features, weight.shape[1]), float("nan"))
            state = {"features": nothing, "weight": weight, "bias": bias}
        judged = server.with_classifier(server.x, state["weight"], state["bias"])
        sent = server.measure(CLASS_GRADIENTS, judged)
        goal = mean_gradients([sent[k].double().cpu() for k in sorted(sent)])
        rng = torch.Generator().manual_seed(torch_seed(server.seed, "creff"))
        noise = torch.randn(state["features"].shape, generator=rng)
        features = first_features(state["features"], goal, noise, self.spread)
        layer = state["weight"], state["bias"]
        length = told_length(goal, self.spread)
        moved = match_gradients(features, goal.float(), *layer, self.match_steps, self.match_lr, length)
        self._check_finite(moved[features.isfinite()])
        return {**state, "features": moved}

    def after_round(self, server: Server, updates: Sequence[Update], choice: Sequence[int], state: Tensors) -> Tensors:
        if not state:
            return state
        n_classes, per_class, d = state["features"].shape
        labels = torch.arange(n_classes).repeat_interleave(per_class)
        flat = state["features"].reshape(-1, d)
        known = ~flat.isnan().any(1)
        start = torch.zeros(n_classes, d), torch.zeros(n_classes)
        weight, bias = fit_linear(
            *start, flat[known], labels[known], steps=self.steps, lr=self.step_lr, decay=self.decay
        )
        self._check_finite(weight, bias)
        return {**state, "weight": weight, "bias": bias}

    def _check_finite(self, *values: Tensor) -> None:
        """Without decay, or at a large ``match_lr``, features may still leave what numbers can hold."""
        if not all(bool(value.isfinite().all()) for value in values):
            raise FedtailError(
                f"CReFF's features have grown out of bounds with method.match_lr = {self.match_lr:g} and "
                f"method.decay = {self.decay:g}; lower method.match_lr or raise method.decay"
            )

    def serve(self, server: Server, state: Tensors) -> Tensor:
        return server.with_classifier(server.x, state["weight"], state["bias"]) if state else server.x


def mean_gradients(sent: Sequence[Tensor]) -> Tensor:
    """(C, C, d + 1) mean over the clients that have a class; NaN for a class that nobody has."""
    return torch.stack(list(sent)).nanmean(0)


def told_means(goal: Tensor) -> Tensor:
    """(C, d) a mean of each class's features, which its gradient tells; NaN for a class that nobody has, and for one
    whose samples are all recognized beyond doubt: they have no gradient.

    For samples of class c, the gradients of row c of the weight and of its bias are the means of (p_c - 1) f and of
    p_c - 1: their ratio is the features' mean, samples weighing more the less they are recognized."""
    own = goal[torch.arange(len(goal)), torch.arange(len(goal))]
    return own[:, :-1] / torch.where(own[:, -1:] < -1e-12, own[:, -1:], torch.nan)


def told_length(goal: Tensor, spread: float) -> Tensor:
    """() root mean square length of features as ``first_features`` draws them; NaN where no class tells a mean."""
    means = told_means(goal)
    apart = (means - means.nanmean(0)).square().sum(-1)
    return (means.square().sum(-1) + spread**2 * apart).nanmean().sqrt()


def first_features(features: Tensor, goal: Tensor, noise: Tensor, spread: float) -> Tensor:
    """(C, m, d) features, with those of classes that had none drawn around the told mean. noise: (C, m, d)."""
    means = told_means(goal)
    new = features.isnan().flatten(1).any(1) & ~means.isnan().any(1)
    size = (means - means.nanmean(0)).square().nanmean().sqrt()
    return torch.where(new.view(-1, 1, 1), means.unsqueeze(1) + spread * size * noise, features).to(features)


def match_gradients(
    features: Tensor, goal: Tensor, weight: Tensor, bias: Tensor, steps: int, lr: float, length: Tensor
) -> Tensor:
    """(C, m, d) features moved so that each class's mean gradient of the output layer points as ``goal`` says: steps on
    ``mismatch`` over its C + 1 terms, in units of ``length``, which is that of the clients' features and not of these:
    steps that went by what they move would grow with it."""
    known = torch.nonzero(~(goal.flatten(1).isnan().any(1) | features.flatten(1).isnan().any(1))).flatten()
    out, f, goal = features.clone(), features[known], goal[known]
    if len(known) and bool(length.isfinite()):
        length = length.to(f)
        rate, most = lr * length.square() / (len(bias) + 1), FARTHEST * length / f.shape[1]
        narrow = 2 * (f.shape[1] + 2 * len(bias)) <= f.shape[2]  # else finding the span costs more than it saves
        out[known] = (descend_in_span if narrow else descend)(f, known, goal, weight, bias, steps, rate, most)
    return out


def descend(
    f: Tensor, classes: Tensor, goal: Tensor, weight: Tensor, bias: Tensor, steps: int, rate: Tensor, most: Tensor
) -> Tensor:
    """(c, m, d) features after ``steps`` steps of gradient descent on ``mismatch``, none of them longer than ``most``.
    weight: (C, d), or (c, C, d) where every class has coordinates of its own."""
    for _ in range(steps):
        step = rate * mismatch_gradient(f, classes, goal, weight, bias)
        f = f - step * (most / step.norm(dim=-1, keepdim=True).clamp_min(1e-12)).clamp_max(1.0)
    return f


def descend_in_span(
    f: Tensor, classes: Tensor, goal: Tensor, weight: Tensor, bias: Tensor, steps: int, rate: Tensor, most: Tensor
) -> Tensor:
    """``descend`` in m + 2 C coordinates. A step adds to a class's features multiples of these, of the rows of its goal
    and of those of the weight, so that they never leave the span of the three; in an orthonormal basis of it all
    products and lengths are the same."""
    m, n_classes = f.shape[1], len(bias)
    rows = torch.cat([f, goal[..., :-1], weight.expand(len(f), -1, -1)], 1)
    basis, coordinates = torch.linalg.qr(rows.mT)
    start, aim, layer = (part.contiguous() for part in coordinates.mT.split([m, n_classes, n_classes], 1))
    end = descend(start, classes, torch.cat([aim, goal[..., -1:]], -1), layer, bias, steps, rate, most)
    return f + (end - start) @ basis.mT  # what was not moved stays as it was, to the bit


def mismatch(f: Tensor, classes: Tensor, goal: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Sum over classes of 1 - cos between the gradients, row by row of the weight, and once for the bias. f: (c, m,
    d)."""
    pull = torch.softmax(f @ weight.T + bias, -1) - F.one_hot(classes, len(bias)).unsqueeze(1)
    of_weight, of_bias = pull.transpose(1, 2) @ f / f.shape[1], pull.mean(1)
    rows = 1 - F.cosine_similarity(of_weight, goal[..., :-1], dim=-1, eps=1e-12)
    return rows.sum() + (1 - F.cosine_similarity(of_bias, goal[..., -1], dim=-1, eps=1e-12)).sum()


def mismatch_gradient(f: Tensor, classes: Tensor, goal: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(c, m, d) gradient of ``mismatch`` with respect to the features, written out, since it is most of the work.
    weight: (C, d) or (c, C, d).

    Classes come before features in what is (c, C, m) here: such thin products take half the time that way around."""
    weight = weight.expand(len(f), -1, -1)
    p = torch.softmax(weight @ f.mT + bias.unsqueeze(1), 1)
    pull = p - F.one_hot(classes, len(bias)).unsqueeze(2)
    of_weight = cosine_gradient(pull @ f / f.shape[1], goal[..., :-1])
    of_bias = cosine_gradient(pull.mean(2), goal[..., -1])
    through = of_weight @ f.mT + of_bias.unsqueeze(2)
    back = p * (through - (p * through).sum(1, keepdim=True))  # through the softmax
    return torch.cat([pull, back], 1).mT @ torch.cat([of_weight, weight], 1) / f.shape[1]


def cosine_gradient(x: Tensor, goal: Tensor) -> Tensor:
    """(..., n) gradient of 1 - cos(x, goal) with respect to x."""
    size = x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    unit, aim = x / size, F.normalize(goal, dim=-1, eps=1e-12)
    return ((unit * aim).sum(-1, keepdim=True) * unit - aim) / size
