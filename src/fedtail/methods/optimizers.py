"""Client optimizers (``local.optimizer``): what a local step makes of a method's direction u.

    sgd        x <- x - lr (u + weight_decay x)
    momentum   m <- beta1 m + (1 - beta1) u;        in place of u:  m / (1 - beta1^t)
    adam       and v <- beta2 v + (1 - beta2) u^2;  in place of u:  m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

Moments begin at 0 in every round, as FedCGNM's do: kept ones gained nothing (FedAvg on ELPV photos at six sites, 20
rounds, macro F1 at lr .001 and .003: kept .687 and .628, fresh .691 and .702), and a client would have two more models
to keep. A method with an optimizer is a method: the same loss, groups and server hooks, and moments in its step state.
So every engine and every site runs it without knowing of optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.errors import FedtailError
from fedtail.methods.base import LocalRun, LocalStep, Method

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
OWN = "optimizer."
"""How its entries of the step state begin."""


class Optimized(Method):
    """Changes a method's direction before it is subtracted; mixed into the method's class."""

    moments: ClassVar[tuple[str, ...]] = ()
    """Model-sized vectors that steps carry."""

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        const, state = super().start(run, client_state)
        own = {OWN + name: torch.zeros(run.n_params, device=run.device) for name in self.moments}
        return const, {**state, **own, OWN + "steps": torch.zeros(1, device=run.device)}

    def direction(self, step: LocalStep) -> tuple[Tensor, Tensors]:
        direction, state = super().direction(step)
        steps = step.state[OWN + "steps"] + 1.0
        moved, own = self.moved(direction, {name: step.state[OWN + name] for name in self.moments}, steps)
        return moved, {**state, **{OWN + name: value for name, value in own.items()}, OWN + "steps": steps}

    def moved(self, direction: Tensor, moments: Tensors, steps: Tensor) -> tuple[Tensor, Tensors]:
        """(..., d) what is subtracted instead, and the moments after it. steps: (..., 1) so far, with this one."""
        raise NotImplementedError


class Momentum(Optimized):
    """A mean of the run's directions, later ones more: no longer than the longest, so a method's norm bound holds."""

    moments = ("first",)

    def moved(self, direction: Tensor, moments: Tensors, steps: Tensor) -> tuple[Tensor, Tensors]:
        first = torch.lerp(moments["first"], direction, 1.0 - BETA1)
        return first / (1.0 - BETA1**steps), {"first": first}


class Adam(Optimized):
    """About the same length in every coordinate, whatever the method's direction has there; so no norm bound."""

    moments = ("first", "second")

    def moved(self, direction: Tensor, moments: Tensors, steps: Tensor) -> tuple[Tensor, Tensors]:
        first = torch.lerp(moments["first"], direction, 1.0 - BETA1)
        second = torch.lerp(moments["second"], direction.square(), 1.0 - BETA2)
        scale = (second / (1.0 - BETA2**steps)).sqrt() + EPS
        return first / (1.0 - BETA1**steps) / scale, {"first": first, "second": second}

    def bound(self, lr: float, steps: int, n_classes: int) -> float | None:
        return None


OPTIMIZERS: Mapping[str, type[Optimized]] = {"momentum": Momentum, "adam": Adam}


def with_optimizer(method: Method, optimizer: str) -> Method:
    """The method with its clients' steps taken by ``local.optimizer``; itself for ``sgd``."""
    check_optimizer(type(method), optimizer)
    if optimizer in ("sgd", method.traits.optimizer):
        return method
    return _mixed(type(method), optimizer)(**method.config())  # type: ignore[arg-type]


def check_optimizer(kind: type[Method], optimizer: str) -> None:
    """Refuse an optimizer that would change the steps of a method whose steps must be plain."""
    if optimizer != "sgd" and kind.traits.plain_steps:
        raise FedtailError(
            f"local.optimizer = {optimizer!r} does not work with method {kind.name!r}: {kind.traits.plain_steps}; set "
            "local.optimizer to 'sgd'"
        )


@cache
def _mixed(kind: type[Method], optimizer: str) -> type[Method]:
    """One class for each, so that equal methods stay equal and compiled steps are found again."""
    named = {"name": kind.name, "title": kind.title, "optimizer": optimizer, "__doc__": kind.__doc__}
    return type(f"{kind.__name__}With{optimizer.title()}", (OPTIMIZERS[optimizer], kind), named)
