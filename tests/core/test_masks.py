"""Masks hide single messages and cancel in sums; what is left of sums that could single out a site is known."""

from __future__ import annotations

import os
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtail.core.masks import (
    Fixed,
    MaskError,
    Release,
    add_pair_masks,
    isolated,
    open_releases,
    pair_seeds,
    share_of_noise,
    stream,
    unmasked,
    with_checks,
    without_checks,
)


class Members:
    """Sites with a secret for each pair."""

    def __init__(self, n: int) -> None:
        self.names = [f"s{i:02d}" for i in range(n)]
        pairs = {pair: os.urandom(32) for pair in combinations(self.names, 2)}
        self.secrets = {
            me: {peer: pairs[min(me, peer), max(me, peer)] for peer in self.names if peer != me} for me in self.names
        }
        self.own = {me: os.urandom(32) for me in self.names}

    def seeds(self, me: str, context: bytes = b"sum 1") -> dict[str, bytes]:
        return pair_seeds(me, self.secrets[me], self.names, context)

    def message(self, me: str, values: np.ndarray, context: bytes = b"sum 1", *, own: bool = False) -> np.ndarray:
        masked = add_pair_masks(with_checks(values), me, self.seeds(me, context))
        return masked + stream(self.own[me], len(masked), masked.dtype) if own else masked

    def release(self, me: str, left: list[str], context: bytes = b"sum 1") -> Release:
        return Release.of(me, self.own[me], self.secrets[me], self.seeds(me, context), left, context)


@given(st.integers(3, 8), st.sampled_from([np.uint32, np.uint64]), st.integers(0, 40))
@settings(max_examples=25, deadline=None)
def test_masks_cancel_in_the_sum_over_all_members(n: int, dtype: type, size: int) -> None:
    sites, rng = Members(n), np.random.default_rng(n)
    values = rng.integers(0, np.iinfo(dtype).max, (n, size), dtype=dtype)
    total = np.sum([sites.message(me, v) for me, v in zip(sites.names, values, strict=True)], axis=0, dtype=dtype)
    np.testing.assert_array_equal(without_checks(total), values.sum(axis=0, dtype=dtype))


