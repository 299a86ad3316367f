"""The base of methods: a loss, groups of classes, a direction, optional client state, optional server hooks.

A method never knows where clients run. Its client-side functions are pure functions on tensors that accept
any leading batch dimensions (``...`` below: none for one client, (K,) for all clients at once), so that the
plain loop, the batched simulator and a site of a real federation run the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.core.momentum import Scalar
from fedtail.core.records import Measurement, Task, Tensors, Update
from fedtail.data.images.augment import Views
from fedtail.errors import check_range


class Batch(NamedTuple):
    """Labels of a batch. ``weight`` is 1 for real samples and 0 for padding; labels are always valid."""

    y: Tensor
    """(..., B) int64."""
    weight: Tensor
    """(..., B) float."""
    teacher: Tensor | None = None
    """(..., B, C) logits of the round's global model, for methods with ``needs_teacher``."""


class LocalStep(NamedTuple):
    """The inputs of a local step; every tensor may have leading dimensions for clients and probes."""

    grads: Tensor
    """(..., H, d) group gradients g_h = (1/B) sum over the batch's samples in group h, so that their sum is the
    ordinary batch gradient."""
    x: Tensor
    """(..., d) local parameters."""
    x0: Tensor
    """(..., d) the round's global parameters."""
    const: Tensors
    """What ``Method.start`` set for the whole local run."""
    state: Tensors
    """What steps carry."""
    hyper: Mapping[str, Scalar]
    """The method's tunable scalars, as the run has them."""


