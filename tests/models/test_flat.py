"""The flat vector: tied and frozen parameters, buffers, clones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedtail.errors import FedtailError
from fedtail.models import FlatModel, build_model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3, bias=False)
        self.decode = nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight
        self.frozen = nn.Linear(3, 2)
        self.frozen.weight.requires_grad_(False)
        self.norm = nn.BatchNorm1d(3, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.norm(self.decode(self.encode(x))))


def test_layout_is_trainable_then_frozen_then_float_buffers() -> None:
    flat = FlatModel(Tied())
    assert flat.n_params == 9 + 2 + 3 + 3
    assert flat.size == flat.n_params + 6 + 3 + 3
    assert flat.gradient(flat.module(torch.randn(4, 3)).sum()).shape == (flat.n_params,)


def test_a_step_in_the_vector_moves_tied_parameters_together() -> None:
    flat = FlatModel(Tied())
    flat.vector[:9] = 7.0
    module = flat.module
    assert module.decode.weight is module.encode.weight
    assert torch.equal(module.decode.weight.detach(), torch.full((3, 3), 7.0))


def test_the_gradient_of_a_tied_parameter_is_the_sum_of_both_uses() -> None:
    flat = FlatModel(Tied())
    flat.module.eval()
    x = torch.randn(4, 3)
    weight = flat.module.encode.weight
    expected = torch.autograd.grad(flat.module(x).square().sum(), weight)[0]
    assert torch.allclose(flat.gradient(flat.module(x).square().sum())[:9], expected.reshape(-1))


def test_running_statistics_are_part_of_the_vector_and_batch_counters_start_anew() -> None:
    flat = FlatModel(Tied())
    start = flat.vector.clone()
    x = torch.randn(8, 3) + 3
    flat.module(x)
    once = flat.vector.clone()
    assert not torch.equal(once, start)
    flat.module(x)
    flat.load(start)
    assert int(flat.module.norm.num_batches_tracked) == 0
    flat.module(x)
    assert torch.equal(flat.vector, once)


def test_a_clone_shares_nothing() -> None:
    flat = FlatModel(Tied())
    twin = flat.clone()
    twin.vector.zero_()
    twin.module(torch.randn(4, 3))
    assert float(flat.vector.abs().sum()) > 0
    assert int(flat.module.norm.num_batches_tracked) == 0
    assert twin.module.decode.weight is twin.module.encode.weight
    assert float(twin.module.encode.weight.detach().abs().sum()) == 0


def test_half_and_double_modules_become_float32() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        flat = FlatModel(nn.Linear(2, 2).to(dtype))
        assert flat.vector.dtype == torch.float32
        assert flat.module(torch.zeros(1, 2)).dtype == torch.float32


def test_an_lstm_follows_the_vector() -> None:
    flat = FlatModel(build_model("cnn_lstm", (16,), 3, channels=(4,), hidden=5))
    x = torch.randn(2, 16)
    before = flat.module(x).detach()
    flat.load(flat.vector * 0.5)
    after = flat.module(x).detach()
    assert not torch.allclose(before, after)
    assert torch.allclose(flat.clone().module(x), after)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(FedtailError, match="no trainable parameters"):
        FlatModel(nn.ReLU())
