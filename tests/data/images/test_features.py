"""Encoding images: once, the same bits in any company, from the cache where they were encoded before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedtail.data.images.features import encode_images, feature_store
from fedtail.models.encoders.opening import open_encoder
from tests.encoders import TINY


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDTAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Counting:
    def __init__(self) -> None:
        self.front, self.calls = open_encoder(TINY).front(), 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.front(x)


def images(n: int) -> Tensor:
    return torch.randint(0, 256, (n, 3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_features_of_an_image_do_not_depend_on_the_others() -> None:
    x, front = images(9), open_encoder(TINY).front()
    together = encode_images(x, front, (32,), "k")
    alone = encode_images(x[4:5], front, (32,), "k")
    assert torch.equal(together[4:5], alone)


def test_only_images_that_are_new_are_encoded() -> None:
    x, count, seen = images(9), Counting(), []
    first = encode_images(x[:6], count, (32,), "k", store=feature_store())
    again = encode_images(
        x.flip(0), count, (32,), "k", store=feature_store(), progress=lambda done, total: seen.append((done, total))
    )
    assert count.calls == 9 and torch.equal(again.flip(0)[:6], first)
    assert seen == [(7, 9), (8, 9), (9, 9)]
    encode_images(x[:1], count, (32,), "another encoder", store=feature_store())
    assert count.calls == 10


def test_a_damaged_cache_is_encoded_again(cache: Path) -> None:
    x, count = images(3), Counting()
    first = encode_images(x, count, (32,), "k", store=feature_store())
    (file,) = (cache / "features" / "k").glob("*.safetensors")
    file.write_bytes(b"not tensors")
    assert torch.equal(encode_images(x, count, (32,), "k", store=feature_store()), first) and count.calls == 6
