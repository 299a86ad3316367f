"""Every core, the same bits: nothing that a run leaves depends on how many workers shared it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fedtail as ft
from fedtail.core.candidates import binary_candidates
from fedtail.core.decisions import Decision, SiteGoal
from fedtail.core.records import Task
from fedtail.data.federation import Federation
from fedtail.errors import FedtailError
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.rates import RATES
from fedtail.runs.config import load_config
from fedtail.runs.execution import run
from fedtail.settings import Settings
from fedtail.simulate import simulator
from fedtail.simulate.batched import cohort
from fedtail.simulate.batched.simulator import BatchedSimulator
from fedtail.simulate.workers import Workers, by_caller, forward_flops
from fedtail_experiments.methods.measurements import TRAIN_LOSS
from tests.simulate.batched.test_simulator import make_module

SIZES = (210, 120, 64, 40, 22, 9, 5)


@pytest.fixture(scope="module")
def uneven() -> Federation:
    """Clients of 5 to 210 samples, and a test set of several batches."""
    rng = np.random.default_rng(0)

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.choice(4, size=n, p=[0.6, 0.25, 0.1, 0.05])
        return (rng.standard_normal((n, 12)) + y[:, None] / 2).astype(np.float32), y

    return Federation.from_arrays([draw(n) for n in SIZES], draw(2500), classes=list("abcd"), validation=0.2)


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of three runs for the smallest of models, and short steps for short batches, as large ones have."""
    monkeypatch.setattr(cohort, "MAX_ROWS", 3)
    monkeypatch.setattr(cohort, "SHORT_PAYS", 0.0)


def fitted(federation: Federation, method: str, rates: Any, **settings: Any) -> ft.Result:
    strategy = RATES.build(rates, federation.n_clients, max_rounds=2) if rates == "fedhoo" else rates
    module = make_module("mlp")
    return ft.fit(federation, module, method, strategy, rounds=3, batch_size=16, seed=2, **settings)


def told(result: ft.Result) -> str:
    """All that a run says of its rounds and of its end, as text: NaN equals itself there."""
    return json.dumps([result.history, result.test, result.sites], default=str)


@pytest.mark.parametrize(
    ("method", "rates"), [("fedavg", 0.6), ("fedcgnm", "fedhoo"), ("scaffold", 0.3), ("focal", "fast")]
)
@pytest.mark.parametrize("path", ["batched", "reference"])
def test_a_run_has_the_same_bits_with_any_number_of_workers(
    uneven: Federation, sharded: None, path: str, method: str, rates: Any
) -> None:
    one, *others = (fitted(uneven, method, rates, path=path, workers=n) for n in (1, 2, 3))
    for n, other in enumerate(others, 2):
        assert torch.equal(one.x, other.x)
        assert told(one) == told(other)
        assert other.summary["engine"]["workers"] == n and one.summary["engine"]["workers"] == 1


@pytest.mark.parametrize("kind", ["mlp", "residual"])
def test_captured_shards_have_the_bits_of_called_ones_at_every_worker(
    uneven: Federation, sharded: None, kind: str
) -> None:
    method, found = METHODS.build("fedcgnm"), []
    for n, after in ((1, 10**9), (3, 0), (2, 150)):
        settings = Settings.of(batch_size=8, workers=n)
        engine = BatchedSimulator(uneven, make_module(kind), method, settings, capture_after=after)
        x = engine.model.vector.clone()
        task = Task(0, x, tuple(range(7)), {"rate": np.linspace(0.1, 0.9, 14).reshape(7, 2)}, 0.1)
        for _ in range(3):
            updates, refused = engine.train(task)
        assert not refused and engine.info()["workers"] == n and "notes" not in engine.info()
        found.append(torch.cat([u.delta for u in updates]))
        engine.close()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("path", ["batched", "reference"])
