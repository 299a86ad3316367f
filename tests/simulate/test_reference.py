"""The plain simulator: what it does with several workers, and where it is not what was asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtail.data import Federation
from fedtail.errors import FedtailError
from fedtail.methods import FedAvg
from fedtail.rates import RATES
from fedtail.rounds.loop import train_rounds
from fedtail.rounds.state import Problem
from fedtail.settings import Settings
from fedtail.simulate import simulator
from fedtail.simulate.reference import ReferenceSimulator, draws_numbers


class Dropping(nn.Module):
    """Draws in a function, not in a layer that could be recognised."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.output = nn.Linear(10, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.dropout(self.inner(x), 0.5, self.training))


def test_a_model_that_draws_in_a_function_gives_the_same_bits_with_several_workers(federation: Federation) -> None:
    found = []
    for workers in (1, 3):
        torch.manual_seed(0)
        engine = ReferenceSimulator(federation, Dropping(), FedAvg(), Settings.of(epochs=3, workers=workers))
        rates = RATES.build("uniform", federation.n_clients)
        problem = Problem(engine, FedAvg(), rates, federation.n_classes)
        found.append(train_rounds(problem, Settings.of(rounds=2), problem.begin()).x)
    assert torch.equal(*found)


def rectified_at_random() -> nn.Module:
    """RReLU draws for negative values only, and this one sees none where all inputs are 0."""
    first = nn.Linear(4, 8)
    nn.init.ones_(first.bias)
    nn.init.constant_(first.weight, -1.0)
    return nn.Sequential(first, nn.RReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), False),
        (nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 2)), False),
        (nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2)), True),
        (rectified_at_random(), True),
    ],
)
def test_whether_a_model_draws_is_tried_without_a_trace(module: nn.Module, draws: bool) -> None:
    module.eval()
    before, state = {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    assert draws_numbers(module, (4,)) is draws
    assert not module.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_the_batched_path_is_refused_where_it_would_silently_be_another(federation: Federation) -> None:
    with pytest.raises(FedtailError, match=r"batched path runs on the CPU, not on meta"):
        simulator(federation, nn.Linear(10, 5), FedAvg(), Settings.of(path="batched", device="meta"))
