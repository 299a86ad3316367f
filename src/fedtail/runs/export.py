"""Take a trained model elsewhere: ONNX.

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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtail.boosting.model import TreesModule
from fedtail.boosting.onnx import forest_graph
from fedtail.core.decisions import TINY, Decision
from fedtail.errors import FedtailError, writing
from fedtail.runs.saved import SavedModel

OUTPUTS = ("probabilities", "answer")
KEPT = ("classes", "input_shape", "preprocessing", "data", "decision", "encoder")
"""What the file has of ``model.json``."""


class Decided(nn.Module):
    """Logits -> calibrated probabilities and the (N,) class by the model's decision."""

    bias: Tensor
    weights: Tensor
    costs: Tensor
    limits: Tensor
    others: Tensor

    def __init__(self, decision: Decision, n_classes: int) -> None:
        super().__init__()
        self.temperature = decision.temperature
        self.calibrated = decision.temperature != 1.0 or bool(decision.bias)
        self.has_costs, self.has_limits = bool(decision.costs), decision.limits is not None
        limits = np.full(n_classes, np.inf) if decision.limits is None else decision.limits
        others = np.isinf(limits) | np.isfinite(limits).all()
        for name, values in {
            "bias": decision.bias or np.zeros(n_classes),
            "weights": decision.weights or np.ones(n_classes),
            "costs": decision.costs or np.zeros((n_classes, n_classes)),
            "limits": 1 / limits,
            "others": np.where(others, 0.0, -1e30),
        }.items():
            self.register_buffer(name, torch.tensor(np.asarray(values, dtype=np.float32)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.softmax(x / self.temperature + self.bias if self.calibrated else x, dim=-1)
        score = -(p @ self.costs) if self.has_costs else p * self.weights
        best = (score + self.others).argmax(-1)
        if self.has_limits:
            ratio = p.clamp_min(TINY) * self.limits
            best = torch.where(ratio.amax(-1) >= 1, ratio.argmax(-1), best)
        return p, best


class Classifier(nn.Module):
    """Stored samples -> probabilities and answers. x: (N, *input_shape) float32."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: SavedModel) -> None:
        super().__init__()
        self.module = model.module
        self.decided = Decided(model.decision, len(model.classes))
        self.front = model.front or nn.Identity()
        transform = model.transform
        shape = (len(transform.mean),) + (1,) * (len(model.input_shape) - 1)
        self.scale = transform.scale
        self.register_buffer("mean", torch.tensor(transform.mean).view(shape) if transform.mean else torch.zeros(1))
        self.register_buffer("std", torch.tensor(transform.std).view(shape) if transform.mean else torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scaled = (self.front(x) * self.scale - self.mean) / self.std
        out: tuple[Tensor, Tensor] = self.decided(self.module(scaled))
        return out


def export_onnx(model: SavedModel, path: str | Path) -> Path:
    """Write ONNX with a free batch size: ``probabilities``, calibrated, and ``answer``, the number of the class that
    the model's decision gives. Classes and preprocessing are in the file's metadata (``fedtail``)."""
    path = Path(path)
    if path.suffix != ".onnx":
        raise FedtailError(f"{str(path)!r} must end in '.onnx'")
    if model.encoding is not None and model.encoding.name.endswith(".onnx"):
        raise FedtailError("a model behind an encoder that is an ONNX file itself cannot be exported; use `predict`")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import onnx
        import onnxscript  # noqa: F401  torch's exporter needs it
    except ImportError:
        raise FedtailError("ONNX export needs extra packages: pip install 'fedtail[onnx]'") from None
    if isinstance(model.module, TreesModule):
        proto = _trees(model, model.module)
    else:
        proto = _graph(_program(Classifier(model), model.input_shape), "x", *OUTPUTS)
    entry = proto.metadata_props.add()
    entry.key, entry.value = "fedtail", _description(model)
    onnx.checker.check_model(proto)
    with writing(path):
        path.write_bytes(proto.SerializeToString())
    return path


def _trees(model: SavedModel, module: TreesModule) -> Any:
    """A forest, and behind it what makes probabilities and answers of logits."""
    from onnx import compose, version_converter

    if model.encoding is not None:
        raise FedtailError("trees behind an encoder cannot be exported as one ONNX file yet")
    n = len(model.classes)
    behind = _graph(_program(Decided(model.decision, n), (n,)), "logits", *OUTPUTS)
    forest = forest_graph(module)
    opset = next(entry.version for entry in forest.opset_import if not entry.domain)
    behind = version_converter.convert_version(behind, opset)
    behind.ir_version = forest.ir_version
    behind = compose.add_prefix(behind, "behind/", rename_inputs=False, rename_outputs=False)
    return compose.merge_models(forest, behind, [("logits", "logits")])


def _program(module: nn.Module, input_shape: tuple[int, ...]) -> torch.export.ExportedProgram:
    x = torch.zeros(2, *input_shape)
    batch = torch.export.Dim("batch", min=1)
    return torch.export.export(module.to("cpu").eval(), (x,), dynamic_shapes={"x": {0: batch}})


def _graph(program: torch.export.ExportedProgram, takes: str, *gives: str) -> Any:
    with _quiet():
        made = torch.onnx.export(program, dynamo=True, input_names=[takes], output_names=list(gives), verbose=False)
    assert made is not None
    return made.model_proto


def _description(model: SavedModel) -> str:
    told, sites = model.describe(), model.architecture.get("sites")
    kept = {key: told[key] for key in KEPT if key in told}
    return json.dumps(kept if sites is None else {**kept, "sites": sites})


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
