"""Synthetic chips: exact counts and skew, the same pixels from the same seed, defects one can see."""

from __future__ import annotations

import numpy as np
import pytest

from fedtail.core.random import generator
from fedtail.data.partitions import partition
from fedtail.errors import FedtailError
from fedtail_experiments.data.chip_images import DEFECTS, PAINTERS, draw_product, render
from fedtail_experiments.data.chips import CLASSES, FACTORIES, KINDS, apportion, chips, draw_products, label_table


def test_defects_are_exactly_the_asked_share_and_skewed_between_factories() -> None:
    table = label_table(20_000, 0.017)
    assert table.sum() == 20_000 and table[:, 1:].sum() == 340
    assert ((table[:, 1:] > 0) == (KINDS > 0)).all(), "kinds occur exactly where the factory makes them"
    rates = table[:, 1:].sum(1) / table.sum(1)
    assert rates.max() > 3 * rates.min() and table.sum(1).max() > 5 * table.sum(1).min()
    assert (np.diff(table.sum(0)) <= 0).all(), "classes are ordered from most to least frequent"


def test_the_paper_scale_has_the_paper_counts() -> None:
    assert label_table(780_000, 0.017)[:, 1:].sum() == 13_260


@pytest.mark.parametrize("total", [31, 100, 12_345])
def test_apportion_is_exact_and_leaves_no_positive_share_empty(total: int) -> None:
    out = apportion(total, KINDS)
    assert out.sum() == total and ((out > 0) == (KINDS > 0)).all()


def test_every_factory_has_products_of_its_own_and_shares_some() -> None:
    site = np.repeat(np.arange(5), 4000)
    product = draw_products(site, 300, 0)
    made = [set(product[site == k].tolist()) for k in range(5)]
    assert len(set.union(*made)) > 280
    for k in range(5):
        others = set.union(*(made[j] for j in range(5) if j != k))
        assert len(made[k] - others) > 10 and made[k] & others


def test_the_same_seed_gives_the_same_pixels_and_another_seed_others() -> None:
    options = {"n": 700, "defect_rate": 0.05, "products": 12}
    a, b, c = (chips(**options, seed=s) for s in (0, 0, 1))
    assert a.train.x.equal(b.train.x) and a.train.y.equal(b.train.y)
    assert not a.train.x.equal(c.train.x)


def test_a_pool_has_factories_as_sites_and_declares_its_background() -> None:
    pooled = chips(n=1000, defect_rate=0.08, products=10)
    assert tuple(pooled.train.x.shape[1:]) == (3, 64, 64) and pooled.train.x.dtype.is_floating_point is False
    assert pooled.classes == CLASSES and pooled.background == 0 and "SYNTHETIC" in pooled.notes[0]
    federation = partition(pooled)
    assert federation.sites == FACTORIES and federation.background == 0
    held = sum(len(v) for v in federation.validation) / 1000
    assert held == pytest.approx(0.15, abs=0.03) and len(federation.test) == pytest.approx(150, abs=15)


@pytest.mark.parametrize("size", [64, 224])
@pytest.mark.parametrize("kind", DEFECTS)
def test_every_defect_changes_its_picture_and_stays_local(kind: str, size: int) -> None:
    """On 8 layouts: some pixels change visibly, most do not."""
    for p in range(8):
        layout = draw_product(generator(0, "t", p), size)
        shift = np.array([2, 3])
        clean = layout.canvas[:, 2 : 2 + size, 3 : 3 + size].astype(np.float32)
        image = clean.copy()
        PAINTERS[kind](image, layout, shift, generator(1, kind, p))
        change = np.abs(image - clean).max(0)
        assert np.isfinite(image).all() and image.min() >= -1 and image.max() <= 256
        assert (change > 25).sum() > 0.0005 * size * size, (kind, p)
        assert (change > 25).mean() < 0.35, (kind, p)


def test_factories_differ_in_light_and_noise() -> None:
    product, y = np.zeros(500, dtype=np.int64), np.zeros(500, dtype=np.int64)
    x = render(product, np.repeat(np.arange(5), 100), y, 64, 0).float().reshape(5, 100, 3, 64, 64)
    colour = x.mean((1, 3, 4))
    assert (colour[:, 0] / colour[:, 2]).std() > 0.05
    grain = (x[..., :3, 1:4] - x[..., :3, :3]).std((1, 2, 3, 4))
    assert grain[4] > 1.4 * grain[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 32}, r"data.size = 32 is outside \[64, 224\]"),
        ({"n": 1000}, r"data.n = 1000 leaves too few defects.*data.n >= 1824"),
        ({"products": 2}, r"data.products = 2 (is outside|must be)"),
        ({"defect_rate": 0.0}, r"data.defect_rate = 0.0 (is outside|must be)"),
    ],
)
def test_options_out_of_range_are_one_line(options: dict[str, float], message: str) -> None:
    with pytest.raises(FedtailError, match=message):
        chips(**options)  # type: ignore[arg-type]
