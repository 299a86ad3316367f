"""Checkpoints: safetensors plus JSON, written atomically; nothing is ever unpickled.

A checkpoint is a folder ``round-000012`` that appears by one rename once it is complete, so a run that is killed
at any moment leaves the newest complete one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load_file, save_file
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.errors import FedtailError
from fedtail.files import hash_file, sync
from fedtail.rounds.history import plain
from fedtail.rounds.state import Best, Rival, State

FORMAT = 1
TENSORS = "tensors.safetensors"


def save_checkpoint(folder: Path, state: State, settings: Mapping[str, Any] | None = None) -> None:
    """Write the state after ``state.round`` rounds and drop older checkpoints. ``settings`` are what the run's result
    depends on, by dotted key."""
    tensors = _named(state)
    for number, rival in state.rivals.items():
        tensors |= {f"rival/{number}/{k}": v for k, v in _named(rival).items()}
    about: dict[str, Any] = {"format": FORMAT, "round": state.round, "rates": state.rates}
    if settings is not None:
        about["settings"] = plain(settings)
    if state.best is not None:
        tensors["best"] = state.best.x
        about["best"] = {"round": state.best.round, "score": state.best.score, "since": state.best.since}
    name = f"round-{state.round:06d}"
    partial = folder / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file({k: _owned(v) for k, v in tensors.items()}, partial / TENSORS)
    about["sha256"] = hash_file(partial / TENSORS)
    about["sha256_state"] = _sha256_state(about)
    (partial / "state.json").write_text(json.dumps(about))
    history = folder.parent / "history.jsonl"  # a checkpoint must not be ahead of it after a power cut
    for file in (*partial.iterdir(), *([history] if history.is_file() else [])):
        sync(file)
    shutil.rmtree(folder / name, ignore_errors=True)
    partial.rename(folder / name)
    sync(folder)
    for old in folder.glob("round-*"):
        if old.name < name:
            shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(
    folder: Path, like: Tensor, history: list[dict[str, Any]], settings: Mapping[str, Any] | None = None
) -> State | None:
    """The newest complete checkpoint, on the device of ``like``, a model of the same shape; None if there is none.

    One that was made with other ``settings``, or that the ``history`` does not reach, is refused.
    """
    folders = sorted(folder.glob("round-*"))
    if not folders:
        return None
    where = f"checkpoint {str(folders[-1])!r}"
    try:
        about = json.loads((folders[-1] / "state.json").read_text())
        if about.get("format") != FORMAT:
            raise FedtailError(f"{where} has format {about.get('format')!r}, this version reads {FORMAT}")
        for name, checksum in (("sha256_state", _sha256_state(about)), ("sha256", hash_file(folders[-1] / TENSORS))):
            if about.get(name, checksum) != checksum:  # checkpoints of before 0.3 have no checksums
                raise FedtailError(f"{where} is damaged: its checksum does not match; delete it to start over")
        if settings is not None and (other := _difference(about.get("settings", {}), plain(settings))):
            raise FedtailError(
                f"{where} was made with a different config: {other}; revert that, or choose another name "
                "(run.name=NAME)"
            )
        if len(history) < about["round"]:
            text = f"{where} is of round {about['round']}, but history.jsonl has {len(history)} rounds"
            raise FedtailError(f"{text}; restore the complete file, or delete the checkpoint to start over")
        return _state(about, load_file(folders[-1] / TENSORS), like, history, where)
    except FedtailError:
        raise
    except Exception as error:
        text = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise FedtailError(f"{where} cannot be read ({text}); delete it to start over") from None


def _sha256_state(about: Mapping[str, Any]) -> str:
    """The checksum of everything in ``state.json`` but itself."""
    text = json.dumps({key: value for key, value in json.loads(json.dumps(about)).items() if key != "sha256_state"})
    return hashlib.sha256(text.encode()).hexdigest()


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first key whose value is another one now; keys that only one side knows are of another version."""
    for key in sorted({*before} & {*now}):
        if before[key] != now[key]:
            return f"{key} ({before[key]!r} before, {now[key]!r} now)"
    return None


def _state(about: dict[str, Any], tensors: Tensors, like: Tensor, history: list[dict[str, Any]], where: str) -> State:
    tensors = {key: value.to(like.device) for key, value in tensors.items()}
    state = State(about["round"], tensors.pop("x"), rates=about["rates"], history=history[: about["round"]])
    if state.x.shape != like.shape:
        raise FedtailError(f"{where} holds {state.x.numel()} values, the model has {like.numel()}")
    if "best" in about:
        best = about["best"]
        since = best.get("since", best["round"])
        state.best = Best(round=best["round"], score=best["score"], x=tensors.pop("best"), since=since)
    rivals: dict[int, Tensors] = {}
    for key in [key for key in tensors if key.startswith("rival/")]:
        number, name = key.split("/", 2)[1:]
        rivals.setdefault(int(number), {})[name] = tensors.pop(key)
    state.rivals = {n: _sorted(Rival(of.pop("x"), {}, {}, {}), of) for n, of in rivals.items()}
    return _sorted(state, tensors)


Model = TypeVar("Model", State, Rival)


def _named(model: State | Rival) -> Tensors:
    """All tensors of a model, its method, server and clients by their names in a checkpoint."""
    tensors: Tensors = {"x": model.x}
    tensors |= {f"method/{k}": v for k, v in model.method.items()}
    tensors |= {f"server/{k}": v for k, v in model.server.items()}
    for client, kept in model.clients.items():
        tensors |= {f"client/{client}/{k}": v for k, v in kept.items()}
    return tensors


def _sorted(model: Model, tensors: Tensors) -> Model:
    """The model with what is named so put where it belongs."""
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "client":
            number, _, name = name.partition("/")
            model.clients.setdefault(int(number), {})[name] = value
        else:
            {"method": model.method, "server": model.server}[kind][name] = value
    return model


def _owned(tensor: Tensor) -> Tensor:
    return (
        tensor.detach().to("cpu", copy=True).contiguous() if tensor.ndim else tensor.detach().cpu().reshape(()).clone()
    )
