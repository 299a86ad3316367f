"""Compressed updates: how much is lost at once, and that nothing is lost in the long run."""

from __future__ import annotations

import pytest
import torch

from fedtail.federate.protocol.compress import compress, decode, encode


@pytest.mark.parametrize(("how", "error", "bytes_per_value"), [("bf16", 1 / 256, 2.0), ("int8", 1 / 254, 1.01)])
def test_what_travels_is_close_and_small(how: str, error: float, bytes_per_value: float) -> None:
    values = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    sent = encode(values, how)
    assert decode(sent).shape == values.shape and decode(sent).dtype == torch.float32
    largest = values.abs().max() if how == "int8" else values.abs()
    assert bool(((decode(sent) - values).abs() <= error * largest).all())
    assert sum(t.numel() * t.element_size() for t in sent.values()) <= bytes_per_value * values.numel()
    assert torch.equal(decode(encode(torch.zeros(1, 7), how)), torch.zeros(1, 7))


@pytest.mark.parametrize("how", ["bf16", "int8"])
def test_the_sum_of_what_was_sent_is_the_sum_of_the_updates(how: str) -> None:
    rng = torch.Generator().manual_seed(1)
    total, arrived, left = torch.zeros(3000), torch.zeros(3000), None
    for _ in range(50):
        delta = 1e-3 * torch.randn(1, 3000, generator=rng)
        sent, rest = compress(delta, left, [None], how)
        left, total, arrived = rest[0], total + delta[0], arrived + decode(sent)[0]
    assert float((arrived + left - total).abs().max()) < 1e-6
    assert float((arrived - total).norm() / total.norm()) < 2e-3, "not fifty times the rounding of one update"


def test_a_compressed_update_keeps_the_methods_bound() -> None:
    delta = torch.ones(1, 4096)
    sent, rest = compress(delta, torch.ones(4096), [64.0], "int8")
    assert float(decode(sent).norm()) <= 64.0
    torch.testing.assert_close(decode(sent) + rest, torch.full((1, 4096), 2.0))


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="scales of shape"):
        decode({"delta": torch.zeros(1, 5000, dtype=torch.int8), "scale": torch.ones(1, 2)})
