"""Names -> encoders: registered ones, ``timm:NAME``, an ONNX file, or the user's own ``module:callable``."""

from __future__ import annotations

import copy
import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedtail.errors import FedtailError, first_line, one_of
from fedtail.models.encoders import efficientnet_lite
from fedtail.models.encoders.base import ENCODERS, SIZE, Encoder, Encoding
from fedtail.registry import in_user_code, is_own, load_object

DEFAULT = "efficientnet_lite0"
"""What ``model.encoder = "auto"`` takes for images."""
TIMM = "timm:"


def default_encoder() -> str | None:
    """The encoder that ``auto`` chooses, where its packages are installed."""
    return DEFAULT if efficientnet_lite.installed() else None


def is_code(name: str) -> bool:
    """Whether opening it imports code of the user's."""
    return is_own(name) and not name.startswith(TIMM) and not name.endswith(".onnx")


def is_registered(name: str) -> bool:
    """Whether a name stands for weights that come with an installed package, rather than for a file or a download."""
    return not is_own(name) and not name.endswith(".onnx")


def named(encoder: str) -> tuple[str, str | None]:
    """The name and the weights' file of a setting such as ``my.py:encoder@weights.safetensors``."""
    name, at, weights = encoder.rpartition("@")
    return (name, weights) if at and is_code(name) else (encoder, None)


def open_encoder(name: str, weights: str | None = None) -> Encoder:
    """The encoder that a setting names; opened once in a process.

    weights: a safetensors file for an encoder of the user's own.
    """
    if weights is not None and not is_code(name):
        raise FedtailError(f"weights {weights!r} need your own encoder (module:callable); {name!r} comes with its own")
    files = [Path(f) for f in (weights, name) if f is not None]
    stamps = tuple((str(f.resolve()), f.stat().st_mtime_ns) for f in files if f.is_file())
    return _open(name, weights, stamps)


@lru_cache(maxsize=4)
def _open(name: str, weights: str | None, stamps: tuple[tuple[str, int], ...]) -> Encoder:
    """``stamps``: which files, and when they were written, so that one that has changed is read again."""
    if name.startswith(TIMM):
        return _open_timm(name)
    if name.endswith(".onnx"):
        return open_onnx(name)
    if is_own(name):
        return _open_own(name, weights)
    if name not in ENCODERS:
        allowed = [*ENCODERS, "none", "auto", f"{TIMM}NAME", "FILE.onnx", "module:callable"]
        raise one_of("model.encoder", name, allowed)
    made = ENCODERS[name]()
    return made if isinstance(made, Encoder) else Encoder.of(name, made)


def use_encoder(encoding: Encoding) -> Encoder:
    """The encoder that a run was made with; refused where the one that is here is another."""
    encoder = open_encoder(encoding.name, encoding.weights)
    if encoder.digest != encoding.digest:
        raise FedtailError(
            f"encoder {encoding.name!r} has hash {encoder.digest[:12]} here, but the run was made with "
            f"{encoding.digest[:12]}; install the same weights"
        )
    return encoder


def _open_own(name: str, weights: str | None) -> Encoder:
    target = load_object("encoder", name)
    try:
        network = copy.deepcopy(target) if isinstance(target, nn.Module) else target()
    except Exception as error:
        raise in_user_code("encoder", name, error) from error
    if isinstance(network, Encoder):
        return network
    if not isinstance(network, nn.Module):
        raise FedtailError(f"encoder {name!r} returned a {type(network).__name__}, not a torch.nn.Module")
    try:
        if weights is not None:
            network.load_state_dict(load_file(weights))
    except FileNotFoundError:
        raise FedtailError(f"model.encoder: there is no file {weights!r}") from None
    except (OSError, SafetensorError) as error:
        raise FedtailError(f"model.encoder: {weights!r} is not a safetensors file: {error}") from None
    except RuntimeError as error:
        lines = str(error).splitlines()
        line = lines[min(1, len(lines) - 1)].strip()
        raise FedtailError(f"model.encoder: {weights!r} does not match encoder {name!r}: {line}") from None
    return Encoder.of(name, network, weights)


def _open_timm(name: str) -> Encoder:
    try:
        import timm
    except ImportError:
        raise FedtailError(f"encoder {name!r} needs timm: pip install timm") from None
    try:
        network: Any = timm.create_model(name.removeprefix(TIMM), pretrained=True, num_classes=0)
        data = timm.data.resolve_model_data_config(network)
    except Exception as error:  # an unknown name, or weights that cannot be fetched
        raise FedtailError(f"encoder {name!r}: {first_line(error)}") from error
    return Encoder.of(name, network, size=data["input_size"][-1], mean=data["mean"], std=data["std"])


class OnnxNetwork(nn.Module):
    """A graph as a module; torch can neither train nor trace it."""

    def __init__(self, path: Path, session: Any) -> None:
        super().__init__()
        self.path, self.session, self.input = path, session, session.get_inputs()[0].name

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.session.run(None, {self.input: row.contiguous().numpy()})[0] for row in x.cpu().split(1)]
        return torch.cat([torch.from_numpy(row) for row in rows])


def open_onnx(name: str) -> Encoder:
    """The encoder in an ONNX file: (N, 3, size, size) scaled pixels -> features or maps.

    Its metadata may hold ``image_size``, ``mean`` and ``std`` as JSON; otherwise the size is that of the graph's input
    and the scaling ImageNet's.
    """
    path = Path(name)
    if not path.is_file():
        raise FedtailError(f"encoder {name!r}: there is no such file")
    try:
        import onnxruntime
    except ImportError:
        raise FedtailError(f"encoder {name!r} needs onnxruntime: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # more change the bits of sums
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        why = first_line(error)
        raise FedtailError(f"encoder {name!r} is not an ONNX file that onnxruntime can run: {why}") from None
    metadata = session.get_modelmeta().custom_metadata_map
    try:
        side = session.get_inputs()[0].shape[-1]
        more = {key: json.loads(metadata[key]) for key in ("mean", "std") if key in metadata}
        more["size"] = json.loads(metadata.get("image_size", str(side if isinstance(side, int) else SIZE)))
    except (ValueError, IndexError) as error:
        raise FedtailError(f"encoder {name!r}: its metadata cannot be read: {error}") from None
    digest = hashlib.sha256(path.read_bytes() + json.dumps(more, sort_keys=True).encode()).hexdigest()
    return Encoder.of(name, OnnxNetwork(path, session), digest=digest, **more)
