"""Image folders: sites and classes from folders, any size and mode, clear errors, a cache that is never stale."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedtail.data.images import decode as decode_module
from fedtail.data.images.decode import choose_size, read_image
from fedtail.data.images.folders import images
from fedtail.data.registry import DATASETS
from fedtail.errors import FedtailError
from fedtail_experiments.data.elpv import elpv


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAIL_CACHE", str(tmp_path / "cache"))


def picture(path: Path, value: int = 100, size: tuple[int, int] = (12, 10), mode: str = "L") -> Path:
    """An image of one colour, (width, height) = size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "I;16") else (value, 0, 255)).save(path)
    return path


def grid(root: Path, sites: tuple[str, ...] = ("north", "south"), per: int = 10) -> Path:
    for s, site in enumerate(sites):
        for c, name in enumerate(("crack", "good")):
            for i in range(per * (1 + 2 * c)):
                picture(root / site / name / f"{i}.png", 10 * c + s + 1)
    return root


def test_a_class_with_too_few_images_to_test_is_named(tmp_path: Path) -> None:
    picture(grid(tmp_path) / "north" / "hole" / "0.png")
    found = images(str(tmp_path))
    assert len(found.test) and "too few rows to test class hole" in found.notes


def test_sites_and_classes_come_from_the_folders(tmp_path: Path) -> None:
    pooled = images(str(grid(tmp_path / "d")))
    assert pooled.classes == ("crack", "good") and tuple(pooled.train.x.shape[1:]) == (1, 10, 12)
    assert len(pooled.train) + len(pooled.test) == 80
    assert pooled.sites is not None
    pixel = pooled.train.x[:, 0, 0, 0].numpy()
    assert (pixel == 10 * pooled.train.y.numpy() + (pooled.sites == "south") + 1).all(), (
        "pixels, labels and sites agree"
    )
    assert pooled.preprocessing == {"kind": "images", "size": [10, 12], "channels": 1}


def test_the_test_set_takes_its_share_of_every_class_at_every_site(tmp_path: Path) -> None:
    test = images(str(grid(tmp_path / "d", per=20)), test_fraction=0.25).test
    values, counts = np.unique(test.x[:, 0, 0, 0].numpy(), return_counts=True)
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == {1: 5, 2: 5, 11: 15, 12: 15}


def test_class_folders_alone_have_no_sites(tmp_path: Path) -> None:
    pooled = images(str(grid(tmp_path / "d") / "north"))
    assert pooled.sites is None and len(pooled.train) + len(pooled.test) == 40


def test_a_train_and_a_test_folder_are_taken_as_given(tmp_path: Path) -> None:
    grid(tmp_path / "d" / "train", per=4)
    grid(tmp_path / "d" / "test", per=3)
    pooled = images(str(tmp_path / "d"))
    assert (len(pooled.train), len(pooled.test)) == (32, 24) and pooled.sites is not None
    with pytest.raises(FedtailError, match=r"data\.test_fraction = 0\.3 has no effect beside the test folder"):
        images(str(tmp_path / "d"), test_fraction=0.3)


def test_every_format_and_mode_is_read(tmp_path: Path) -> None:
    for i, (suffix, mode) in enumerate([("png", "RGB"), ("jpg", "RGB"), ("webp", "RGB"), ("tif", "RGB"), ("png", "L"),
                                        ("png", "RGBA"), ("bmp", "RGB"), ("JPEG", "RGB")]):  # fmt: skip
        value = (200, 30, 30) if mode == "RGB" else (200, 30, 30, 9) if mode == "RGBA" else 90
        for c in "ab":
            path = tmp_path / "d" / c / f"{i}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new(mode, (16, 16), value).save(path)
    pooled = images(str(tmp_path / "d"), test_fraction=0.3)
    assert tuple(pooled.train.x.shape[1:]) == (3, 16, 16)
    x = pooled.train.x.float().mean((2, 3)).numpy()
    assert all(np.allclose(row, (200, 30, 30), atol=3) or np.allclose(row, 90, atol=3) for row in x)


def test_a_palette_with_transparency_is_read_without_a_warning(tmp_path: Path, recwarn: Any) -> None:
    Image.new("RGBA", (2, 2), (9, 9, 9, 128)).convert("P").save(tmp_path / "p.png")
    assert read_image(tmp_path / "p.png", (2, 2), 3).shape == (3, 2, 2)
    assert not recwarn.list


def test_deep_images_are_scaled_to_eight_bits(tmp_path: Path) -> None:
    deep = np.array([[0, 65535], [32768, 257]], dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.tif")
    assert read_image(tmp_path / "deep.tif", (2, 2), 1).tolist() == [[[0, 255], [128, 1]]]
    Image.fromarray(np.array([[0.0, 1.0]], dtype=np.float32)).save(tmp_path / "float.tif")
    assert read_image(tmp_path / "float.tif", (1, 2), 1).tolist() == [[[0, 255]]]


def test_rotated_photographs_are_turned_upright(tmp_path: Path) -> None:
    image = Image.new("L", (8, 4))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "x.jpg", exif=exif)
    assert decode_module.survey([tmp_path / "x.jpg"]) == [(8, 4, True)]
    assert read_image(tmp_path / "x.jpg", (8, 4), 1).shape == (1, 8, 4)


@pytest.mark.parametrize(
    ("shapes", "size", "want"),
    [
        ([(10, 12)] * 3, None, (10, 12)),
        ([(10, 12), (30, 20), (40, 40)], None, (20, 20)),
        ([(448, 224)] * 2, None, (224, 112)),
        ([(10, 12)], 32, (32, 32)),
        ([(10, 12)], (8, 16), (8, 16)),
    ],
)
def test_sizes_are_kept_shared_or_chosen(
    shapes: list[tuple[int, int]], size: int | tuple[int, int] | None, want: tuple[int, int]
) -> None:
    chosen, note = choose_size(shapes, size)
    assert chosen == want and bool(note) == any(s != want for s in shapes)


