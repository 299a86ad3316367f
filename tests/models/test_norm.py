"""BatchNorm is found and explained, and can be converted to GroupNorm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedtail as ft
from fedtail.errors import FedtailError
from fedtail.models import batchnorm_note, build_model, has_batchnorm, to_groupnorm


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.Sequential(nn.BatchNorm2d(6, eps=1e-3), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(6 * 16, 5),
        nn.BatchNorm1d(5, affine=False),
        nn.Linear(5, 3),
    )


def test_the_note_names_layers_and_the_remedy() -> None:
    note = batchnorm_note(net())
    assert note is not None and "2 BatchNorm layers (first: 1.0)" in note and "groupnorm" in note
    assert batchnorm_note(to_groupnorm(net())) is None


def test_conversion_keeps_affine_weights_and_separates_samples() -> None:
    model = net()
    with torch.no_grad():
        model[1][0].weight.fill_(2.0)
    converted = to_groupnorm(model).train()
    layer = converted[1][0]
    assert isinstance(layer, nn.GroupNorm) and layer.num_groups == 3 and layer.eps == 1e-3
    assert torch.equal(layer.weight, torch.full((6,), 2.0))
    assert converted[4].num_groups == 1 and not converted[4].affine
    x = torch.randn(4, 1, 4, 4)
    assert torch.allclose(converted(x), torch.cat([converted(row[None]) for row in x]), atol=1e-6)
    assert float(converted(x).detach().std()) > 0


def test_a_bare_batchnorm_and_a_lazy_one() -> None:
    assert isinstance(to_groupnorm(nn.BatchNorm2d(64)), nn.GroupNorm)
    with pytest.raises(FedtailError, match="lazy"):
        to_groupnorm(nn.Sequential(nn.LazyBatchNorm2d()))


def test_building_warns_about_batchnorm_unless_it_is_converted(tmp_path: Path) -> None:
    lines = ["from torch import nn", "def net():", "    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)"]
    code = "\n".join([*lines, "    return nn.Sequential(*layers)"])
    (tmp_path / "bn_net.py").write_text(code)
    with pytest.warns(UserWarning, match="1 BatchNorm layer"):
        kept = build_model(f"{tmp_path}/bn_net.py:net", (4,), 2)
    assert has_batchnorm(kept)
    assert not has_batchnorm(build_model(f"{tmp_path}/bn_net.py:net", (4,), 2, batchnorm="groupnorm"))


@pytest.mark.parametrize("method", ["fedavg", "fedcgnm", "pcn"])
def test_a_model_with_batchnorm_trains_and_its_statistics_do_not_count_against_the_norm_bound(method: str) -> None:
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], [60, 20])
    x = rng.normal(size=(80, 4)) + 5 + 2 * y[:, None]
    federation = ft.Federation.from_arrays([(x[::2], y[::2]), (x[1::2], y[1::2])])
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    result = ft.fit(federation, module, method, rounds=6, lr=0.05, batch_size=8)
    mean = result.module[0].running_mean
    assert torch.allclose(mean, torch.full((4,), 5.9), atol=1.0)
    assert result.summary["refused"] == 0 and result.test["balanced_accuracy"] > 0.7
    if method == "fedcgnm":
        with pytest.raises(FedtailError, match="BatchNorm's statistics have no norm bound"):
            ft.fit(federation, module, method, rounds=1, privacy={"mode": "local"})
