"""Exported graphs compute what the torch model computes, for any batch size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtail.core.decisions import Decision
from fedtail.data.federation import Transform
from fedtail.errors import FedtailError
from fedtail.models import build_model
from fedtail.runs.export import Decided, export_onnx
from fedtail.runs.saved import SavedModel

MODELS = [
    ("mlp", (6,), {"hidden": (8, 4)}, Transform()),
    ("small_cnn", (3, 8, 6), {"channels": (8, 16)}, Transform(1 / 255, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))),
    ("resnet18", (1, 12, 12), {"width": 4, "norm_groups": 2}, Transform(1 / 255, (0.4,), (0.2,))),
    ("cnn_lstm", (16,), {"channels": (4,), "hidden": 5}, Transform()),
]


def make(name: str, shape: tuple[int, ...], options: dict[str, object], transform: Transform) -> SavedModel:
    return SavedModel(build_model(name, shape, 3, **options), ("a", "b", "c"), shape, transform, {"kind": "x"})


def samples(shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(7, *shape, generator=generator) * (255 if len(shape) == 3 else 1)


@pytest.mark.parametrize(("name", "shape", "options", "transform"), MODELS)
def test_onnx_equals_the_model(
    tmp_path: Path, name: str, shape: tuple[int, ...], options: dict[str, object], transform: Transform
) -> None:
    pytest.importorskip("onnxscript", reason="needs fedtail[onnx]")
    runtime = pytest.importorskip("onnxruntime")
    model, x = make(name, shape, options, transform), samples(shape)
    session = runtime.InferenceSession(str(export_onnx(model, tmp_path / "m.onnx")))
    for n in (1, 7):
        out, answer = session.run(None, {"x": x[:n].numpy()})
        assert np.allclose(out, model.probabilities(x[:n]), atol=1e-5)
        assert (answer == out.argmax(-1)).all()
    about = json.loads(session.get_modelmeta().custom_metadata_map["fedtail"])
    assert about["classes"] == ["a", "b", "c"] and about["preprocessing"] == {"kind": "x"}


@pytest.mark.parametrize(
    "decision",
    [
        Decision(temperature=2.5, weights=(0.2, 1.0, 1.8)),
        Decision(temperature=0.5, bias=(0.5, -1.0, 0.0), costs=((0.0, 1.0, 9.0), (3.0, 0.0, 1.0), (1.0, 1.0, 0.0))),
        Decision(bias=(0.3, 0.0, -0.3), thresholds=(None, 0.3, 0.31)),
    ],
)
def test_onnx_has_the_decision_inside(tmp_path: Path, decision: Decision) -> None:
    pytest.importorskip("onnxscript", reason="needs fedtail[onnx]")
    runtime = pytest.importorskip("onnxruntime")
    model = make(*MODELS[0])
    with torch.no_grad():
        next(iter(model.module.parameters())).mul_(8)  # so that answers differ
    model.decision = decision
    x = torch.randn(200, *model.input_shape, generator=torch.Generator().manual_seed(1)) * 2
    session = runtime.InferenceSession(str(export_onnx(model, tmp_path / "m.onnx")))
    out, answer = session.run(["probabilities", "answer"], {"x": x.numpy()})
    p = model.probabilities(x)
    assert np.allclose(out, p, atol=1e-5)
    assert (np.array(model.classes)[answer] == model.answers(p)).mean() > 0.99  # but for ties in the last bits
    assert (answer != out.argmax(-1)).any()
    about = json.loads(session.get_modelmeta().custom_metadata_map["fedtail"])
    assert Decision.from_json(about["decision"]) == decision


def test_a_threshold_of_0_is_reached_by_a_probability_of_0_in_the_file_too() -> None:
    logits = torch.tensor([[0.0, -200.0], [0.0, 1.0]])
    decision = Decision(thresholds=(None, 0.0))
    p, answer = Decided(decision, 2)(logits)
    assert p[0, 1] == 0 and answer.tolist() == decision.answers(p.numpy()).tolist() == [1, 1]


def test_bad_targets_are_named(tmp_path: Path) -> None:
    model = make(*MODELS[0])
    with pytest.raises(FedtailError, match=r"must end in '.onnx'"):
        export_onnx(model, tmp_path / "m.pt2")


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FedtailError, match="cannot write"):
        export_onnx(make(*MODELS[0]), tmp_path / "file" / "m.onnx")
