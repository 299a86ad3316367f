"""CReFF's features matched in few coordinates against the plain way, and what it says when they diverge."""

from __future__ import annotations

import pytest
import torch

from fedtail.core.features import class_gradients
from fedtail.errors import FedtailError
from fedtail.methods import CReFF
from fedtail.methods.creff import descend, descend_in_span, match_gradients


@pytest.mark.parametrize(("n_classes", "per_class", "d"), [(4, 6, 60), (2, 5, 40), (3, 8, 9)])
@pytest.mark.parametrize("zero", [False, True])
def test_creff_moves_features_within_their_span_as_it_does_outside(
    n_classes: int, per_class: int, d: int, zero: bool
) -> None:
    """The last has more rows than dimensions. Heads on frozen features start at zero."""
    rng = torch.Generator().manual_seed(11)
    means = 2 + torch.randn(n_classes, d, generator=rng).double()
    y = torch.arange(60) % n_classes
    x = means[y] + torch.randn(60, d, generator=rng)
    weight, bias = (0.0 if zero else 0.3) * torch.randn(n_classes, d, generator=rng).double(), torch.arange(n_classes)
    goal = class_gradients(x, x @ weight.T + bias, y, n_classes)
    f = means.unsqueeze(1) + torch.randn(n_classes, per_class, d, generator=rng)
    problem = torch.arange(n_classes), goal, weight, bias.double(), 50, f.square().sum(-1).mean() * 0.01
    plain, fast = descend(f, *problem), descend_in_span(f, *problem)
    assert float((plain - f).abs().max()) > 0.01
    assert torch.allclose(fast, plain, rtol=0, atol=1e-9)
    short = [t.float() if t.is_floating_point() else t for t in problem[:4]]
    low, low_fast = (go(f.float(), *short, 50, problem[-1].float()) for go in (descend, descend_in_span))
    assert torch.allclose(low_fast, low, rtol=0, atol=1e-3)
    assert torch.equal(descend_in_span(f, *problem[:4], 0, problem[-1]), f)


def test_creff_leaves_classes_that_nobody_has_alone_in_either_way() -> None:
    rng = torch.Generator().manual_seed(12)
    features, goal = torch.randn(3, 4, 30, generator=rng), torch.randn(3, 3, 31, generator=rng)
    layer = 0.1 * torch.randn(3, 30, generator=rng), torch.zeros(3)
    features[0], goal[2] = float("nan"), float("nan")  # never seen; seen before, and not asked for now
    known = torch.tensor([1])
    moved = match_gradients(features, goal, *layer, 20, 0.1)
    assert moved[0].isnan().all() and torch.equal(moved[2], features[2])
    rate = 0.1 * features[1].square().sum(-1).mean() / 4
    assert torch.allclose(moved[known], descend(features[known], known, goal[known], *layer, 20, rate), atol=1e-5)


def test_creff_says_what_to_change_when_its_features_grow_out_of_bounds() -> None:
    features = 1e38 * torch.randn(2, 20, 30, generator=torch.Generator().manual_seed(13))
    state = {"features": features, "weight": torch.zeros(2, 30), "bias": torch.zeros(2)}
    with pytest.raises(FedtailError, match="features have grown out of bounds"):
        CReFF(features=20, decay=0.0).after_round(None, [], [], state)  # type: ignore[arg-type]
