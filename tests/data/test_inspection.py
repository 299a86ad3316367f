"""Looking at a federation before training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedtail.core.grouping import group_classes
from fedtail.core.resampling import resampled_counts
from fedtail.data import Federation
from fedtail.data.images.contact_sheet import save_contact_sheet
from fedtail.data.inspection import inspect, ratio, save_skew_plot, skew_figure
from fedtail.errors import FedtailError


def federation(table: list[list[int]]) -> Federation:
    """Sites with exactly these training counts."""
    n_classes = len(table[0])
    clients = []
    for row in table:
        y = np.repeat(np.arange(n_classes), row)
        clients.append((np.zeros((len(y), 2), dtype=np.float32), y))
    y = np.arange(n_classes)
    return Federation.from_arrays(
        clients, (np.zeros((n_classes, 2)), y), classes=[f"c{i}" for i in range(n_classes)], validation=0.0
    )


def test_counts_imbalance_and_missing_classes_are_those_of_the_sites() -> None:
    found = inspect(federation([[100, 10, 0], [5, 5, 20]]), rate=0.5)
    assert found.table.tolist() == [[100, 10, 0], [5, 5, 20]] and found.total.tolist() == [105, 15, 20]
    assert found.imbalance.tolist() == [10.0, 4.0]
    assert found.missing(0) == ("c2",) and found.missing(1) == ()
    assert found.test.tolist() == [1, 1, 1] and found.to_dict()["sites"][0]["missing"] == ["c2"]


@pytest.mark.parametrize("rate", [0.0, 0.4, 0.8])
def test_groups_are_what_each_site_would_make_in_training(rate: float) -> None:
    table = [[500, 300, 40, 9, 3], [7, 0, 200, 30, 1], [500, 300, 40, 9, 3]]
    found = inspect(federation(table), rate=rate)
    for row, groups, epoch in zip(table, found.groups, found.epoch, strict=True):
        resampled = resampled_counts(row, rate)
        assert epoch == resampled.sum()
        expected = np.where(resampled > 0, group_classes(resampled, 2), -1)
        assert groups.tolist() == expected.tolist()


def test_skew_is_zero_for_equal_mixes_and_near_one_for_disjoint_ones() -> None:
    assert inspect(federation([[40, 10], [80, 20]])).skew == pytest.approx(0)
    apart = np.eye(10, dtype=int) * 30
    assert inspect(federation(apart.tolist())).skew == pytest.approx(0.9)


def test_ratio_ignores_absent_classes() -> None:
    assert ratio(np.array([10, 0, 2])) == 5 and np.isnan(ratio(np.zeros(3)))


def test_a_rate_below_zero_is_refused() -> None:
    with pytest.raises(FedtailError, match=r"rate = -1 must be at least 0"):
        inspect(federation([[3, 3]]), rate=-1)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_plot_is_written_in_the_format_its_name_asks_for(tmp_path: Path, suffix: str) -> None:
    found = inspect(federation([[100, 10, 0], [5, 5, 20]]))
    path = save_skew_plot(found, tmp_path / "new" / f"skew{suffix}")
    head = path.read_bytes()[:400]
    assert {".png": b"\x89PNG", ".svg": b"<svg", ".pdf": b"%PDF"}[suffix] in head


def test_the_plot_shows_every_count_and_marks_the_rarest_group() -> None:
    found = inspect(federation([[100, 10, 0], [5, 5, 20]]), rate=0.0)
    main = skew_figure(found).axes[0]
    texts = {t.get_text(): t.get_fontweight() for t in main.texts}
    assert set(texts) == {"100", "10", "5", "20"}, "a missing class has no number"
    assert texts["10"] == "bold" and texts["100"] == "normal"


def test_a_plot_of_ten_thousand_sites_takes_seconds(tmp_path: Path) -> None:
    table = np.random.default_rng(0).integers(1, 4, (10_000, 5))
    path = save_skew_plot(inspect(federation(table.tolist())), tmp_path / "x.png")
    assert path.stat().st_size > 1000


def test_an_unknown_plot_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedtailError, match=r"must end in \.png"):
        save_skew_plot(inspect(federation([[3, 3]])), tmp_path / "x.gif")


def test_a_contact_sheet_has_a_row_per_class_with_its_own_images(tmp_path: Path) -> None:
    y = np.repeat([0, 1], [9, 2])
    x = np.where(y == 0, 40, 200).astype(np.uint8)[:, None, None, None] * np.ones((1, 1, 8, 8), dtype=np.uint8)
    pooled = Federation.from_arrays([(x, y)], (x, y), classes=["dark", "light"], validation=0.0)
    sheet = np.asarray(Image.open(save_contact_sheet(pooled, tmp_path / "s.png", columns=3)).convert("L"))
    top, bottom = sheet[: len(sheet) // 2, 150:], sheet[len(sheet) // 2 :, 150:]
    assert (top == 40).mean() > 0.85 and (bottom == 200).mean() > 0.5, "the second class has only two images"
    with pytest.raises(FedtailError, match="--samples needs images"):
        save_contact_sheet(federation([[3, 3]]), tmp_path / "t.png")
    with pytest.raises(FedtailError, match="cannot write --samples"):
        save_contact_sheet(pooled, tmp_path / "s.nothing")
