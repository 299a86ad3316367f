from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtail.errors import FedtailError
from fedtail.runs.config import load_config
from fedtail.runs.execution import run
from fedtail.runs.tracking import scalars

SMALL = {
    "data.name": "blobs",
    "data.clients": 2,
    "data.n_max": 40,
    "data.test_per_class": 5,
    "run.rounds": 3,
    "run.name": "small",
}


def small(tmp_path: Path, *trackers: str, **more: Any) -> Any:
    return load_config(None, (), {**SMALL, "run.folder": str(tmp_path), "run.trackers": list(trackers), **more})


class Listener:
    """Writes down what it hears."""

    def __init__(self, fail_at: str | None = None) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.fail_at = fail_at

    def on_start(self, config: Any, done: int) -> None:
        self._hear("start", (config, done))

    def on_round(self, record: Any) -> None:
        self._hear("round", record)

    def on_end(self, result: Any) -> None:
        self._hear("end", result)

    def _hear(self, event: str, value: Any) -> None:
        self.heard.append((event, value))
        if event == self.fail_at:
            raise OSError("the disk\nis full")


def test_a_tracker_hears_the_start_every_round_and_the_end(tmp_path: Path) -> None:
    listener = Listener()
    result = run(small(tmp_path), trackers=[listener])
    assert [event for event, _ in listener.heard] == ["start", "round", "round", "round", "end"]
    config, done = listener.heard[0][1]
    assert (config["data"]["name"], done) == ("blobs", 0)
    assert [r["round"] for event, r in listener.heard if event == "round"] == [0, 1, 2]
    assert listener.heard[-1][1]["test"] == result.test


def test_a_failing_tracker_does_not_cost_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, other = Listener(fail_at="round"), Listener()
    result = run(small(tmp_path), trackers=[broken, other])
    assert len(result.history) == 3 and len(other.heard) == 5
    assert [event for event, _ in broken.heard] == ["start", "round"]
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == ["warning: Listener logging stopped: on_round failed: the disk is full"]


def test_a_run_that_stops_ends_its_trackers_without_a_result(tmp_path: Path) -> None:
    listener = Listener()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small(tmp_path), trackers=[listener], on_round=stop)
    assert listener.heard[-1] == ("end", None)


@given(st.dictionaries(st.text("ab", min_size=1), st.one_of(st.floats(), st.booleans(), st.text(), st.none())))
def test_scalars_are_finite_numbers_only(record: dict[str, Any]) -> None:
    out = dict(scalars({"x": record, "many": list(range(1000))}))
    assert all(isinstance(v, float) and v == v and abs(v) != float("inf") for v in out.values())
    assert all(k.startswith("x/") for k in out)


@pytest.mark.parametrize(
    ("name", "package"), [("mlflow", "mlflow"), ("wandb", "wandb"), ("tensorboard", "tensorboard")]
)
def test_a_missing_package_is_named_before_anything_is_trained(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FedtailError, match=f"pip install 'fedtail\\[{name}\\]'"):
        run(small(tmp_path, name))
    assert not (tmp_path / "small").exists()


def test_an_unknown_tracker_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(FedtailError, match="did you mean 'tensorboard'"):
        run(small(tmp_path, "tensorbord"))


def test_tensorboard_has_every_scalar_of_every_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra fedtail[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(small(tmp_path, "tensorboard"))
    events = EventAccumulator(str(tmp_path / "small" / "tensorboard"))
    events.Reload()
    curve = events.Scalars("test/macro_f1")
    assert [e.step for e in curve] == [0, 1, 2]
    assert [e.value for e in curve] == pytest.approx([r["test"]["macro_f1"] for r in result.history])
    assert {"train_loss", "rates/0", "alignment", "seconds"} <= set(events.Tags()["scalars"])


class FakeMLflow(SimpleNamespace):
    """Records calls as MLflow's fluent interface would take them."""

    def __init__(self) -> None:
        super().__init__(calls=[])

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments, options))
            return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

        return call


def test_mlflow_gets_settings_metrics_and_files_and_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    run(small(tmp_path, "mlflow"))
    names = [name for name, _, _ in fake.calls]
    assert names == [
        "set_experiment", "start_run", "log_params", *["log_metrics"] * 3, "log_artifact", "log_artifact", "end_run",
    ]  # fmt: skip
    assert fake.calls[2][1][0]["data.name"] == "blobs"
    metrics, options = fake.calls[4][1][0], fake.calls[4][2]
    assert 0 <= metrics["test/macro_f1"] <= 1 and options == {"step": 1}
    assert fake.calls[-1][2] == {"status": "FINISHED"}
    assert json.loads((tmp_path / "small" / "trackers.json").read_text()) == {"mlflow": "abc"}

    fake.calls.clear()
    run(small(tmp_path, "mlflow"), resume=True)
    assert fake.calls[1] == ("start_run", (), {"run_id": "abc"})


def test_wandb_gets_settings_metrics_and_the_final_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    ended: list[int] = []
    opened: list[dict[str, Any]] = []
    handle = SimpleNamespace(
        id="w1",
        summary={},
        log=lambda values, step: logged.append((values, step)),
        finish=lambda exit_code: ended.append(exit_code),
    )

    def init(**options: Any) -> Any:
        opened.append(options)
        return handle

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    result = run(small(tmp_path, "wandb"))
    assert opened[0]["project"] == "fedtail" and opened[0]["config"]["run.rounds"] == 3
    assert [step for _, step in logged] == [0, 1, 2]
    assert handle.summary["final/macro_f1"] == result.test["macro_f1"]
    assert ended == [0]
