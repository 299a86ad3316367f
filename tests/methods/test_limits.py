"""Limit cases: with its special part switched off a method is FedAvg, or what it extends, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.core.records import Tensors
from fedtail.methods import METHODS, Batch, FedAvg, Method
from fedtail.rounds.validation import kept_model
from fedtail.settings import Settings
from tests.methods.federations import problem, train


@dataclass(frozen=True)
class SigmoidFedAvg(Method):
    """FedAvg on the sum of C sigmoid cross-entropies."""

    name = "sigmoid_fedavg"

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        target = F.one_hot(batch.y, logits.shape[-1]).float()
        return F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(-1), state


def build(name: str, **options: Any) -> Method:
    return METHODS.build(name, **options)


LIMITS: dict[str, tuple[Method, Method]] = {
    "FedProx with mu = 0": (build("fedprox", mu=0.0), FedAvg()),
    "focal loss with gamma = 0": (build("focal", gamma=0.0), FedAvg()),
    "class-balanced loss with b = 0": (build("class_balanced", b=0.0), FedAvg()),
    "GRW with rho = 0": (build("grw", rho=0.0), FedAvg()),
    "logit adjustment with tau = 0": (build("logit_adjustment", tau=0.0), FedAvg()),
    "Ratio Loss with alpha = 1, beta = 0": (build("ratio_loss", alpha=1.0, beta=0.0), FedAvg()),
    "CLIMB with no dual step": (build("climb", eta=0.0, primal_rounds=1), FedAvg()),
    "CLIMB with a tolerance nobody exceeds": (build("climb", eps=50.0, eta=1.0, primal_rounds=1), FedAvg()),
    "CLIMB with a clip nobody reaches": (build("climb", eta=0.0, clip=1e6), FedAvg()),
    "Fed-GraB without balancers": (build("fedgrab", balance="none"), SigmoidFedAvg()),
    "FedNoRo before its warm-up ends": (build("fednoro", warmup=9), build("logit_adjustment")),
    "FedReLa before it begins": (build("fedrela", begin=1.0), FedAvg()),
    "LDAM-DRW without margin and weights": (build("ldam_drw", margin=0.0, defer=1.0), FedAvg()),
    "FedCGNM with beta = 0": (build("fedcgnm", beta=0.0), build("fedcgn")),
    "FedCGN with a group per class": (
        build("fedcgn", n_groups=None, delta=1e-6),
        build("pcn", batches="shuffled"),
    ),
    "PCN with balanced batches": (build("pcn", batches="balanced"), build("pcn_o")),
}


@pytest.mark.parametrize("case", list(LIMITS))
def test_it_is(case: str) -> None:
    one, two = (train(problem(m, epochs=1)).x for m in LIMITS[case])
    assert torch.equal(one, two)


def test_scaffold_starts_as_fedavg_and_then_differs() -> None:
    first, second = (train(problem(m), 1).x for m in (build("scaffold"), FedAvg()))
    assert torch.equal(first, second)
    first, second = (train(problem(m), 2).x for m in (build("scaffold"), FedAvg()))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", [n for n in METHODS if n not in ("fedavg",)])
def test_no_method_is_fedavg_under_its_defaults(name: str) -> None:
    early = {"fednoro": {"warmup": 1}, "climb": {"primal_rounds": 1, "eps": 0.0}, "fedrela": {"begin": 0.0}}
    options: dict[str, Any] = early.get(name, {})
    mine, plain = problem(build(name, **options), epochs=1), problem(FedAvg(), epochs=1)
    assert not torch.equal(kept_model(mine, Settings.of(), train(mine)), train(plain).x)
