"""CIFAR-LT: official binary records in, exact long-tail counts out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedtail.data.sets import (
    CIFAR10_CLASSES,
    CIFAR100_CLASSES,
    cifar10,
    cifar100,
    long_tail_counts,
    read_records,
    tail_choice,
)
from fedtail.errors import FedtailError


def write(path: Path, labels: np.ndarray, label_bytes: int = 1) -> None:
    """Records whose pixels spell the record number, so that order can be checked."""
    n = len(labels)
    records = np.zeros((n, label_bytes + 3072), dtype=np.uint8)
    records[:, label_bytes - 1] = labels
    records[:, label_bytes] = np.arange(n) % 256
    records[:, label_bytes + 1] = np.arange(n) // 256
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(records.tobytes())


@pytest.fixture
def subset10(tmp_path: Path) -> Path:
    """A long-tailed CIFAR-10 folder: 100 ... 10 training images, 20 test images."""
    folder = tmp_path / "cifar-10-batches-bin"
    y = np.repeat(np.arange(10), long_tail_counts(100, 10, 10))
    for i, part in enumerate(np.array_split(y, 5), 1):
        write(folder / f"data_batch_{i}.bin", part)
    write(folder / "test_batch.bin", np.repeat(np.arange(10), 2))
    return tmp_path


def test_published_profiles_are_exact() -> None:
    c10 = [5000, 3584, 2569, 1842, 1320, 946, 678, 486, 348, 250]
    assert long_tail_counts(5000, 10, 20).tolist() == c10 and sum(c10) == 17_023
    assert long_tail_counts(5000, 10, 100).tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert long_tail_counts(5000, 10, 100).sum() == 12_406
    assert long_tail_counts(500, 100, 20).sum() == 15_907 and long_tail_counts(500, 100, 100).sum() == 10_847


def test_class_names_are_complete_and_sorted_where_the_original_is() -> None:
    assert len(CIFAR10_CLASSES) == 10 and len(set(CIFAR100_CLASSES)) == 100
    assert list(CIFAR100_CLASSES) == sorted(CIFAR100_CLASSES)


def test_records_are_read_channel_first_with_the_last_label_byte(tmp_path: Path) -> None:
    write(tmp_path / "train.bin", np.array([3, 99, 0]), label_bytes=2)
    samples = read_records([tmp_path / "train.bin"], 2, 100)
    assert samples.y.tolist() == [3, 99, 0]
    assert tuple(samples.x.shape) == (3, 3, 32, 32) and samples.x[2, 0, 0, 0] == 2


@pytest.mark.parametrize("imbalance", [1.0, 7.5, 20.0, 50.0])
def test_the_complete_set_gives_exact_counts_at_any_imbalance(imbalance: float) -> None:
    y = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 50))
    keep, notes = tail_choice(y, CIFAR10_CLASSES, 50, imbalance, 0, Path("x"))
    assert np.bincount(y[keep]).tolist() == long_tail_counts(50, 10, imbalance).tolist()
    assert notes == () and (np.diff(keep) > 0).all()


def test_seeds_choose_different_images_of_the_complete_set_and_agree_with_themselves() -> None:
    y = np.repeat(np.arange(10), 50)
    a, b, c = (tail_choice(y, CIFAR10_CLASSES, 50, 10, seed, Path("x"))[0] for seed in (0, 0, 1))
    assert (a == b).all() and not np.array_equal(a, c)


def test_a_subset_in_drawn_order_gives_the_images_the_complete_set_would() -> None:
    """The rule: one default_rng(0), first N_c of a permutation of each class; prefixes of it are stronger tails."""
    y = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 60))
    rng = np.random.default_rng(0)
    drawn = [rng.permutation(np.flatnonzero(y == c))[:n] for c, n in enumerate(long_tail_counts(60, 10, 5))]
    stored = np.concatenate(drawn)
    from_full, _ = tail_choice(y, CIFAR10_CLASSES, 60, 30, 0, Path("x"))
    inside, notes = tail_choice(y[stored], CIFAR10_CLASSES, 60, 30, 0, Path("x"))
    assert sorted(stored[inside].tolist()) == from_full.tolist()
    assert "subset" in notes[0]


def test_a_subset_folder_serves_its_own_and_stronger_tails(subset10: Path) -> None:
    for imbalance in (10, 50):
        pooled = cifar10(imbalance=imbalance, data_dir=str(subset10))
        assert pooled.train.counts(10).tolist() == long_tail_counts(100, 10, imbalance).tolist()
    assert pooled.test.counts(10).tolist() == [2] * 10
    assert (
        pooled.augment == "crop-flip" and pooled.model == "resnet18" and pooled.train.x.dtype.is_floating_point is False
    )


def test_a_milder_tail_than_the_subset_has_is_one_clear_line(subset10: Path) -> None:
    with pytest.raises(FedtailError, match=r"imbalance = 2 needs 92 images of class 'automobile'.*imbalance >= 10 or"):
        cifar10(imbalance=2, data_dir=str(subset10))


def test_truncated_missing_and_mislabelled_files_are_named(subset10: Path) -> None:
    folder = subset10 / "cifar-10-batches-bin"
    whole = (folder / "data_batch_2.bin").read_bytes()
    (folder / "data_batch_2.bin").write_bytes(whole[:-1])
    with pytest.raises(FedtailError, match=r"data_batch_2.bin has \d+ bytes, not a multiple of 3073"):
        cifar10(data_dir=str(subset10))
    (folder / "data_batch_2.bin").write_bytes(b"\x0b" + whole[1:])
    with pytest.raises(FedtailError, match=r"label 11, but only 0..9 are allowed"):
        cifar10(data_dir=str(subset10))
    with pytest.raises(FedtailError, match="missing"):
        read_records([folder / "none.bin"], 1, 10)


def test_cifar100_reads_the_fine_label(tmp_path: Path) -> None:
    write(tmp_path / "cifar-100-binary" / "train.bin", np.repeat(np.arange(100), 4), 2)
    write(tmp_path / "cifar-100-binary" / "test.bin", np.arange(100), 2)
    pooled = cifar100(imbalance=2, data_dir=str(tmp_path))
    assert pooled.train.counts(100).tolist() == long_tail_counts(4, 100, 2).tolist()
    assert pooled.classes[53] == "orange"
