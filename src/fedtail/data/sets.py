"""Data sets with a name, most of them made long-tailed: N_c = int(N_max xi^(-c/(C-1))).

CIFAR is read from the official binary files; nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fedtail.core.random import generator
from fedtail.data.federation import Samples, Transform, stratified_holdout
from fedtail.data.registry import DATASETS, Pooled
from fedtail.data.sources import SOURCES, locate
from fedtail.errors import FedtailError, check_range

PIXELS = 3 * 32 * 32

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FINE_LABELS = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""
CIFAR100_CLASSES = tuple(_FINE_LABELS.split())
CIFAR = {
    "cifar10": (CIFAR10_CLASSES, 5000, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": (CIFAR100_CLASSES, 500, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
"""Classes, training images of each, and the mean and deviation of each channel."""


def long_tail_counts(n_max: int, n_classes: int, imbalance: float) -> np.ndarray:
    """(C,) exponential profile from ``n_max`` (class 0) down to ``n_max / imbalance``.

    >>> long_tail_counts(5000, 10, 20).tolist()
    [5000, 3584, 2569, 1842, 1320, 946, 678, 486, 348, 250]
    """
    check_range("imbalance", imbalance, 1.0)
    c = np.arange(n_classes) / max(n_classes - 1, 1)
    return (n_max * imbalance**-c + 1e-9).astype(np.int64)


def long_tail_index(y: np.ndarray, imbalance: float, *, n_classes: int, seed: int = 0) -> np.ndarray:
    """Indices of a long-tailed subset, ascending; class 0 stays whole as far as the rarest class allows."""
    y = np.asarray(y)
    rng = generator(seed, "longtail")
    profile = long_tail_counts(int(np.bincount(y, minlength=n_classes).max()), n_classes, imbalance)
    keep = [rng.permutation(np.flatnonzero(y == c))[: profile[c]] for c in range(n_classes)]
    return np.sort(np.concatenate(keep))


@DATASETS.add("digits")
def digits(imbalance: float = 20.0, test_fraction: float = 0.3, seed: int = 0) -> Pooled:
    """1,797 images of ten digits; a balanced ``test_fraction`` is held out, the rest follows the long-tail profile."""
    from sklearn.datasets import load_digits  # 1 s to import: not for commands that do not need it

    raw = load_digits()
    x = torch.as_tensor(raw.images, dtype=torch.float32).unsqueeze(1)
    y = np.asarray(raw.target, dtype=np.int64)
    train, test = stratified_holdout(y, np.arange(len(y)), test_fraction, generator(seed, "digits/test"))
    train = train[long_tail_index(y[train], imbalance, n_classes=10, seed=seed)]
    samples = Samples(x, torch.as_tensor(y))
    return Pooled(
        samples.take(train),
        samples.take(test),
        classes=tuple(str(c) for c in range(10)),
        name="digits",
        transform=Transform(scale=1 / 16, mean=(0.3,), std=(0.38,)),
        model="mlp",
        model_options={"hidden": (64, 32)},
    )


@DATASETS.add("blobs")
def blobs(
    n_classes: int = 5,
    n_features: int = 10,
    n_max: int = 500,
    imbalance: float = 20.0,
    spread: float = 1.0,
    test_per_class: int = 100,
    seed: int = 0,
) -> Pooled:
    """Class centres are standard normal times 2; samples scatter around them with ``spread``."""
    check_range("n_classes", n_classes, 2)
    check_range("spread", spread, 0.0, open_low=True)
    rng = generator(seed, "blobs")
    centres = 2.0 * rng.standard_normal((n_classes, n_features))

    def draw(counts: np.ndarray) -> Samples:
        y = np.repeat(np.arange(n_classes), counts)
        x = centres[y] + spread * rng.standard_normal((len(y), n_features))
        return Samples(torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y))

    return Pooled(
        draw(long_tail_counts(n_max, n_classes, imbalance)),
        draw(np.full(n_classes, test_per_class)),
        classes=tuple(f"class {c}" for c in range(n_classes)),
        name="blobs",
        model="mlp",
        model_options={"hidden": (32, 16)},
    )


@DATASETS.add("sites")
def sites(
    schema: str | None = None,
    classes: Sequence[str] = (),
    size: int | Sequence[int] = 64,
    channels: int = 3,
    augment: str = "flip",
) -> Pooled:
    """Data at the sites of a deployment, each described in its site.toml; only `fedtail deploy run` can use it.

    Where the server is not trusted, sites sign what the data are, and tell nothing: ``schema`` is the schema file of
    their tables, or ``classes``, ``size``, ``channels`` and ``augment`` are those of their images.
    """
    raise FedtailError("data.name = 'sites' is data that lives at the sites of a deployment; use `fedtail deploy run`")


@DATASETS.add("cifar10")
def cifar10(imbalance: float = 20.0, seed: int = 0, data_dir: str | None = None) -> Pooled:
    """CIFAR-10 with an exponential long tail of any imbalance (1 = the balanced original) and the balanced test set."""
    return _cifar("cifar10", imbalance, seed, data_dir)


@DATASETS.add("cifar100")
def cifar100(imbalance: float = 20.0, seed: int = 0, data_dir: str | None = None) -> Pooled:
    """CIFAR-100 (fine labels) with an exponential long tail of any imbalance and the balanced test set."""
    return _cifar("cifar100", imbalance, seed, data_dir)


def _cifar(name: str, imbalance: float, seed: int, data_dir: str | None) -> Pooled:
    classes, full, mean, std = CIFAR[name]
    folder = locate(name, data_dir)
    *train_files, test_file = (folder / file for file in SOURCES[name].files)
    label_bytes = 1 if name == "cifar10" else 2
    train = read_records(train_files, label_bytes, len(classes))
    test = read_records([test_file], label_bytes, len(classes))
    y = train.y.numpy()
    keep, notes = tail_choice(y, classes, full, imbalance, seed, folder)
    return Pooled(
        train.take(keep),
        test,
        classes=classes,
        name=name,
        transform=Transform(scale=1 / 255, mean=mean, std=std),
        augment="crop-flip",
        model="resnet18",
        notes=notes,
    )


def read_records(files: Sequence[Path], label_bytes: int, n_classes: int) -> Samples:
    """Records of ``label_bytes`` label bytes (the last one counts) and 3,072 pixels, channels first."""
    size, parts = label_bytes + PIXELS, []
    for file in files:
        if not file.is_file():
            raise FedtailError(f"{file} is missing; complete the official folder, or delete it to download it again")
        raw = np.fromfile(file, dtype=np.uint8)
        if raw.size == 0 or raw.size % size:
            raise FedtailError(
                f"{file} has {raw.size} bytes, not a multiple of {size}: it is truncated or not the binary version; "
                "delete it and download it again"
            )
        parts.append(raw.reshape(-1, size))
    records = np.concatenate(parts)
    y = records[:, label_bytes - 1].astype(np.int64)
    if y.max() >= n_classes:
        raise FedtailError(f"{files[0].parent} has label {int(y.max())}, but only 0..{n_classes - 1} are allowed")
    x = np.ascontiguousarray(records[:, label_bytes:]).reshape(-1, 3, 32, 32)
    return Samples(torch.from_numpy(x), torch.from_numpy(y))


def tail_choice(
    y: np.ndarray, classes: Sequence[str], full: int, imbalance: float, seed: int, folder: Path
) -> tuple[np.ndarray, tuple[str, ...]]:
    """(ascending indices, notes) of the long-tailed training set: N_c = int(N_max xi^(-c/(C-1))).

    From the complete data set, N_c of each class are drawn by the published rule: one ``default_rng(seed)``, and for
    c = 0, 1, ... the first N_c of a permutation of the class. A folder that holds only a long-tailed subset is taken
    as drawn by that rule already, its samples in drawn order, so a stronger tail is a prefix of each class in file
    order. A subset drawn from the same files with the same seed then gives the same images.
    """
    have = np.bincount(y, minlength=len(classes))
    complete = bool((have >= full).all())
    want = long_tail_counts(full if complete else int(have[0]), len(classes), imbalance)
    short = np.flatnonzero(have < want)
    if short.size:
        c = int(short[0])
        raise FedtailError(
            f"data.imbalance = {imbalance:g} needs {want[c]} images of class {classes[c]!r}, but {folder} holds a "
            f"long-tailed subset with {have[c]}; use data.imbalance >= {have[0] / max(have[-1], 1):g} or the complete "
            "data set"
        )
    draw = np.random.default_rng(seed).permutation if complete else np.array
    keep = np.sort(np.concatenate([draw(np.flatnonzero(y == c))[:n] for c, n in enumerate(want)]))
    note = (
        f"{folder.name} holds a long-tailed subset of {len(y):,} images: the tail is a prefix of each class, "
        "whatever the seed"
    )
    return keep, () if complete else (note,)
