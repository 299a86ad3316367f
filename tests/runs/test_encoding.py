"""Runs on the features of a frozen encoder: what is trained, kept, predicted and exported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import fedtail as ft
from fedtail.errors import FedtailError
from fedtail.models.encoders.opening import open_encoder
from fedtail.models.norm import fix_batchnorm
from fedtail.runs import encoding as module
from fedtail.runs.build import build_federation, prepare
from fedtail.runs.config import check_config
from fedtail.runs.execution import run
from fedtail.runs.record import load_run
from fedtail.runs.saved import load_model
from fedtail.settings import Settings
from tests.encoders import TINY, draw, draw_folder, tiny

SITES = {"north": (40, 12, 6), "south": (20, 24, 8)}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("photos"), SITES)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAIL_CACHE", str(tmp_path / "cache"))


def config(photos: Path, tmp_path: Path, rounds: int = 8, **model: object) -> Settings:
    return check_config(
        {
            "data": {"name": "images", "path": str(photos)},
            "model": {"encoder": TINY, **model},
            "local": {"batch_size": 16},
            "run": {"rounds": rounds, "folder": str(tmp_path / "runs")},
        }
    )


def test_only_the_head_is_trained_and_it_learns(photos: Path, tmp_path: Path) -> None:
    result = run(config(photos, tmp_path, rounds=30))
    assert result.x.numel() == 32 * 3 + 3
    assert result.summary["engine"]["path"] == "batched"
    assert result.test["macro_f1"] > result.floor["macro_f1"] + 0.4
    folder = result.folder
    assert folder is not None and sum(v.numel() for v in load_file(folder / "model.safetensors").values()) == 99
    about = json.loads((folder / "clients.json").read_text())
    assert any("encodes every image once; only a linear head is trained and sent" in n for n in about["notes"])
    assert load_run(folder).encoder == f"encoder {TINY} (frozen), linear head"


def test_a_saved_model_takes_raw_images(photos: Path, tmp_path: Path) -> None:
    result = run(config(photos, tmp_path))
    assert result.folder is not None
    with pytest.raises(FedtailError, match=r"uses custom code, 'tests.encoders:tiny'.*--allow-code"):
        load_model(result.folder)
    model = load_model(result.folder, allow_code=True)
    files = sorted(photos.rglob("*.png"))[:7]
    given = model.predict_proba(files)
    assert np.array_equal(given, result.model().predict_proba([Image.open(f) for f in files]))
    pooled = build_federation(config(photos, tmp_path))
    encoded = prepare(pooled, config(photos, tmp_path)).federation
    with torch.no_grad():
        expected = torch.softmax(result.module(encoded.test.x), dim=-1).numpy()
    assert np.allclose(model.predict_proba(pooled.test.x), expected, atol=1e-6)


def test_onnx_has_the_encoder_inside(photos: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (pip install onnxruntime)")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed (pip install 'fedtail[onnx]')")
    from fedtail.runs.export import export_onnx

    model = run(config(photos, tmp_path, rounds=2)).model()
    x = np.stack([np.asarray(draw(k, np.random.default_rng(k)), dtype=np.float32)[None] for k in range(3)])
    session = onnxruntime.InferenceSession(export_onnx(model, tmp_path / "m.onnx"))
    found, _ = session.run(None, {"x": x})
    assert np.allclose(found, model.predict_proba(x), atol=1e-5)


def test_an_encoder_from_an_onnx_file_is_trained_on_and_not_exported(photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (pip install onnxruntime)")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed (pip install 'fedtail[onnx]')")
    import onnx

    from fedtail.runs.export import export_onnx

    given = torch.onnx.export(fix_batchnorm(tiny().eval()), (torch.zeros(1, 3, 16, 16),), dynamo=True, verbose=False)
    assert given is not None
    onnx.save(given.model_proto, str(tmp_path / "tiny.onnx"))
    result = run(config(photos, tmp_path, rounds=3, encoder=str(tmp_path / "tiny.onnx")))
    assert result.folder is not None
    model = load_model(result.folder)
    x = np.asarray(draw(1, np.random.default_rng(1)), dtype=np.float32)[None, None]
    assert np.allclose(model.predict_proba(x), result.model().predict_proba(x))
    with pytest.raises(FedtailError, match="behind an encoder that is an ONNX file itself cannot be exported"):
        export_onnx(model, tmp_path / "m.onnx")


def test_unfrozen_blocks_train_and_are_sent(photos: Path, tmp_path: Path) -> None:
    result = run(config(photos, tmp_path, rounds=2, unfreeze=1))
    tail = open_encoder(TINY).tail(1)
    assert result.x.numel() == 99 + sum(p.numel() for p in tail.parameters())
    assert not torch.equal(result.x[:100], torch.cat([p.flatten() for p in tail.parameters()])[:100])
    assert result.folder is not None
    model = load_model(result.folder, allow_code=True)
    files = sorted(photos.rglob("*.png"))[:3]
    assert np.array_equal(model.predict_proba(files), result.model().predict_proba(files))


def test_images_choose_the_encoder_that_is_installed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(**model: object) -> tuple[str | None, tuple[str, ...]]:
        settings = config(photos, tmp_path, **model)
        ready = prepare(build_federation(settings), settings)
        about, found = ready.about, ready.encoding
        return (found.name if found else None), tuple(n for n in about.notes if not n.startswith("warning"))

    monkeypatch.setattr(module, "default_encoder", lambda: TINY)
    name, notes = chosen(encoder="auto")
    assert name == TINY and "--encoder none trains from scratch" in notes[-1]
    assert chosen(encoder="none") == (None, ())
    assert chosen(encoder="auto", name="small_cnn") == (None, ())
    assert chosen(encoder="auto", stem="large") == (None, ())
    monkeypatch.setattr(module, "default_encoder", lambda: None)
    name, notes = chosen(encoder="auto")
    assert name is None and "pip install 'fedtail[pretrained]'" in notes[-1]


def test_fit_has_the_same_settings(photos: Path, tmp_path: Path) -> None:
    federation = build_federation(config(photos, tmp_path))
    result = ft.fit(federation, "cosine", encoder=TINY, rounds=2, batch_size=16)
    assert result.x.numel() == 96 and result.architecture["name"] == "cosine"
    assert ft.fit(federation, "auto", encoder=TINY, rounds=1).x.numel() == 99
    own = torch.nn.Linear(32, 3)
    assert ft.fit(federation, own, encoder=TINY, rounds=1).module is own
    folder = ft.fit(federation, "mlp", encoder=TINY, rounds=1).save(tmp_path / "saved")
    assert load_model(folder, allow_code=True).predict(sorted(photos.rglob("*.png"))[:2]).shape == (2,)


def test_a_run_goes_on_with_the_same_encoder_only(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "default_encoder", lambda: TINY)
    settings = config(photos, tmp_path, rounds=2, encoder="auto")
    run(settings)
    monkeypatch.setattr(module, "default_encoder", lambda: None)
    with pytest.raises(FedtailError, match="made with a different config: encoder"):
        run(settings, resume=True)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"encoder": TINY}}, r"takes images, not samples of shape \(2,\); use none"),
        ({"model": {"unfreeze": 1}}, "model.unfreeze = 1 needs an encoder"),
        ({"model": {"unfreeze": -1}}, r"model.unfreeze = -1 must be at least 0"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(sections: dict[str, dict[str, object]], said: str) -> None:
    with pytest.raises(FedtailError, match=said):
        settings = check_config({"data": {"name": "blobs", "n_features": 2}, **sections})
        prepare(build_federation(settings), settings)
