"""A trained model on new data: tables, arrays and images, and what it refuses."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fedtail as ft
from fedtail.data.federation import Transform
from fedtail.errors import FedtailError
from fedtail.models import build_model
from fedtail.runs.config import load_config
from fedtail.runs.execution import run
from fedtail.runs.result import Result
from fedtail.runs.saved import SavedModel


def visits(n: int = 240, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    sick = rng.random(n) < 0.2
    return pd.DataFrame(
        {
            "visit": np.arange(n),
            "temp": (37 + 2 * sick + rng.normal(0, 0.3, n)).round(2),
            "ward": rng.choice(["01", "02", "A"], size=n),
            "clinic": rng.choice(["north", "south"], size=n),
            "state": np.where(sick, "ill", "well"),
        }
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("table_run")
    visits().to_csv(folder / "visits.csv", index=False)
    flags = {
        "data.name": "table", "data.path": str(folder / "visits.csv"), "data.label": "state", "data.site": "clinic",
        "data.pieces": 0,
        "run.folder": str(folder / "runs"), "run.name": "x", "run.rounds": 5,
    }  # fmt: skip
    return folder, run(load_config(None, [], flags))


def test_predictions_from_raw_rows_are_the_trained_model_s(trained: tuple[Path, Result]) -> None:
    folder, result = trained
    model = ft.load_model(folder / "runs" / "x")
    new = visits(50, seed=9)
    new.to_csv(folder / "new.csv", index=False)
    from_file = model.predict_proba(folder / "new.csv")
    from_frame = model.predict_proba(new)
    records = model.predict_proba(new.to_dict("records"))
    assert np.array_equal(from_file, from_frame) and np.array_equal(from_file, records)
    assert np.allclose(from_file.sum(1), 1, atol=1e-6)
    with torch.no_grad():
        direct = torch.softmax(result.module(model.inputs(new, [])), -1).numpy()
    assert np.allclose(from_file, direct, atol=1e-6)
    assert set(model.predict(new)) <= {"ill", "well"}
    assert (model.predict(new) == new["state"]).mean() > 0.9
    one = model.predict_proba({k: v for k, v in new.iloc[3].items() if k != "state"})
    assert np.allclose(one, from_frame[3:4], atol=1e-6)


def test_codes_with_leading_zeros_are_the_same_level_in_a_file_of_digits_only(trained: tuple[Path, Result]) -> None:
    folder, _ = trained
    model = ft.load_model(folder / "runs" / "x")
    new = visits(20, seed=3).assign(ward="01")
    new.to_csv(folder / "digits.csv", index=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(model.predict_proba(folder / "digits.csv"), model.predict_proba(new))


def test_levels_never_seen_are_warned_about(trained: tuple[Path, Result]) -> None:
    model = ft.load_model(trained[0] / "runs" / "x" / "model.json")
    with pytest.warns(UserWarning, match=r"'ward': 5 rows have levels missing from the schema \('Z'\)"):
        model.predict(visits(5).assign(ward="Z"))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (visits(3).drop(columns="temp"), r"lacks column 'temp'"),
        (visits(3).assign(temp="warm"), "should be numbers, but 3 of 3"),
        (visits(3).iloc[:0], "no rows"),
        (visits(3).iloc[0], "not as a Series"),
        (
            np.zeros((2, 3)),
            r"neither the table's columns \(temp, ward, visit\) nor its 4 encoded features; pass a DataFrame",
        ),
        ([[1.0, 2.0]], "list of dicts"),
        (np.array([[0.0, np.nan, 0, 0]]), "these rows are not: 0"),
        ("nowhere.csv", "no file 'nowhere.csv'"),
        (np.array(["a"]), "cannot make samples"),
        ([Image.new("L", (3, 3))], "not images"),
    ],
)
def test_data_that_does_not_fit_is_one_clear_line(trained: tuple[Path, Result], data: object, words: str) -> None:
    model = ft.load_model(trained[0] / "runs" / "x")
    with pytest.raises(FedtailError, match=words) as caught:
        model.predict(data)
    assert "\n" not in str(caught.value)


def test_encoded_rows_are_taken_as_they_are(trained: tuple[Path, Result]) -> None:
    model = ft.load_model(trained[0] / "runs" / "x")
    x = model.inputs(visits(4), [])
    assert np.allclose(model.predict_proba(x.numpy()), model.predict_proba(visits(4)), atol=1e-6)


def image_model(shape: tuple[int, ...], kind: str = "images") -> SavedModel:
    module = build_model("small_cnn", shape, 3, channels=(8,))
    return SavedModel(
        module, ("a", "b", "c"), shape, Transform(1 / 255, (0.5,) * shape[0], (0.25,) * shape[0]), {"kind": kind}
    )


def test_images_by_path_by_pil_and_by_array_agree(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, size=(4, 6, 5, 3), dtype=np.uint8)
    paths = [tmp_path / f"{i}.png" for i in range(4)]
    for path, image in zip(paths, pixels, strict=True):
        Image.fromarray(image).save(path)
    model = image_model((3, 6, 5))
    expected = model.predict_proba(pixels.transpose(0, 3, 1, 2))
    assert expected.shape == (4, 3)
    for data in (
        paths,
        [str(p) for p in paths],
        tmp_path,
        pixels,
        [Image.open(p) for p in paths],
        pixels.astype(float),
    ):
        assert np.array_equal(model.predict_proba(data), expected)
    assert np.allclose(model.predict_proba(paths[2]), expected[2:3], atol=1e-6)
    assert np.allclose(model.predict_proba(Image.open(paths[2])), expected[2:3], atol=1e-6)
    np.save(tmp_path / "x.npy", pixels)
    assert np.array_equal(model.predict_proba(tmp_path / "x.npy"), expected)


def test_grey_images_may_lack_the_channel_axis() -> None:
    model = image_model((1, 4, 4))
    x = np.random.default_rng(0).integers(0, 256, size=(3, 4, 4), dtype=np.uint8)
    assert np.array_equal(model.predict_proba(x), model.predict_proba(x[:, None]))
    assert model.predict_proba(x[0]).shape == (1, 3)


def test_image_mistakes_are_named(tmp_path: Path) -> None:
    model = image_model((3, 6, 5))
    (tmp_path / "bad.png").write_bytes(b"no image")
    for data, words in [
        (np.random.default_rng(0).random((2, 3, 6, 5)), "pixels must be 0 to 255"),
        ([tmp_path / "bad.png"], "is not an image"),
        ([tmp_path / "none.png"], "there is no image"),
        (pd.DataFrame({"a": [1]}), "takes images, not a table"),
        (np.zeros((2, 3, 7, 5)), r"\(N, 3, 6, 5\), not \(2, 3, 7, 5\)"),
        (tmp_path / "bad.npz", "no file"),
    ]:
        with pytest.raises(FedtailError, match=words):
            model.predict(data)


def test_a_model_trained_on_the_paper_s_layout_takes_its_raw_columns() -> None:
    layout = {"kind": "layout", "numeric": ["age"], "vocabulary": {"sex": ["F", "M"]}, "shift": [40.0], "scale": [10.0]}
    model = SavedModel(build_model("mlp", (3,), 2, hidden=(4,)), ("0", "1"), (3,), preprocessing=layout)
    assert model.inputs(pd.DataFrame({"sex": ["M"], "age": [50]}), []).tolist() == [[1.0, 0.0, 1.0]]


def saved(folder: Path, name: str, **options: object) -> Path:
    """A run folder's model files."""
    model = SavedModel(build_model(name, (4,), 2, **options), ("a", "b"), (4,))
    model.architecture = {"name": name, "options": options}
    return model.save(folder)