def test_evaluation_does_not_depend_on_workers(uneven: Federation, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    pooled = sys.modules["fedtail.simulate.batched.pooled"]
    monkeypatch.setattr(pooled, "CHUNK", 256)
    monkeypatch.setattr(pooled, "CANDIDATE_CHUNK", 32)
    goal, found = SiteGoal(common=Decision(), goal="cost", shares=(0.6, 0.25, 0.1, 0.05)), []
    for n in (1, 3):
        engine = simulator(uneven, make_module("mlp"), METHODS.build("fedavg"), Settings.of(path=path, workers=n))
        x = engine.model.vector.clone()
        deltas = torch.randn(7, 2, x.numel(), generator=torch.Generator().manual_seed(0)) * 0.3
        candidates = binary_candidates(x, np.full(7, 1 / 7), deltas, np.arange(7), 7)
        found.append(
            (
                engine.confusion(x, "test").tolist(),
                engine.validate(candidates, range(7)).tolist(),
                repr(dict(engine.scores(x, "validation"))),
                engine.site_decisions(x, goal),
                {k: v.tolist() for k, v in engine.measure(x, TRAIN_LOSS).items()},
            )
        )
        assert engine.info()["workers"] == n
        engine.close()
    assert found[0] == found[1]


def test_a_run_goes_on_with_another_number_of_workers(sharded: None, tmp_path: Path) -> None:
    def asked(folder: str, n: int) -> Settings:
        words = ["data.name=blobs", "data.n_max=60", "data.clients=5", "run.rounds=6", "local.batch_size=16"]
        rates = ["rates.name=fedhoo", "rates.max_rounds=3"]
        return load_config(
            None, [*words, *rates, f"run.folder={tmp_path / folder}", "run.name=r", f"engine.workers={n}"]
        )

    def stop(state: Any, record: Any, seconds: float) -> None:
        if state.round == 3:
            raise KeyboardInterrupt

    whole = run(asked("whole", 1))
    with pytest.raises(KeyboardInterrupt):
        run(asked("halves", 3), on_round=stop)
    resumed = run(asked("halves", 2), resume=True)
    assert torch.equal(whole.x, resumed.x)
    assert (whole.folder / "history.jsonl").read_bytes() == (resumed.folder / "history.jsonl").read_bytes()
    assert resumed.summary["engine"]["workers"] == 2


def test_pieces_come_back_in_order_and_the_first_error_is_told() -> None:
    pool = Workers(3)
    before = torch.get_num_threads()
    seen = pool.map(lambda worker, i: (i, torch.get_num_threads(), torch.is_grad_enabled()), range(20))
    assert seen == [(i, 1, True) for i in range(20)]
    with torch.no_grad():
        assert not any(pool.map(lambda worker, i: torch.is_grad_enabled(), range(5)))
    nested = pool.map(lambda worker, i: set(pool.map(lambda inner, _: inner, range(4))) == {worker}, range(9))
    assert all(nested)

    def broken(worker: int, i: int) -> int:
        if i in (4, 11):
            raise ValueError(f"piece {i}")
        return i

    for _ in range(20):
        with pytest.raises(ValueError, match="piece 4"):
            pool.map(broken, range(20))
    both = threading.Barrier(2)

    def together(worker: int, i: int) -> None:
        both.wait(60)
        raise ValueError(f"piece {i}")

    with pytest.raises(ValueError, match="piece 0"):  # two errors at once: that of the first piece
        Workers(2).map(together, range(2))
    assert pool.map(lambda worker, i: i, range(3)) == [0, 1, 2] and torch.get_num_threads() == before
    pool.close()


def test_progress_is_told_by_the_callers_thread_alone() -> None:
    told: list[float] = []
    here = threading.get_ident()

    def tell(part: float) -> None:
        assert threading.get_ident() == here
        told.append(part)

    pool, add = Workers(3), by_caller(tell)
    pool.map(lambda worker, i: add(1.0), range(60))
    add(0.0)
    assert sum(told) == 60.0
    pool.close()


def test_auto_is_one_worker_where_work_is_too_small_to_share(uneven: Federation) -> None:
    for path in ("batched", "reference"):
        assert fitted(uneven, "fedavg", 0.6, path=path).summary["engine"]["workers"] == 1


@pytest.mark.parametrize("bad", ["0", "all", "1.5", "-2"])
def test_a_bad_number_of_workers_is_one_clear_line(bad: str) -> None:
    with pytest.raises(FedtailError, match=rf"engine\.workers.*{bad}.*auto") as said:
        load_config(None, [f"engine.workers={bad}"])
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("name", "shape"), [("mlp", (20,)), ("residual_mlp", (20,)), ("small_cnn", (3, 32, 32)), ("resnet18", (3, 32, 32))]
)
def test_operations_by_the_sizes_of_layers_are_those_of_torchs_counter(name: str, shape: tuple[int, ...]) -> None:
    module = build_model(name, shape, 10).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(torch.zeros(1, *shape))
    assert forward_flops(module, shape) == counter.get_total_flops()


def test_an_unknown_layer_is_left_to_torchs_counter() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(20, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w

    assert forward_flops(Own(), (20,)) == 200


def test_a_run_loads_no_compiler(tmp_path: Path) -> None:
    """It takes two seconds and is of no use to a small model on a CPU."""
    code = """
import sys
from fedtail.runs.config import load_config
from fedtail.runs.execution import run
run(load_config(None, ["data.name=blobs", "data.n_max=60", "run.rounds=2", "run.folder=FOLDER"]))
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code.replace("FOLDER", str(tmp_path))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
