"""Encoding images: once, the same bits in any company, from the cache where they were encoded before."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtail.data.images import features
from fedtail.data.images.features import encode_images, feature_store
from fedtail.files import is_locked, locked
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


def test_who_encodes_the_same_images_at_the_same_time_waits_and_encodes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second looks into the cache while the first is at its first image."""
    x, first, second, looked, there = images(3), Counting(), Counting(), threading.Event(), list[Tensor]()
    late = threading.Thread(target=lambda: there.append(encode_images(x, second, (32,), "k", store=feature_store())))
    read = features._read

    def reading(*args: Any) -> Any:
        found = read(*args)
        if threading.current_thread() is late:
            looked.set()
        return found

    def slow(image: Tensor) -> Tensor:
        if not late.ident:
            late.start()
            looked.wait()
        return first(image)

    monkeypatch.setattr(features, "_read", reading)
    monkeypatch.setattr(features, "usable_cores", lambda: 1)
    mine = encode_images(x, slow, (32,), "k", store=feature_store())
    late.join()
    assert (first.calls, second.calls) == (3, 0) and torch.equal(there[0], mine)


def test_a_lock_that_a_process_left_behind_holds_nobody_up(tmp_path: Path) -> None:
    lock = tmp_path / "x"
    lock.touch()
    code = "import os, sys; from pathlib import Path; from fedtail.files import locked\n"
    code += "with locked(Path(sys.argv[1]), wait=False): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, str(lock)]).returncode == -9
    with locked(lock, wait=True):
        assert is_locked(lock)
    assert not is_locked(lock) and not is_locked(tmp_path / "absent")


def test_a_damaged_cache_is_encoded_again(cache: Path) -> None:
    x, count = images(3), Counting()
    first = encode_images(x, count, (32,), "k", store=feature_store())
    (file,) = (cache / "features" / "k").glob("*.safetensors")
    file.write_bytes(b"not tensors")
    assert torch.equal(encode_images(x, count, (32,), "k", store=feature_store()), first) and count.calls == 6