def test_a_module_trained_in_memory_can_be_kept(tmp_path: Path) -> None:
    pool = ft.data.table_from_frame(visits(), "state", "clinic")
    federation = ft.partition(pool)
    result = ft.fit(federation, torch.nn.Linear(*federation.input_shape, 2), rounds=3)
    model = ft.SavedModel.of(result.module, federation)
    expected = model.predict_proba(visits(9, seed=4))
    model.save(tmp_path / "kept")
    with pytest.raises(FedtailError, match="does not say how its model is built"):
        ft.load_model(tmp_path / "kept")
    again = ft.load_model(tmp_path / "kept", module=torch.nn.Linear(*federation.input_shape, 2))
    assert np.array_equal(again.predict_proba(visits(9, seed=4)), expected)
    assert not list((tmp_path / "kept").glob(".*"))


def test_a_model_of_one_s_own_is_imported_only_when_allowed(tmp_path: Path) -> None:
    code = "from torch import nn\ndef net(input_shape, n_classes):\n    return nn.Linear(input_shape[0], n_classes)\n"
    (tmp_path / "own_net.py").write_text(code)
    folder = saved(tmp_path / "run", f"{tmp_path}/own_net.py:net")
    with pytest.raises(FedtailError, match="allow_code=True"):
        ft.load_model(folder)
    x = np.ones((2, 4))
    allowed = ft.load_model(folder, allow_code=True).predict_proba(x)
    assert np.array_equal(allowed, ft.load_model(folder, module=torch.nn.Linear(4, 2)).predict_proba(x))


def test_damaged_model_folders_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(FedtailError, match="is it a run folder"):
        ft.load_model(tmp_path)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(FedtailError, match="has not finished"):
        ft.load_model(tmp_path)
    folder = saved(tmp_path / "run", "mlp", hidden=[4])
    about = json.loads((folder / "model.json").read_text())
    for content, words in [
        ("{", "cannot be read"),
        ('{"format": 2}', "another version"),
        ('{"format": 1}', "lacks 'architecture'"),
        (json.dumps({**about, "architecture": {"name": "mpl"}}), "did you mean 'mlp'"),
        (
            json.dumps({**about, "architecture": {"name": "mlp", "options": {"hidden": [5]}}}),
            "does not match the model",
        ),
    ]:
        (folder / "model.json").write_text(content)
        with pytest.raises(FedtailError, match=words) as caught:
            ft.load_model(folder)
        assert "\n" not in str(caught.value)
    (folder / "model.json").write_text(json.dumps(about))
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(FedtailError, match="not a complete safetensors file"):
        ft.load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FedtailError, match=r"weights file .* does not exist"):
        ft.load_model(folder)
