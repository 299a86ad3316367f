"""Follow a run elsewhere: one small callback interface, with TensorBoard, MLflow and W&B behind it.

A tracker only listens. It gets what the run folder gets, so leaving trackers out loses nothing.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fedtail.errors import FedtailError
from fedtail.registry import Registry

MOST_VALUES = 20
"""Lists (rates per client, accuracy per class) are tracked value by value up to this length."""


class Tracker(Protocol):
    """What a tracker has to do; pass your own to ``fedtail.runs.execution.run(config, trackers=[...])``."""

    def on_start(self, config: Mapping[str, Any], done: int) -> None:
        """Before the first round; ``done`` rounds were run before (a resumed run)."""

    def on_round(self, record: Mapping[str, Any]) -> None:
        """After every round, with the record that goes to history.jsonl."""

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        """After the last round, with what goes to result.json; None if the run stopped before its end."""


TRACKERS: Registry[Tracker] = Registry("tracker")


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """A nested record as ``test/macro_f1`` -> number; text, undefined values and long lists are left out.

    >>> dict(scalars({"train_loss": 0.5, "test": {"tail": 0.25}, "rates": [0.4, 0.8]}))
    {'train_loss': 0.5, 'test/tail': 0.25, 'rates/0': 0.4, 'rates/1': 0.8}
    """
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if len(value) <= MOST_VALUES and key not in ("clients", "refused"):
                yield from scalars({str(i): v for i, v in enumerate(value)}, f"{prefix}{key}/")
        elif isinstance(value, bool | int | float) and math.isfinite(value):
            yield f"{prefix}{key}", float(value)


def flat_settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as ``method.beta`` -> value, without what is not set."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            out |= flat_settings(value, f"{prefix}{key}.")
        elif value is not None:
            out[f"{prefix}{key}"] = value
    return out


class Trackers:
    """Several trackers as one. One that fails is dropped with a line on standard error: it must not cost a run."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)

    def on_start(self, config: Mapping[str, Any], done: int) -> None:
        self._each("on_start", config, done)

    def on_round(self, record: Mapping[str, Any]) -> None:
        self._each("on_round", record)

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        self._each("on_end", result)

    def _each(self, event: str, *arguments: Any) -> None:
        for tracker in list(self.trackers):
            try:
                getattr(tracker, event)(*arguments)
            except Exception as error:
                self.trackers.remove(tracker)
                name, text = type(tracker).__name__, " ".join(str(error).split())
                sys.stderr.write(f"warning: {name} logging stopped: {event} failed: {text}\n")


def build_trackers(names: Sequence[str], folder: Path, extra: Sequence[Tracker] = ()) -> Trackers:
    """The trackers a config names, writing to or remembered in the run folder, and any of the caller's own."""
    return Trackers([*(TRACKERS[name](folder) for name in names), *extra])


def check_trackers(names: Sequence[str]) -> None:
    """One clear line for a name that is unknown or whose package is not installed, before anything is trained."""
    for name in names:
        TRACKERS[name]
        _package(PACKAGES[name], name)


PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


def _package(package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise FedtailError(
            f"run.trackers names {extra!r}, but {package} is not installed; run pip install 'fedtail[{extra}]'"
        ) from error


@TRACKERS.add("tensorboard")
class TensorBoard:
    """Event files in ``<run folder>/tensorboard``: ``tensorboard --logdir runs`` shows runs while they train."""

    def __init__(self, folder: Path) -> None:
        _package("tensorboard", "tensorboard")
        self.folder = folder / "tensorboard"
        self.writer: Any = None

    def on_start(self, config: Mapping[str, Any], done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what a killed run had written beyond its last checkpoint
        self.writer = SummaryWriter(str(self.folder), purge_step=done or None, flush_secs=10)
        text = "\n".join(f"    {k} = {v}" for k, v in flat_settings(config).items())
        self.writer.add_text("config", text, done)

    def on_round(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record):
            if name != "round":
                self.writer.add_scalar(name, value, record["round"])
        self.writer.flush()

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        self.writer.close()


@TRACKERS.add("mlflow")
class MLflow:
    """A run in the experiment ``fedtail``; where it goes is MLflow's own setting (MLFLOW_TRACKING_URI)."""

    def __init__(self, folder: Path) -> None:
        self.mlflow, self.folder = _package("mlflow", "mlflow"), folder

    def on_start(self, config: Mapping[str, Any], done: int) -> None:
        self.mlflow.set_experiment("fedtail")
        known = _remembered(self.folder, "mlflow") if done else None
        run = self.mlflow.start_run(run_id=known) if known else self.mlflow.start_run(run_name=self.folder.name)
        if not known:
            self.mlflow.log_params(flat_settings(config))
            _remember(self.folder, "mlflow", run.info.run_id)

    def on_round(self, record: Mapping[str, Any]) -> None:
        self.mlflow.log_metrics({k: v for k, v in scalars(record) if k != "round"}, step=int(record["round"]))

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            for name in ("config.toml", "result.json"):
                self.mlflow.log_artifact(str(self.folder / name))
        self.mlflow.end_run(status="KILLED" if result is None else "FINISHED")


@TRACKERS.add("wandb")
class WandB:
    """A run in the project ``fedtail``; account and mode are W&B's own settings (``wandb login``, WANDB_MODE)."""

    def __init__(self, folder: Path) -> None:
        self.wandb, self.folder = _package("wandb", "wandb"), folder
        self.run: Any = None

    def on_start(self, config: Mapping[str, Any], done: int) -> None:
        self.run = self.wandb.init(
            project="fedtail", name=self.folder.name, config=flat_settings(config), dir=str(self.folder),
            id=_remembered(self.folder, "wandb") if done else None, resume="allow",
        )  # fmt: skip
        _remember(self.folder, "wandb", self.run.id)

    def on_round(self, record: Mapping[str, Any]) -> None:
        self.run.log({k: v for k, v in scalars(record) if k != "round"}, step=int(record["round"]))

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            self.run.summary.update({f"final/{k}": v for k, v in scalars(result.get("test", {}))})
        self.run.finish(exit_code=1 if result is None else 0)


def _remembered(folder: Path, tracker: str) -> str | None:
    """The id of this run at a tracker, so that a resumed run goes on in the same place."""
    path = folder / "trackers.json"
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found.get(tracker)


def _remember(folder: Path, tracker: str, run_id: str) -> None:
    path = folder / "trackers.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(known | {tracker: run_id}), encoding="utf-8")
