import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtail.data import Federation, Samples, long_tail_counts, partition, split
from fedtail.data.federation import stratified_holdout
from fedtail.data.partitions import by_shares
from fedtail.data.registry import Pooled
from fedtail.errors import FedtailError

LABELS = np.repeat(np.arange(6), [300, 150, 80, 40, 20, 10])


@given(st.sampled_from(["iid", "dirichlet", "labels"]), st.integers(3, 8), st.integers(0, 50))
def test_partition_is_exact_and_preserves_class_totals(scheme: str, clients: int, seed: int) -> None:
    parts, _ = split(LABELS, scheme, clients, alpha=0.5, seed=seed)
    assert len(parts) == clients
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


def test_same_seed_same_split_other_seed_another() -> None:
    for scheme in ("iid", "dirichlet"):
        a, b, c = (split(LABELS, scheme, 4, seed=s)[0] for s in (1, 1, 2))
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        assert not all(np.array_equal(x, y) for x, y in zip(a, c, strict=True))


def test_iid_gives_every_client_the_global_mix_within_one_sample() -> None:
    parts, _ = split(LABELS, "iid", 7)
    counts = np.stack([np.bincount(LABELS[p], minlength=6) for p in parts])
    assert np.all(np.abs(counts - np.bincount(LABELS) / 7) <= 1)


def test_large_alpha_approaches_the_iid_split() -> None:
    parts, _ = split(LABELS, "dirichlet", 5, alpha=1e6)
    counts = np.stack([np.bincount(LABELS[p], minlength=6) for p in parts])
    np.testing.assert_allclose(counts, np.tile(np.bincount(LABELS) / 5, (5, 1)), atol=1.01)


def test_dirichlet_leaves_every_client_its_minimum() -> None:
    parts, _ = split(LABELS, "dirichlet", 10, alpha=0.1, min_samples=10, seed=3)
    assert min(map(len, parts)) >= 10


def test_column_gives_one_client_per_site_with_its_name() -> None:
    sites = np.array(["north", "south"] * 300)
    parts, names = split(LABELS, "column", 99, column=sites)
    assert names == ["north", "south"]
    np.testing.assert_array_equal(parts[0], np.arange(0, 600, 2))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"scheme": "dirichlett"}, "did you mean 'dirichlet'"),
        ({"scheme": "dirichlet", "alpha": 0.0}, "alpha"),
        ({"scheme": "iid", "n_clients": 601}, "exceeds the 600 available samples"),
        ({"scheme": "iid", "n_clients": 0}, "clients = 0"),
        ({"scheme": "column"}, "column"),
    ],
)
def test_bad_splits_are_named(kwargs: dict, words: str) -> None:
    with pytest.raises(FedtailError, match=words):
        split(LABELS, kwargs.pop("scheme"), kwargs.pop("n_clients", 5), **kwargs)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.floats(0, 0.9), st.integers(0, 99))
def test_validation_never_takes_the_last_sample_of_a_class(counts: list[int], fraction: float, seed: int) -> None:
    y = np.repeat(np.arange(len(counts)), counts)
    rest, held = stratified_holdout(y, np.arange(len(y)), fraction, np.random.default_rng(seed))
    np.testing.assert_array_equal(np.sort(np.concatenate([rest, held])), np.arange(len(y)))
    assert set(y[rest]) == set(range(len(counts)))
    taken = np.bincount(y[held], minlength=len(counts))
    assert np.all(np.abs(taken - fraction * np.array(counts)) <= 1)


def test_long_tail_profile_has_the_published_counts() -> None:
    assert long_tail_counts(5000, 10, 100).tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert [int(long_tail_counts(5000, 10, x).sum()) for x in (20, 100)] == [17023, 12406]
    assert [int(long_tail_counts(500, 100, x).sum()) for x in (20, 100)] == [15907, 10847]


