import numpy as np
import pytest

from fedtail.core.random import generator, torch_seed
from fedtail.rounds.search import round_rate


def test_cosine_starts_high_ends_low_and_is_half_way_in_the_middle() -> None:
    assert round_rate("cosine", 0, 101, 0.4) == pytest.approx(0.4)
    assert round_rate("cosine", 100, 101, 0.4) == pytest.approx(1e-4)
    assert round_rate("cosine", 50, 101, 0.4) == pytest.approx((0.4 + 1e-4) / 2)
    assert round_rate("cosine", 0, 1, 0.4) == 0.4
    assert round_rate("constant", 7, 10, 0.3) == 0.3


def test_the_same_key_gives_the_same_draws_and_another_key_others() -> None:
    base = generator(1, "batches", 2, 3).random(4)
    np.testing.assert_array_equal(base, generator(1, "batches", 2, 3).random(4))
    for other in [(0, "batches", 2, 3), (1, "augment", 2, 3), (1, "batches", 1, 3), (1, "batches", 2, 4)]:
        assert not np.array_equal(base, generator(*other).random(4))
    assert torch_seed(0, "model") == torch_seed(0, "model") != torch_seed(1, "model")


@pytest.mark.parametrize("kind", ["cosine", "constant"])
def test_warm_up_scales_the_first_rounds_and_leaves_the_rest_alone(kind: str) -> None:
    plain = [round_rate(kind, t, 10, 0.4) for t in range(10)]
    warm = [round_rate(kind, t, 10, 0.4, warmup=3) for t in range(10)]
    assert warm[:3] == pytest.approx([plain[t] * (t + 1) / 4 for t in range(3)])
    assert warm[3:] == plain[3:]
