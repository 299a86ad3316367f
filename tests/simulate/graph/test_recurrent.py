"""The LSTM of one kernel each way equals PyTorch's, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedtail.simulate.graph.recurrent import lstm_backward, lstm_forward
from tests.simulate.graph.test_groupnorm import KERNELS


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("rows", "steps"), [(5, 3), (33, 1), (17, 4)])
def test_both_directions_equal_autograd(kernel: bool, rows: int, steps: int) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(6, 16, batch_first=True)
    w_in, w, b_in, b = (p.detach() for p in layer.parameters())
    x, dy = torch.randn(rows, steps, 6), torch.randn(rows, steps, 16)
    gates = (x @ w_in.T).requires_grad_()
    saved = lstm_forward(gates.detach(), w, b_in + b, kernel=kernel)
    d = lstm_backward(dy, w, saved, kernel=kernel)
    same = nn.LSTM(64, 16, batch_first=True)  # whose inputs are the gates
    with torch.no_grad():
        for p, value in zip(same.parameters(), (torch.eye(64), w, b_in, b), strict=True):
            p.copy_(value)
    y, _ = same(gates)
    torch.testing.assert_close(saved.y, y.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(d, torch.autograd.grad(y, gates, dy)[0], rtol=1e-4, atol=1e-5)