def test_federation_keeps_training_validation_auxiliary_and_test_apart() -> None:
    x = torch.arange(600, dtype=torch.float32).unsqueeze(1)
    fed = partition(
        Samples(x, torch.as_tensor(LABELS)), Samples(x[:6], torch.arange(6)), clients=4, auxiliary=2, validation=0.2
    )
    used = np.concatenate([*fed.train, *fed.validation, fed.auxiliary])
    np.testing.assert_array_equal(np.sort(used), np.arange(600))
    assert np.bincount(LABELS[fed.auxiliary]).tolist() == [2] * 6


def test_from_arrays_maps_any_labels_and_names_what_is_wrong() -> None:
    a, b = (np.zeros((4, 3)), ["ok", "bad", "ok", "ok"]), (np.ones((2, 3)), ["bad", "ok"])
    fed = Federation.from_arrays([a, b], (np.zeros((1, 3)), ["bad"]), validation=0.0)
    assert fed.classes == ("bad", "ok") and fed.label_map().tolist() == [[1, 3], [1, 1]]
    with pytest.raises(FedtailError, match="client 0 has 4 inputs but 3 labels"):
        Federation.from_arrays([(np.zeros((4, 3)), [0, 1, 0])], b)
    with pytest.raises(FedtailError, match="do not occur at any client"):
        Federation.from_arrays([a], (np.zeros((1, 3)), ["new"]))


def test_from_datasets_reads_any_torch_dataset() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(12, 2), torch.arange(12) % 3)
    fed = Federation.from_datasets([data, data], data, validation=0.0)
    assert fed.n_clients == 2 and fed.n_classes == 3 and len(fed.test) == 12


@given(st.integers(3, 9), st.integers(0, 20))
def test_labels_gives_every_client_two_classes_and_every_class_a_client(k: int, seed: int) -> None:
    parts, _ = split(LABELS, "labels", k, seed=seed)
    held = np.stack([np.bincount(LABELS[p], minlength=6) > 0 for p in parts])
    assert (held.sum(1) == 2).all() and held.any(0).all()
    assert np.ptp(held.sum(0)) <= 1  # classes are spread as evenly as their number allows


def test_too_few_clients_for_the_classes_says_what_would_do() -> None:
    with pytest.raises(FedtailError, match="2 clients with 2 labels each cannot cover 6 classes; use 3 clients"):
        split(LABELS, "labels", 2)


def samples() -> Samples:
    y = torch.as_tensor(LABELS)
    return Samples(torch.zeros(len(y), 2), y)


def test_an_unknown_partition_is_one_clear_line() -> None:
    with pytest.raises(FedtailError, match=r"'sites\.csv'.*dirichlet"):
        partition(samples(), samples(), partition="sites.csv")


def test_the_last_samples_of_a_class_go_to_the_largest_remainders() -> None:
    """Of five samples at 58, 26 and 16 %, that is 2.9, 1.3 and .8, the two that are left go to the first and third."""
    shares = np.array([[0.58, 1 / 3], [0.26, 1 / 3], [0.16, 1 / 3]])
    dealt = by_shares(np.repeat([0, 1], [5, 30]), shares, np.random.default_rng(0))
    assert [int((rows < 5).sum()) for rows in dealt] == [3, 1, 1]


def test_a_number_of_clients_beside_sites_of_the_data_is_an_error_unless_it_is_theirs() -> None:
    data = Samples(torch.zeros(60, 2), torch.arange(60) % 3)
    pooled = Pooled(data, data, ("a", "b", "c"), name="own", sites=np.arange(60) % 4)
    assert partition(pooled).n_clients == partition(pooled, clients=4).n_clients == 4
    assert partition(pooled, clients=3, partition="iid").n_clients == 3
    for clients in (3, 5):
        with pytest.raises(FedtailError, match=f"data.clients = {clients} has no effect: 'own' has 4 sites of its own"):
            partition(pooled, clients=clients)
    for key, value in {"alpha": 0.1, "min_samples": 3}.items():
        assert partition(pooled, **{key: value}, partition="dirichlet").n_clients == 5
        with pytest.raises(FedtailError, match=f"data.{key} = {value} has no effect: 'own' has 4 sites"):
            partition(pooled, **{key: value})
