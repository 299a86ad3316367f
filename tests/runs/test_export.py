"""Exported graphs compute what the torch model computes, for any batch size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtail.data.federation import Transform
from fedtail.errors import FedtailError
from fedtail.models import build_model
from fedtail.runs.export import export_onnx, export_torch
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
def test_torch_export_equals_the_model(
    tmp_path: Path, name: str, shape: tuple[int, ...], options: dict[str, object], transform: Transform
) -> None:
    model, x = make(name, shape, options, transform), samples(shape)
    files = {"model.json": ""}
    program = torch.export.load(export_torch(model, tmp_path / "m.pt2"), extra_files=files).module()
    for n in (1, 7):
        assert np.allclose(program(x[:n]).detach().numpy(), model.probabilities(x[:n]), atol=1e-6)
    assert json.loads(files["model.json"])["classes"] == ["a", "b", "c"]


@pytest.mark.parametrize(("name", "shape", "options", "transform"), MODELS)
def test_onnx_equals_the_model(
    tmp_path: Path, name: str, shape: tuple[int, ...], options: dict[str, object], transform: Transform
) -> None:
    pytest.importorskip("onnxscript", reason="needs fedtail[onnx]")
    runtime = pytest.importorskip("onnxruntime")
    model, x = make(name, shape, options, transform), samples(shape)
    session = runtime.InferenceSession(str(export_onnx(model, tmp_path / "m.onnx")))
    for n in (1, 7):
        (out,) = session.run(None, {"x": x[:n].numpy()})
        assert np.allclose(out, model.probabilities(x[:n]), atol=1e-5)
    about = json.loads(session.get_modelmeta().custom_metadata_map["fedtail"])
    assert about["classes"] == ["a", "b", "c"] and about["preprocessing"] == {"kind": "x"}


def test_bad_targets_are_named(tmp_path: Path) -> None:
    model = make(*MODELS[0])
    with pytest.raises(FedtailError, match=r"must end in '.pt2'"):
        export_torch(model, tmp_path / "m.onnx")


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_a_place_that_cannot_be_written_is_one_line(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write = export_torch if suffix == "pt2" else export_onnx
    with pytest.raises(FedtailError, match="cannot write"):
        write(make(*MODELS[0]), tmp_path / "file" / f"m.{suffix}")
