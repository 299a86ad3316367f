"""Sums that nobody can look into and nobody can alter."""

from __future__ import annotations

import numpy as np
import pytest

from fedtail.federate.protocol.masks import (
    PRIME,
    Fixed,
    MaskError,
    Sum,
    check_seed,
    check_sums,
    derive,
    hide,
    inner,
    pack_sums,
    pad,
    read_answer,
    read_sums,
    stream,
    verify,
)
from fedtail.federate.protocol.wire import Parcel

NAMES = ["east", "north", "south"]
COMMON = bytes(range(32))
SECRETS = {pair: derive(COMMON, *pair) for pair in [("east", "north"), ("east", "south"), ("north", "south")]}
LIMIT = 1 << 31


def pairs_of(name: str) -> dict[str, bytes]:
    return {other: SECRETS[tuple(sorted([name, other]))] for other in NAMES if other != name}  # type: ignore[index]


def answers(vectors: np.ndarray, number: int = 1, limit: int = LIMIT) -> list[Parcel]:
    return [hide(v, name, pairs_of(name), COMMON, number, NAMES, limit) for name, v in zip(NAMES, vectors, strict=True)]


def added(parcels: list[Parcel], number: int, size: int, limit: int = LIMIT) -> tuple[np.ndarray, list[int]]:
    one = Sum(size, limit)
    for parcel in parcels:
        one.add(*read_answer(parcel, number, limit))
    return read_sums(pack_sums([one]), 1, size, limit)


@pytest.mark.parametrize("limit", [1 << 31, 1 << 60])
def test_the_sum_over_all_is_the_sum_and_is_believed(limit: int) -> None:
    vectors = np.random.default_rng(0).integers(-limit // 8, limit // 8, (3, 3000))
    found, checks = added(answers(vectors, limit=limit), 1, 3000, limit)
    np.testing.assert_array_equal(found[0], vectors.sum(0))
    check_sums(found, checks, COMMON, 1, [NAMES])


def test_a_subset_of_the_roster_sums_to_noise_that_no_site_believes() -> None:
    vectors = np.ones((3, 4000), dtype=np.int64)
    found, checks = added(answers(vectors)[:2], 1, 4000)
    assert len(np.unique(found)) > 3900 and abs(found.mean()) < 1e8 and found.std() > 1e9, "uniform in 32 bits"
    with pytest.raises(MaskError):
        check_sums(found, checks, COMMON, 1, [NAMES])


def test_what_one_site_sends_is_as_random_as_its_mask() -> None:
    zeros, large = (answers(np.full((3, 4000), v, dtype=np.int64))[0] for v in (0, 12345))
    for parcel in (zeros, large):
        sent = np.frombuffer(parcel.tensors["masked"].numpy().tobytes(), dtype=np.uint8)
        counts = np.bincount(sent, minlength=256)
        assert ((counts - 62.5) ** 2 / 62.5).sum() < 400, "bytes are even, whatever is hidden"


def test_masks_and_coefficients_serve_one_exchange() -> None:
    vectors = np.zeros((3, 500), dtype=np.int64)
    first, second = (answers(vectors, number)[0] for number in (1, 2))
    same = first.tensors["masked"] == second.tensors["masked"]
    assert same.float().mean() < 0.01 and first.meta["check"] != second.meta["check"]
    seeds = {check_seed(COMMON, n, members) for n in (1, 2) for members in (NAMES, NAMES[:2])}
    assert len(seeds) == len({pad(seed) for seed in seeds}) == len({stream(s, 4, "u8").tobytes() for s in seeds}) == 4


@pytest.mark.parametrize("forge", ["one off", "twice", "nothing", "swapped", "another exchange", "other check"])
def test_a_sum_that_was_altered_is_not_believed(forge: str) -> None:
    """Also not a multiple with a multiple of its check value, which a check without a pad would take."""
    vectors = np.random.default_rng(1).integers(-1000, 1000, (3, 50))
    found, (check,) = added(answers(vectors), 1, 50)
    found, number = found.copy(), 1
    if forge == "one off":
        found[0, 7] += 1
    elif forge == "twice":
        found, check = 2 * found, 2 * check % PRIME
    elif forge == "nothing":
        found, check = 0 * found, 0
    elif forge == "swapped":
        found[0, :2] = found[0, 1::-1]
    elif forge == "another exchange":
        number = 2
    else:
        check = (check + 1) % PRIME
    with pytest.raises(MaskError, match="not the sum of what the sites sent"):
        check_sums(found, [check], COMMON, number, [NAMES])


def test_the_check_is_the_inner_product_in_whole_numbers() -> None:
    rng, seed = np.random.default_rng(2), bytes(32)
    for limit in (1 << 20, 1 << 31, 1 << 60):
        values = rng.integers(-limit, limit, 2500)
        coefficients = (stream(seed, 2500, np.uint64) >> np.uint64(3)).tolist()
        expected = sum(c * v for c, v in zip(coefficients, values.tolist(), strict=True)) % PRIME
        assert inner(values, seed) == expected
        verify(values, (expected + pad(seed)) % PRIME, seed)


def test_fixed_point_is_as_fine_as_it_says() -> None:
    values = np.random.default_rng(3).normal(0, 1, 1000)
    for fixed, fine in ((Fixed(16.0), 2.0**-26), (Fixed(float(1 << 20), 58), 2.0**-38)):
        np.testing.assert_allclose(fixed.decode(fixed.encode(values)), values, atol=fine / 2)
    assert Fixed(1.0).encode(np.array([5.0, -5.0])).tolist() == [1 << 30, -(1 << 30)], "what is larger is cut"
    with pytest.raises(MaskError):
        Fixed(1.0).encode(np.array([np.nan]))