@dataclass(frozen=True)
class LocalRun:
    """A client's knowledge when a local run starts. None of it leaves the client."""

    client: int
    round: int
    counts: np.ndarray
    """(C,) original training samples per class."""
    resampled: np.ndarray
    """(C,) samples per class in one resampled epoch."""
    n_params: int
    steps: int
    lr: float
    message: Tensors
    """The server's broadcast and this client's own message, merged."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    """Draws come from ``generator(seed, purpose, client, round)``."""


class Measure(Protocol):
    def __call__(self, what: Measurement, x: Tensor | None = None) -> dict[int, Tensor]: ...


@dataclass(frozen=True)
class Server:
    """The server's side of a round, as hooks see it."""

    round: int
    rounds: int
    x: Tensor
    """(n,) global model."""
    n_clients: int
    n_classes: int
    weights: np.ndarray
    """(K,) p_k of all registered clients."""
    measure: Measure
    """Ask every client for a measurement of the global model, or of another, on its un-resampled training data."""
    auxiliary_gradients: Callable[[], Tensor]
    """(C, rows, columns) gradient of the output layer's weight on the auxiliary samples of each class."""
    output_weight: Callable[[Tensor], Tensor]
    """The output layer's (rows, columns) weight inside a model vector."""
    classifier: Callable[[Tensor], tuple[Tensor, Tensor]]
    """(C, d) weight and (C,) bias of the output layer inside a model vector, as views."""
    compare: Callable[[Sequence[Tensor]], np.ndarray]
    """(N,) what models are worth on the private validation splits by the run's metric, higher is better; NaN where
    there are none."""
    lr: float = 0.0
    """Learning rate of the round."""
    seed: int = 0
    """Draws come from ``generator(seed, purpose, round=round)``."""

    def with_classifier(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """A copy of the model ``x`` with another output layer."""
        out = x.clone()
        for place, value in zip(self.classifier(out), (weight, bias), strict=True):
            place.copy_(value)
        return out


@dataclass(frozen=True)
class Traits:
    """Facts about a method's functions that engines need, or may use to compute the same faster.

    A method declares what holds for it as a class attribute of the same name (``needs_teacher = True``); the last four
    follow from which functions it overrides.
    """

    needs_teacher: bool = False
    """``Batch.teacher`` must hold the logits of the round's global model."""
    views: Views | None = None
    """A batch holds every sample twice, one after the other: weakly and strongly augmented in this way."""
    needs_auxiliary: bool = False
    """A server hook uses ``Server.auxiliary_gradients``, so ``data.auxiliary`` must be above 0, and the method defines
    ``auxiliary_gradients``."""
    classifier: str = "linear"
    """What the model's output layer must be; one of ``models.registry.CLASSIFIERS``."""
    plain_steps: str = ""
    """Why its steps must be taken as they are, where ``local.optimizer`` may not change them; empty if it may."""
    plain_mean: str = ""
    """Why updates must be averaged as they are, where ``server.aggregate`` may change none; empty if it may."""
    optimizer: str = "sgd"
    """What becomes of its direction at a client; see ``methods.optimizers``."""
    stateful_loss: bool = False
    """The loss reads and updates step state, so a batch may not be split by group."""
    whole_batch: bool = False
    """A sample's loss depends on the labels of its whole batch (weights that are divided by their mean), so a batch may
    not be split by group. It depends on no logits but the sample's own."""
    group_momentum: bool = False
    """``direction`` is ``core.momentum.cgnm_direction`` of the state's ``momentum``, for which an engine may have a
    kernel."""
    averaged: str = ""
    """A state (..., H, d) that ``direction`` changes by m <- beta m + (1 - beta) g, with the scalar ``beta``, and is
    then the sum of, with ``average_factors``. Engines may add gradients to it as they compute them."""
    own_loss: bool = False
    """``loss`` is not plain cross-entropy, whose gradient engines have written out."""
    own_finish: bool = False
    """``finish`` does something, so the state of the last step must be kept for it."""
    own_direction: bool = False
    """``direction`` is not the plain gradient, which engines may subtract as they compute it."""

    @property
    def whole(self) -> bool:
        """Whether a loss takes the logits of the whole batch at once."""
        return self.stateful_loss or self.whole_batch or self.needs_teacher or self.views is not None

    @classmethod
    def of(cls, kind: type[Method]) -> Traits:
        """Read what a class declares and overrides. What is said of ``direction`` counts for the class that defines it,
        and not for one that overrides it."""
        declared = {f.name: getattr(kind, f.name) for f in fields(cls) if hasattr(kind, f.name)}
        stepping = next(c for c in kind.__mro__ if "direction" in c.__dict__)
        for name in ("group_momentum", "averaged"):
            declared.pop(name, None)
            for c in (stepping, kind):
                if name in c.__dict__:
                    declared[name] = c.__dict__[name]
        for name in ("loss", "finish", "direction"):
            declared[f"own_{name}"] = getattr(kind, name) is not getattr(Method, name)
        return cls(**declared)


@dataclass(frozen=True)
class Method:
    """Base and FedAvg behaviour at once: cross-entropy, one group, plain gradient, weighted mean."""

    name: ClassVar[str] = ""
    """Set by the registry."""
    title: ClassVar[str] = ""
    """How tables and reports call it; by default the class's name."""
    paper: ClassVar[str] = ""
    wire: ClassVar[str] = "nothing"
    """What crosses the wire beyond FedAvg."""
    client_state: ClassVar[str] = "none"
    """What a client keeps between rounds."""
    tunable: ClassVar[tuple[str, ...]] = ("weight_decay",)
    """Fields that enter the step as scalars, so that a search may set them per client and probe."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Settings, by dotted key, that have to be so for this method; whoever sets them otherwise is told."""
    compares_by: ClassVar[str] = ""
    """The metric that ``run.select`` and ``run.patience`` go by, where it is not ``run.metric``."""
    traits: ClassVar[Traits] = Traits()
    """What engines know of it; made from the class's attributes."""

    weight_decay: float = 0.0
    """lambda of x <- x - lr (direction + lambda x); after normalization, on all parameters."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.__dict__.get("name", cls.__name__)
        cls.title = cls.__dict__.get("title", cls.__name__)
        cls.traits = Traits.of(cls)

    def __post_init__(self) -> None:
        check_range("method.weight_decay", self.weight_decay, 0.0)

    # -- client, once per local run ------------------------------------------------------------------

    @property
    def sampler(self) -> str:
        """How a local epoch is cut into batches; one of ``fedtail.core.sampling.SAMPLERS``."""
        return "shuffled"

    def group_count(self, n_classes: int) -> int:
        """H, the number of group gradients a step gets."""
        return 1

    def groups(self, resampled: np.ndarray) -> np.ndarray:
        """(C,) group of each class, from the client's own resampled counts."""
        return np.zeros(len(resampled), dtype=np.int64)

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        """Constants of the local run, and the initial step state (momentum, balancers, ...)."""
        return {}, {}

    def finish(
        self, run: LocalRun, delta: Tensor, const: Tensors, state: Tensors, client_state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """After the last step: the client state to keep, and the extras to upload. delta: (d,)."""
        return client_state, {}

    # -- client, every step: tensors with leading batch dimensions -----------------------------------

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        """(..., B) loss of each sample, and the step state (which others may share). logits: (..., B, C)."""
        return cross_entropy(logits, batch.y), state

    def direction(self, step: LocalStep) -> tuple[Tensor, Tensors]:
        """(..., d) direction to subtract (before weight decay), and the step state."""
        return step.grads.sum(dim=-2), step.state

    def average_factors(self, average: Tensor, hyper: Mapping[str, Scalar]) -> Tensor:
        """(..., H, 1) weight of each group's average in the direction, for a method with ``averaged``, from that state
        after the step's gradients."""
        raise NotImplementedError

    # -- server ----------------------------------------------------------------------------------------

    def auxiliary_gradients(self, model: Any, federation: Any) -> Callable[[Tensor], Tensor]:
        """Model vector -> what ``Server.auxiliary_gradients`` gives, for a method that needs an auxiliary set."""
        raise NotImplementedError

    def init_server(self, n_clients: int, n_classes: int, n_params: int) -> Tensors:
        """Server state: tensors only, so that it can be checkpointed."""
        return {}

    def before_round(self, server: Server, state: Tensors) -> Tensors:
        """Prepare a round; may measure clients or use the auxiliary set."""
        return state

    def broadcast(self, state: Tensors) -> Tensors:
        """The message every sampled client gets in addition to the model."""
        return {}

    def message(self, state: Tensors, client: int) -> Tensors:
        """The message one client gets."""
        return {}

    def weights(self, p: np.ndarray, updates: Sequence[Update], state: Tensors) -> np.ndarray:
        """(S,) coefficients a of x + sum_k a_k delta_k. Linear for every method, so FedHOO works with all."""
        return p

    def advance(self, server: Server, aggregate: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """The next model, before a server optimizer, from the round's aggregate."""
        return aggregate, state

    def after_round(self, server: Server, updates: Sequence[Update], choice: Sequence[int], state: Tensors) -> Tensors:
        """Process the round; ``choice[i]`` is the probe of ``updates[i]`` that was kept."""
        return state

    def serve(self, server: Server, state: Tensors) -> Tensor:
        """The model to evaluate and keep after a round, if it is not ``server.x``, from which training always
        continues."""
        return server.x

    def conclude(self, server: Server, state: Tensors) -> Tensor:
        """After the last round: the final model, computed from ``server.x``."""
        return server.x

    # -- description -------------------------------------------------------------------------------------

    @property
    def reveals_classes(self) -> bool:
        """Whether what a client sends reveals which classes it has; only a server that is trusted may learn that."""
        return False

    @property
    def only_sums(self) -> bool:
        """Whether the server needs only the weighted sum of a round's updates, so that masks can hide each one."""
        return self.wire.startswith("nothing") and not self.reveals_classes and type(self).weights is Method.weights

    def stats(self, state: Tensors) -> dict[str, Any]:
        """Numbers about the server state for the round's history record; JSON values only."""
        return {}

    def bound(self, lr: float, steps: int, n_classes: int) -> float | None:
        """Upper bound on a valid update's norm, if the method has one; larger updates are refused."""
        return None

    def hyper(self) -> dict[str, float]:
        """The tunable scalars of the step."""
        return {name: float(getattr(self, name)) for name in self.tunable}

    def config(self) -> dict[str, Any]:
        """Constructor arguments that give this method again."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}


def run_bound(method: Method, task: Task, client: int, probe: int, steps: int, n_classes: int) -> float | None:
    """``Method.bound`` of one local run of a task, at what the run tried. A weight decay that is searched moves the
    model beyond any bound that the method knows of."""
    if "weight_decay" in task.probes:
        return None
    tried = task.probes.get("lr")
    lr = task.lr if tried is None else float(tried[task.clients.index(client), probe])
    return method.bound(lr, steps, n_classes)


def pick(values: Tensor, y: Tensor) -> Tensor:
    """(..., B) value of each sample's class. values: (..., C); y: (..., B)."""
    return values.gather(-1, y)


def relative(weight: Tensor, batch: Batch) -> Tensor:
    """(..., B) weights over their mean in the batch, so that its mean loss is sum w l / sum w. weight: (..., B)."""
    real = batch.weight
    mean = (weight * real).sum(dim=-1, keepdim=True) / real.sum(dim=-1, keepdim=True).clamp_min(1.0)
    return weight / torch.where(mean > 0, mean, 1.0)


def one_hot(y: Tensor, n_classes: int) -> Tensor:
    """(..., B, C) bool."""
    return y.unsqueeze(-1) == torch.arange(n_classes, device=y.device)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """(..., B) cross-entropy with any leading dimensions."""
    return -F.log_softmax(logits, dim=-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
