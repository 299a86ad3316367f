"""A tape written as TorchScript does what the tape does; one that cannot be written stays as it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtail.methods import METHODS
from fedtail.settings import Settings
from fedtail.simulate.batched.programs import Unwritten, scripted
from fedtail.simulate.batched.simulator import BatchedSimulator
from tests.simulate.batched.test_simulator import make_federation, make_module, make_task


def test_calls_become_one_unless_one_of_them_cannot_be_written() -> None:
    a, b, seen = torch.ones(3), torch.zeros(3), []
    calls = [
        partial(torch.mul, a, 2.5, out=b),
        partial(Tensor.add_, b, a, alpha=-1),
        partial(torch.ops.aten.sum.IntList_out, b, [0], False, out=a[:1].view([])),
    ]
    scripts: dict[str, Any] = {}
    one = scripted(calls, scripts)
    scripted(calls, scripts)
    assert len(scripts) == 1  # compiled once
    one()
    assert a.tolist() == [4.5, 1.0, 1.0] and b.tolist() == [1.5] * 3
    for call in (partial(seen.append, 1), partial(torch.clamp, b, float("-inf"), 1.0, out=b)):
        with pytest.raises(Unwritten):
            scripted([*calls, call], scripts)  # left to Python


def test_where_torchscript_fails_the_tape_is_replayed_and_the_reason_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str) -> None:
        raise RuntimeError("not in this version\nat all")

    method, found = METHODS.build("fedcgnm"), []
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(torch.jit, "CompilationUnit", refuse)
        engine = BatchedSimulator(
            make_federation("mlp"), make_module("mlp"), method, Settings.of(batch_size=8), capture_after=0
        )
        updates, _ = engine.train(make_task(method, engine))
        found.append(torch.cat([u.delta for u in updates]))
        assert engine.info()["steps"] == "replay"
        assert engine.info().get("notes") == (["not scripted: RuntimeError: not in this version"] if broken else None)
    assert torch.equal(*found)
