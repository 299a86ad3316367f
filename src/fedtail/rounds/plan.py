"""What a run is to do, as numbers and names, checked before the first round."""

from __future__ import annotations

from dataclasses import dataclass

from fedtail.core.metrics import SCORES
from fedtail.core.privacy import Privacy
from fedtail.core.schedule import SCHEDULES
from fedtail.errors import FedtailError, check_range, one_of


@dataclass(frozen=True)
class Plan:
    """The server's settings of a run."""

    rounds: int
    lr: float = 0.1
    lr_min: float = 1e-4
    schedule: str = "cosine"
    warmup: int = 0
    participation: float = 1.0
    seed: int = 0
    metric: str = "accuracy"
    """What candidates are compared by: ``accuracy``, ``balanced_accuracy``, ``macro_f1`` or ``defect_score``."""
    validate_on: str = "clients"
    """Where candidates are validated: on the ``clients``' private splits, or on the ``server``'s own hold-out set."""
    quorum: float = 1.0
    """Least share of the sampled clients that must return a valid update."""
    evaluate_every: int = 1
    validate_every: int = 1
    keep_best: bool = False
    """Remember the model with the best validation metric."""
    alignment: bool = True
    """Log the alignment of client updates each round."""
    search_only: bool = False
    """Stop after the round in which the rate search ends."""
    privacy: Privacy | None = None
    """Noise on updates; see ``core.privacy``."""

    def __post_init__(self) -> None:
        for key, value, allowed in (
            ("local.schedule", self.schedule, SCHEDULES),
            ("run.metric", self.metric, SCORES),
            ("run.validate_on", self.validate_on, ("clients", "server")),
        ):
            if value not in allowed:
                raise one_of(key, value, allowed)
        check_range("run.rounds", self.rounds, 1)
        check_range("local.lr", self.lr, 0.0, open_low=True)
        check_range("run.participation", self.participation, 0.0, 1.0, open_low=True)
        check_range("run.quorum", self.quorum, 0.0, 1.0, open_low=True)
        check_range("run.evaluate_every", self.evaluate_every, 1)
        check_range("validate_every", self.validate_every, 0)
        check_range("local.warmup", self.warmup, 0)
        check_range("local.lr_min", self.lr_min, 0.0)
        if self.schedule != "constant" and self.lr_min > self.lr:
            raise FedtailError(
                f"local.lr_min = {self.lr_min:g} is above local.lr = {self.lr:g}, so the learning rate would rise; "
                "lower local.lr_min, or set local.schedule = 'constant'"
            )
        if self.keep_best and not self.validate_every:
            raise FedtailError("run.select = 'best' needs validation; set validate_every to 1 or more")