def test_different_sizes_become_one_with_a_note(tmp_path: Path) -> None:
    grid(tmp_path / "d")
    picture(tmp_path / "d" / "north" / "good" / "large.png", size=(60, 50))
    pooled = images(str(tmp_path / "d"))
    assert tuple(pooled.train.x.shape[1:]) == (1, 10, 10) and "resized to 10x10" in pooled.notes[0]


def test_a_corrupt_file_is_named_or_skipped_on_request(tmp_path: Path) -> None:
    root = grid(tmp_path / "d")
    (root / "north" / "good" / "bad.png").write_bytes(b"not an image")
    whole = picture(root / "south" / "good" / "cut.png", size=(12, 10)).read_bytes()
    (root / "south" / "good" / "cut.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FedtailError, match=r"cannot read .*bad.png \(is not an image\).*data.skip_corrupt=true"):
        images(str(root))
    pooled = images(str(root), skip_corrupt=True)
    assert len(pooled.train) + len(pooled.test) == 80 and "2 files could not be read" in pooled.notes[-1]
    (root / "north" / "good" / "bad.png").unlink()
    with pytest.raises(FedtailError, match=r"cannot read .*cut.png"):
        images(str(root))


@pytest.mark.parametrize("allowed", [50, 100], ids=["error", "warning"])
def test_an_image_too_large_to_be_honest_is_bad_and_not_a_crash(
    allowed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow warns of more pixels than its limit and raises, an error of its own kind, at twice the limit."""
    file = picture(tmp_path / "a.png", size=(12, 10))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", allowed)
    found = decode_module.decode(tmp_path, [file], (10, 12), 1, cache=False)
    assert "decompression bomb" in found.bad[0]


def test_bad_folders_are_explained(tmp_path: Path) -> None:
    with pytest.raises(FedtailError, match="is not a folder"):
        images(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FedtailError, match="no images"):
        images(str(tmp_path / "empty"))
    picture(tmp_path / "one" / "good" / "1.png")
    with pytest.raises(FedtailError, match="only one class"):
        images(str(tmp_path / "one"))
    root = grid(tmp_path / "d")
    (root / "east").mkdir()
    with pytest.raises(FedtailError, match=r"site folder .*east has no images"):
        images(str(root))
    (root / "east").rmdir()
    picture(root / "stray.png")
    with pytest.raises(FedtailError, match=r"only site/class/image, but has stray.png next to"):
        images(str(root))
    with pytest.raises(FedtailError, match=r"data.path is missing|missing"):
        DATASETS.build("images")


def test_bad_options_are_explained(tmp_path: Path) -> None:
    root = str(grid(tmp_path / "d"))
    with pytest.raises(FedtailError, match=r"data.background 'goood' is unknown; did you mean 'good'"):
        images(root, background="goood")
    with pytest.raises(FedtailError, match=r"data.color 'gray' is unknown; did you mean 'grey'"):
        images(root, color="gray")
    with pytest.raises(FedtailError, match=r"data.size = 3 is outside"):
        images(root, size=3)
    assert images(root, background="good").background == 1
    assert images(root, color="rgb").train.x.shape[1] == 3


def test_the_cache_serves_the_same_pixels_and_notices_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = grid(tmp_path / "d")
    first = images(str(root))
    calls: list[Path] = []
    real = decode_module.read_image

    def counted(path: Path, size: tuple[int, int], channels: int) -> np.ndarray:
        calls.append(path)
        return real(path, size, channels)

    monkeypatch.setattr(decode_module, "read_image", counted)
    assert images(str(root)).train.x.equal(first.train.x) and calls == []
    picture(root / "north" / "good" / "0.png", 250)
    assert (images(str(root)).train.x == 250).any() or (images(str(root)).test.x == 250).any()
    assert len(calls) == 80
    for entry in (tmp_path / "cache" / "images").iterdir():
        entry.write_bytes(b"damaged")
    assert len(images(str(root)).train) == len(first.train)
    shutil.rmtree(tmp_path / "cache")
    images(str(root), cache=False)
    assert not (tmp_path / "cache").exists()


def test_elpv_reads_its_official_layout_and_folders_alike(tmp_path: Path) -> None:
    lines = []
    for i in range(40):
        p, kind = (0.0, 0.3333333333333333, 0.6666666666666666, 1.0)[i % 4], ("mono", "poly")[i % 2]
        picture(tmp_path / "a" / "elpv" / "images" / f"cell{i:04}.png", i)
        picture(tmp_path / "b" / "elpv" / kind / f"level{i % 4}" / f"cell{i:04}.png", i)
        lines.append(f"images/cell{i:04}.png  {p} {kind}")
    (tmp_path / "a" / "elpv" / "labels.csv").write_text("\n".join(lines))
    one, two = (elpv(data_dir=str(tmp_path / d)) for d in "ab")
    assert one.classes == two.classes == ("level0", "level1", "level2", "level3") and one.background == 0
    assert one.train.counts(4).sum() + one.test.counts(4).sum() == 40
    assert one.sites is not None and set(one.sites.tolist()) == {"mono", "poly"}
    with pytest.raises(FedtailError, match=r"line 1 is not"):
        (tmp_path / "a" / "elpv" / "labels.csv").write_text("x\n")
        elpv(data_dir=str(tmp_path / "a"))
