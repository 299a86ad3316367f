"""Take a trained model elsewhere: ONNX and torch.export.

The exported graph maps stored samples (encoded table rows; pixels 0 to 255) to class probabilities: the model's own
scaling and the softmax are inside, so nothing can be forgotten on the other side.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from fedtail.errors import FedtailError, writing
from fedtail.runs.saved import SavedModel


class Classifier(nn.Module):
    """Stored samples -> probabilities. x: (N, *input_shape) float32."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: SavedModel) -> None:
        super().__init__()
        self.module, self.temperature = model.module, model.decision.temperature
        self.front = model.front or nn.Identity()
        transform = model.transform
        shape = (len(transform.mean),) + (1,) * (len(model.input_shape) - 1)
        self.scale = transform.scale
        self.register_buffer("mean", torch.tensor(transform.mean).view(shape) if transform.mean else torch.zeros(1))
        self.register_buffer("std", torch.tensor(transform.std).view(shape) if transform.mean else torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        scaled = (self.front(x) * self.scale - self.mean) / self.std
        return torch.softmax(self.module(scaled) / self.temperature, dim=-1)


def export_torch(model: SavedModel, path: str | Path) -> Path:
    """Write a ``torch.export`` program with a free batch size; ``torch.export.load(path).module()`` runs it."""
    path = _target(path, ".pt2")
    content = io.BytesIO()
    with _quiet():
        torch.export.save(_program(model), content, extra_files={"model.json": _description(model)})
    _write(path, content.getvalue())
    return path


def export_onnx(model: SavedModel, path: str | Path) -> Path:
    """Write ONNX with a free batch size. Classes and preprocessing are in the file's metadata (``fedtail``)."""
    path = _target(path, ".onnx")
    try:
        import onnx
        import onnxscript  # noqa: F401  torch's exporter needs it
    except ImportError:
        raise FedtailError("ONNX export needs extra packages: pip install 'fedtail[onnx]'") from None
    with _quiet():
        program = torch.onnx.export(
            _program(model), dynamo=True, input_names=["x"], output_names=["probabilities"], verbose=False
        )
    assert program is not None
    proto = program.model_proto
    entry = proto.metadata_props.add()
    entry.key, entry.value = "fedtail", _description(model)
    onnx.checker.check_model(proto)
    _write(path, proto.SerializeToString())
    return path


def _program(model: SavedModel) -> torch.export.ExportedProgram:
    classifier = Classifier(model).to("cpu").eval()
    x = torch.zeros(2, *model.input_shape)
    batch = torch.export.Dim("batch", min=1)
    return torch.export.export(classifier, (x,), dynamic_shapes={"x": {0: batch}})


def _description(model: SavedModel) -> str:
    about = {
        "classes": list(model.classes),
        "input_shape": list(model.input_shape),
        "preprocessing": model.preprocessing,
        "data": model.name,
        **({} if model.encoding is None else {"encoder": model.encoding.to_dict()}),
    }
    return json.dumps(about)


def _target(path: str | Path, suffix: str) -> Path:
    path = Path(path)
    if path.suffix != suffix:
        raise FedtailError(f"{str(path)!r} must end in {suffix!r}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write(path: Path, content: bytes) -> None:
    with writing(path):
        path.write_bytes(content)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporters log a page per model; errors still raise."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
