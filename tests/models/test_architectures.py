"""Parameter counts of the paper's models, shapes they accept, and the automatic choice."""

from __future__ import annotations

import pytest
import torch

from fedtail.errors import FedtailError
from fedtail.models import MODELS, build_model, choose_model


def n_parameters(name: str, shape: tuple[int, ...], n_classes: int, **options: object) -> int:
    return sum(p.numel() for p in build_model(name, shape, n_classes, **options).parameters())


def test_parameter_counts_are_those_of_the_specification() -> None:
    assert n_parameters("resnet18", (3, 32, 32), 10) == 11_173_962
    assert n_parameters("resnet18", (3, 32, 32), 100) == 11_220_132
    assert n_parameters("cnn_lstm", (196,), 10) == 822_794
    assert n_parameters("cnn_lstm", (1, 196), 10) == 822_794
    assert n_parameters("mlp", (104,), 2) == 4_042 + 112
    assert n_parameters("mlp", (104,), 2, norm_groups=0) == 4_042


def test_resnet34_has_the_published_count_with_the_large_stem() -> None:
    # 21,797,672 for 1,000 classes and RGB, the well-known figure; GroupNorm has as many weights as BatchNorm.
    assert n_parameters("resnet34", (3, 224, 224), 1000) == 21_797_672


def test_resnet8_has_three_stages_of_one_block() -> None:
    # 3x3 convolutions 3-64, 64-64 twice, 64-128-128, 128-256-256, shortcuts 64-128 and 128-256, norms, the output
    convolutions = 9 * (3 * 64 + 2 * 64 * 64 + 64 * 128 + 128 * 128 + 128 * 256 + 256 * 256) + 64 * 128 + 128 * 256
    norms = 2 * (3 * 64 + 3 * 128 + 3 * 256)
    assert n_parameters("resnet8", (3, 32, 32), 10) == convolutions + norms + 256 * 10 + 10 == 1_227_594


def test_a_resnet_with_batchnorm_has_it_everywhere_and_as_many_weights() -> None:
    model = build_model("resnet8", (3, 32, 32), 10, norm="batch")
    assert n_parameters("resnet8", (3, 32, 32), 10, norm="batch") == 1_227_594
    norms = sum(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
    assert norms == 9, "the stem's, two of each block, two shortcuts'"
    assert not any(isinstance(m, torch.nn.GroupNorm) for m in model.modules())


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("resnet18", (1, 8, 8), {"width": 8, "norm_groups": 4}),
        ("resnet18", (3, 97, 120), {"width": 8, "norm_groups": 8}),
        ("resnet34", (3, 32, 20), {"width": 8, "norm_groups": 2, "stem": "large"}),
        ("small_cnn", (1, 1, 1), {}),
        ("small_cnn", (4, 5, 33), {"channels": [8, 16], "norm_groups": 4}),
        ("cnn_lstm", (3, 17), {"channels": [4, 8], "hidden": 5}),
        ("cnn_lstm", (8,), {}),
        ("mlp", (2, 3), {"hidden": [4]}),
        ("residual_mlp", (2, 3), {"width": 4, "blocks": 1}),
        ("residual_mlp", (5,), {"blocks": 0}),
        ("mlp", (7,), {"hidden": []}),
        ("auto", (9,), {}),
        ("auto", (3, 20, 20), {}),
    ],
)
def test_every_model_gives_one_row_of_scores_and_keeps_samples_apart(
    name: str, shape: tuple[int, ...], options: dict[str, object]
) -> None:
    model = build_model(name, shape, 3, **options)
    x = torch.randn(5, *shape)
    both = model(x)
    assert both.shape == (5, 3)
    alone = torch.cat([model(row[None]) for row in x])
    assert torch.allclose(both, alone, atol=1e-5)


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(1)
    first = build_model("mlp", (4,), 2, seed=5)
    before = torch.random.get_rng_state()
    second = build_model("mlp", (4,), 2, seed=5)
    assert torch.equal(before, torch.random.get_rng_state())
    other = build_model("mlp", (4,), 2, seed=6)
    weights = [next(m.parameters()) for m in (first, second, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_the_automatic_choice_follows_the_shape() -> None:
    assert choose_model((104,)) == choose_model((1,)) == ("residual_mlp", {"width": 64, "blocks": 2})
    assert choose_model((1, 28, 28))[0] == "small_cnn"
    assert choose_model((3, 48, 300))[0] == "resnet18"
    assert "auto" in MODELS


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("resnet19", (3, 8, 8), {}, "did you mean 'resnet18'"),
        ("resnet18", (8,), {}, "takes images"),
        ("resnet18", (3, 8, 8), {"stem": "tiny"}, "input should be 'auto', 'small' or 'large'"),
        ("resnet18", (3, 8, 8), {"init": "zero"}, "input should be 'he' or 'torch'"),
        ("resnet18", (3, 8, 8), {"norm": "layer"}, "input should be 'group' or 'batch'"),
        ("resnet18", (3, 8, 8), {"norm_groups": 7}, "does not divide 64 channels; these do: 1, 2, 4, 8, 16, 32, 64"),
        ("mlp", (8,), {"hiden": [3]}, "did you mean 'hidden'"),
        ("mlp", (8,), {"norm_groups": 5}, "does not divide"),
        ("small_cnn", (8,), {}, "takes images"),
        ("small_cnn", (1, 8, 8), {"channels": []}, "is empty"),
        ("cnn_lstm", (4,), {}, "needs 8 features or more"),
        ("cnn_lstm", (1, 2, 3), {}, "cnn_lstm takes"),
        ("mlp", (8,), {"batchnorm": "drop"}, "allowed: groupnorm, keep"),
    ],
)
def test_bad_model_settings_are_one_clear_line(
    name: str, shape: tuple[int, ...], options: dict[str, object], words: str
) -> None:
    with pytest.raises(FedtailError, match=words) as caught:
        build_model(name, shape, 2, **options)
    assert "\n" not in str(caught.value)


def test_one_class_is_refused() -> None:
    with pytest.raises(FedtailError, match="two classes or more"):
        build_model("mlp", (3,), 1)