def test_one_masked_message_looks_the_same_whatever_it_hides() -> None:
    """Bits of a message are fair coins, and do not go along with those of the values: 20 standard deviations of the
    largest of 64 would be seen at once."""
    n, sites = 20_000, Members(3)
    for values in (np.zeros(n, np.uint64), np.full(n, 7, np.uint64), np.arange(n, dtype=np.uint64)):
        message = sites.message("s00", values)[:n]
        bits = (message[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
        assert np.abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(n)
        assert abs(np.corrcoef(message.astype(float), np.arange(n))[0, 1]) < 5 / np.sqrt(n)
    two = sites.message("s00", values)[:n] + sites.message("s01", values)[:n]
    assert len(np.unique(two)) > 0.99 * n, "nor do two of three members cancel"


@pytest.mark.parametrize("what", ["altered", "replayed", "another question", "missing", "twice"])
def test_a_sum_whose_masks_do_not_cancel_is_refused(what: str) -> None:
    sites, values = Members(4), np.arange(30, dtype=np.uint64)
    messages = [sites.message(me, values) for me in sites.names]
    if what == "altered":
        messages[1][4] += np.uint64(1)
    elif what in ("replayed", "another question"):
        messages[1] = sites.message("s01", values, b"sum 0")
    elif what == "missing":
        messages = messages[1:]
    else:
        messages[1] = messages[2]
    with pytest.raises(MaskError, match="do not cancel"):
        without_checks(np.sum(messages, axis=0, dtype=np.uint64))


def test_twenty_sites_of_which_six_vanish_after_their_message_have_the_sum_of_the_other_fourteen() -> None:
    sites, rng = Members(20), np.random.default_rng(0)
    values = {me: rng.integers(0, 1 << 20, 100, dtype=np.uint32) for me in sites.names}
    messages = {me: sites.message(me, v, own=True) for me, v in values.items()}
    left = sites.names[:3] + sites.names[9:]
    opened = open_releases({me: sites.release(me, left) for me in left}, sites.names)
    total = unmasked(np.sum([messages[me] for me in left], axis=0, dtype=np.uint32), opened)
    np.testing.assert_array_equal(without_checks(total), np.sum([values[me] for me in left], axis=0, dtype=np.uint32))


def test_a_server_that_claims_a_live_site_vanished_cannot_unmask_it() -> None:
    """All others hand out the masks they share with it; what it added of its own stays."""
    sites, values = Members(4), np.arange(50, dtype=np.uint32)
    message = sites.message("s03", values, own=True)
    left = sites.names[:3]
    opened = open_releases({me: sites.release(me, left) for me in left}, sites.names)
    shared = {me: seeds["s03"] for me, (_, seeds) in opened.items()}
    bare = -add_pair_masks(-message, "s03", shared)
    np.testing.assert_array_equal(bare[:50] - stream(sites.own["s03"], 52, np.uint32)[:50], values)
    assert not np.isin(bare[:50], values).any(), "without the seed of its own mask there is nothing to see"


def test_survivors_who_are_told_of_different_survivors_give_nothing_away() -> None:
    """The victim is told that all are there, the others that it vanished: neither set's secrets open."""
    sites, values = Members(4), np.arange(50, dtype=np.uint32)
    left = sites.names[:3]
    releases = {me: sites.release(me, left) for me in left}
    releases["s03"] = sites.release("s03", sites.names)
    mixed = {
        **releases,
        **{
            me: Release(
                releases[me].sealed[:32], {**releases[me].pieces, "s03": releases[me].pieces.get("s00", bytes(32))}
            )
            for me in left
        },
    }
    opened = open_releases(mixed, sites.names)
    assert opened["s03"][0] != sites.own["s03"], "its own mask opens only if all agree on the survivors"
    total = np.sum([sites.message(me, values, own=True) for me in sites.names], axis=0, dtype=np.uint32)
    with pytest.raises(MaskError):
        without_checks(unmasked(total, opened))


def test_a_release_for_fewer_vanished_members_does_not_fit() -> None:
    sites = Members(4)
    releases = {me: sites.release(me, sites.names[:3]) for me in sites.names[:3]}
    with pytest.raises(MaskError, match="do not match the members"):
        open_releases(releases, sites.names[:3])


def test_fixed_point_is_as_close_as_it_says_and_never_wraps() -> None:
    rng, n = np.random.default_rng(0), 20
    for limit in (1e-3, 1.0, 37.5):
        parts = rng.uniform(-limit, limit, (n, 500)) / n
        fixed = Fixed(limit)
        total = np.sum([fixed.encode(p) for p in parts], axis=0, dtype=np.uint32)
        assert np.abs(fixed.decode(total) - parts.sum(0)).max() <= fixed.error(n) < 1e-7 * limit
    extreme = np.sum([Fixed(1.0).encode(np.array([1.0, -1.0])), Fixed(1.0).encode(np.array([0.5, -0.5]))], axis=0)
    np.testing.assert_allclose(Fixed(1.0).decode(extreme), [1.5, -1.5])
    assert Fixed(1.0).decode(Fixed(1.0).encode(np.array([9.0])))[0] == 1.0, "what is beyond the limit is cut"
    with pytest.raises(MaskError, match="not finite"):
        Fixed(1.0).encode(np.array([np.nan]))


def test_which_sums_together_single_out_sites() -> None:
    five = list("abcde")
    assert isolated([five], 3) == ()
    assert isolated([five, list("abcd")], 3) == ("e",)
    assert isolated([five, list("abc")], 3) == ("d", "e") and isolated([five, list("abc")], 2) == ()
    assert isolated([list("abcdef"), list("abc")], 3) == (), "two clusters of three"
    assert isolated([list("abc"), list("ab")], 2) == ("c",)
    # No two of these differ by one site, but a + b - c - d and so on add up to one.
    assert isolated([list("abc"), list("acd"), list("abd"), list("bcd")], 2) == ("a",)
    assert isolated([["a", "b", "c"], ["a", "b", "c"]], 4) == ("a", "b", "c")


def test_shares_of_noise_add_up_to_the_noise_of_the_sum() -> None:
    shares = [share_of_noise(20_001, 3000.0 / np.sqrt(14), bytes(32), str(i)) for i in range(14)]
    total = np.sum(shares, axis=0)
    assert abs(total.std() / 3000.0 - 1) < 0.03 and abs(total.mean()) < 3000.0 * 5 / np.sqrt(20_001)
    kurtosis = ((total - total.mean()) ** 4).mean() / total.var() ** 2
    assert abs(kurtosis - 3) < 0.2
    assert not np.array_equal(shares[0], shares[1]) and shares[0].dtype == np.int64
