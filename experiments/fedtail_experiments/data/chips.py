"""``chips``: SYNTHETIC optical images of chips, standing in for the paper's proprietary chip-defect corpus.

What it shares with the corpus as the paper describes it: five factories as sites, hundreds of product types, seven
defect kinds, 1.7 % defects, strong skew between factories (sizes, defect rates, kinds that never occur at a site,
products of their own), and factory-dependent optics. What it does not share: the pictures. They are drawn by
``chip_images``; scores on them say how methods compare under such a skew, nothing about a real line.
"""

from __future__ import annotations

from math import ceil

import numpy as np
import torch

from fedtail.core.random import generator
from fedtail.data.federation import Samples, Transform, stratified_holdout
from fedtail.data.registry import Pooled
from fedtail.errors import FedtailError, check_range
from fedtail_experiments.data.chip_images import DEFECTS, render

CLASSES = ("good", *DEFECTS)
FACTORIES = ("fab A", "fab B", "fab C", "fab D", "fab E")
SHARE = np.array([0.38, 0.27, 0.18, 0.11, 0.06])
"""Of all images, per factory."""
RATE = np.array([0.6, 1.0, 1.9, 0.8, 2.6])
"""Defect rate of each factory, relative to the others."""
KINDS = np.array(
    [  # particle scratch stain edge_chip bridge missing_pad crack
        [0.45, 0.25, 0.12, 0.08, 0.06, 0.03, 0.01],
        [0.10, 0.45, 0.05, 0.20, 0.10, 0.10, 0.00],
        [0.30, 0.05, 0.45, 0.05, 0.05, 0.00, 0.10],
        [0.20, 0.20, 0.00, 0.40, 0.15, 0.05, 0.00],
        [0.05, 0.15, 0.10, 0.05, 0.35, 0.20, 0.10],
    ]
)
"""Mix of defect kinds per factory; a zero is a kind that never occurs there."""
SHARED_PRODUCTS = 0.15
"""Share of products that a second factory makes too."""


def chips(
    n: int = 20_000,
    size: int = 64,
    products: int = 300,
    defect_rate: float = 0.017,
    test_fraction: float = 0.15,
    seed: int = 0,
) -> Pooled:
    """``n`` synthetic chip images of ``size`` x ``size`` pixels (64 to 224), split by factory into 70/15/15."""
    check_range("data.size", size, 64, 224)
    check_range("data.products", products, len(FACTORIES), 5000)
    check_range("data.defect_rate", defect_rate, 0.0, 0.5, open_low=True)
    cells = int((KINDS > 0).sum())
    if n * defect_rate < cells:
        raise FedtailError(
            f"data.n = {n} leaves too few defects of some kinds; use data.n >= {ceil(cells / defect_rate)}"
        )
    counts = label_table(n, defect_rate)
    rng = generator(seed, "chips/order")
    site, y = (v.ravel() for v in np.indices(counts.shape))
    order = rng.permutation(n)
    site, y = np.repeat(site, counts.ravel())[order], np.repeat(y, counts.ravel())[order]
    product = draw_products(site, products, seed)
    x = render(product, site, y, size, seed)
    strata = site * len(CLASSES) + y
    train, test = stratified_holdout(strata, np.arange(n), test_fraction, generator(seed, "chips/test"))
    samples, names = Samples(x, torch.from_numpy(y)), np.array(FACTORIES)
    return Pooled(
        samples.take(train),
        samples.take(test),
        classes=CLASSES,
        name="chips",
        transform=Transform(1 / 255, (0.329, 0.337, 0.342), (0.192, 0.172, 0.174)),
        augment="flip",
        sites=names[site[train]],
        test_sites=names[site[test]],
        model="resnet34",
        validation=3 / 17,
        background=0,
        preprocessing={"kind": "images", "size": [size, size], "channels": 3},
        notes=(
            "SYNTHETIC images, drawn by fedtail: a stand-in for the paper's proprietary chip corpus, not that corpus",
        ),
    )


def label_table(n: int, defect_rate: float) -> np.ndarray:
    """(5, 8) images per factory and class; sums to ``n``, defects to ``round(n * defect_rate)``.

    A kind that occurs at a factory at all has at least one image there.
    """
    defects = round(n * defect_rate)
    weight = (SHARE * RATE)[:, None] * KINDS
    table = np.zeros((len(FACTORIES), len(CLASSES)), dtype=np.int64)
    table[:, 1:] = apportion(defects, weight)
    table[:, 0] = apportion(n, SHARE) - table.sum(1)
    if (table[:, 0] < 1).any():
        raise FedtailError(f"data.defect_rate = {defect_rate:g} leaves a factory without good chips; use a lower rate")
    return table


def apportion(total: int, weight: np.ndarray) -> np.ndarray:
    """Integers in proportion to ``weight`` that sum to ``total`` (largest remainder); no positive weight gets 0."""
    floor = (weight > 0).astype(np.int64)
    if total < floor.sum():
        raise ValueError(f"{total} is too few for {floor.sum()} shares")
    share = weight / weight.sum() * total
    out = np.maximum(np.floor(share).astype(np.int64), floor)
    rest = share - out
    while out.sum() < total:
        i = np.unravel_index(rest.argmax(), rest.shape)
        out[i], rest[i] = out[i] + 1, rest[i] - 1
    while out.sum() > total:
        i = np.unravel_index(np.where(out > floor, rest, np.inf).argmin(), rest.shape)
        out[i], rest[i] = out[i] - 1, rest[i] + 1
    return out


def draw_products(site: np.ndarray, products: int, seed: int) -> np.ndarray:
    """(N,) product of each image. Each factory has a catalogue of its own with Zipf-like volumes; some products are
    made at a second factory too."""
    rng = generator(seed, "chips/products")
    catalogue = np.split(rng.permutation(products), np.cumsum(apportion(products, np.sqrt(SHARE)))[:-1])
    out = np.zeros(len(site), dtype=np.int64)
    for k in range(len(FACTORIES)):
        other = catalogue[(k + 1) % len(FACTORIES)]
        borrowed = rng.choice(other, size=round(SHARED_PRODUCTS * len(other)), replace=False)
        made = rng.permutation(np.concatenate([catalogue[k], borrowed]))
        volume = 1.0 / np.arange(1, len(made) + 1) ** 0.8
        mine = np.flatnonzero(site == k)
        out[mine] = rng.choice(made, size=len(mine), p=volume / volume.sum())
    return out
