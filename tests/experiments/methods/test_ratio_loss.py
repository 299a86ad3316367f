from __future__ import annotations

import numpy as np
import pytest
import torch

from fedtail.errors import FedtailError
from fedtail.models import build_model
from fedtail.models.flat import FlatModel
from fedtail_experiments.methods.auxiliary import (
    answers_with_its_output_layer,
    auxiliary_monitor,
    class_by_class,
    in_one_pass,
)
from fedtail_experiments.methods.ratio_loss import CAP, NO_CONTRAST, RatioLoss, class_ratios, composition, owned
from tests.methods.federations import awkward_federation, problem, train


def authors_positions(w: np.ndarray) -> np.ndarray:
    """Addressing-Class-Imbalance-FL cd0e996, FEMNIST-*/models/Fed.py, search_neuron_new, position by position."""
    out = np.zeros(w.shape)
    for i in range(w.shape[1]):
        for j in range(w.shape[2]):
            values = w[:, i, j]
            top = int(np.argmax(values))
            if len(np.where(np.abs(values) / abs(values[top]) > 0.80)[0]) < 2:
                out[top, i, j] = 1
    return out


def authors_ratios(w: np.ndarray) -> np.ndarray:
    """The same file, whole_determination: R before alpha + beta R."""
    positions, out = authors_positions(w), []
    for p in range(len(w)):
        own = other = 0.0
        for i, j in np.argwhere(positions[p] == 1):
            own += w[p, i, j]
            other += np.delete(w[:, i, j], p).sum() / (len(w) - 1)
        out.append(min(abs(own) / abs(other), 5000) if other != 0 else 10)
    return np.array(out)


def positions(change: torch.Tensor) -> np.ndarray:
    """(C, rows, columns) 0/1: which positions belong to which class."""
    here, out = owned(change), np.zeros(change.shape)
    rows, columns = np.nonzero(here.at.numpy())
    out[here.owner.numpy(), rows, columns] = 1
    return out


def test_golden_value() -> None:
    change = torch.tensor([0.9, -0.1, -0.2]).view(3, 1, 1).double()
    ratios = class_ratios(change)
    assert float(ratios[0]) == pytest.approx(6.0)
    assert ratios[1:].tolist() == [NO_CONTRAST, NO_CONTRAST]
    assert float(RatioLoss().alpha + RatioLoss().beta * ratios[0]) == pytest.approx(1.6)


@pytest.mark.parametrize("seed", range(5))
def test_positions_and_ratios_are_the_authors(seed: int) -> None:
    w = np.random.default_rng(seed).standard_normal((5, 7, 6)) * np.array([1, 2, 3, 0.5, 4]).reshape(5, 1, 1)
    np.testing.assert_array_equal(positions(torch.as_tensor(w)), authors_positions(w))
    np.testing.assert_allclose(class_ratios(torch.as_tensor(w)).numpy(), authors_ratios(w), rtol=1e-10)


def test_the_ratio_does_not_depend_on_the_step_length() -> None:
    change = torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(class_ratios(change), class_ratios(17.0 * change))


def test_the_ratio_is_capped() -> None:
    change = torch.tensor([1.0, 1e-9, 0.0]).view(3, 1, 1).double()
    assert float(class_ratios(change)[0]) == CAP


def test_a_position_two_classes_share_belongs_to_neither() -> None:
    assert positions(torch.tensor([1.0, 0.81, 0.0]).view(3, 1, 1)).sum() == 0
    assert positions(torch.tensor([1.0, 0.79, 0.0]).view(3, 1, 1)).flatten().tolist() == [1, 0, 0]
    assert positions(torch.tensor([1.0, -0.9, 0.0]).view(3, 1, 1)).sum() == 0
    assert positions(torch.zeros(3, 1, 1)).sum() == 0


def test_composition_recovers_the_class_sizes_an_update_was_made_of() -> None:
    # class p moves its own row up and all other rows down, as cross-entropy does; sizes within (0, 1.5 n / C)
    n_classes, sizes = 4, np.array([30.0, 20.0, 28.0, 22.0])
    n = sizes.sum()
    change = torch.full((n_classes, n_classes, 3), -0.1, dtype=torch.float64)
    for p in range(n_classes):
        change[p, p] = torch.tensor([1.0, 0.8, 1.2])
    total = (torch.as_tensor(sizes).view(-1, 1, 1) * change).sum(0)
    np.testing.assert_allclose(composition(change, total, n).numpy(), sizes, rtol=1e-9)


def test_composition_falls_back_on_equal_shares_where_no_position_is_usable() -> None:
    got = composition(torch.zeros(4, 2, 2), torch.zeros(2, 2), 100.0)
    assert got.tolist() == [25.0] * 4


def test_the_first_round_is_unweighted_and_later_rounds_weigh_every_class_above_alpha() -> None:
    first = train(problem(RatioLoss()), 1)
    assert first.method["class_weight"].tolist() == [1.0] * 4
    later = train(problem(RatioLoss()), 3)
    assert (later.method["class_weight"] > 1.0).all()
    for share in later.history[-1]["method"]["estimated_composition"]:
        assert 0 < share <= 1.5 / 4


def test_the_auxiliary_gradient_is_the_output_layers_mean_gradient_per_class() -> None:
    federation = awkward_federation()
    made = problem(RatioLoss(), federation)
    monitor = auxiliary_monitor(made.model, federation)
    got = monitor(made.model.vector.clone())
    module = made.model.module.eval()
    layer = [m for m in module.modules() if isinstance(m, torch.nn.Linear)][-1]
    samples = federation.pool.take(federation.auxiliary)
    assert np.bincount(samples.y.numpy()).tolist() == [3, 3, 3, 3]
    for c in range(4):
        module.zero_grad()
        mine = samples.y == c
        torch.nn.functional.cross_entropy(module(samples.x[mine]), samples.y[mine]).backward()
        torch.testing.assert_close(got[c], layer.weight.grad)


def test_one_pass_over_all_classes_says_what_a_pass_per_class_says() -> None:
    federation = awkward_federation()
    model = problem(RatioLoss(), federation).model
    samples = federation.pool.take(federation.auxiliary[federation.pool.y.numpy()[federation.auxiliary] != 2])
    x = model.vector.clone()
    plain = class_by_class(model, x, samples, federation.transform, 4)
    assert plain[2].eq(0).all() and plain[1].ne(0).any()
    torch.testing.assert_close(in_one_pass(model, x, samples, federation.transform, 4), plain)


def test_an_output_layer_that_is_not_the_last_word_is_differentiated() -> None:
    federation = awkward_federation()
    samples = federation.pool.take(federation.auxiliary)
    plain = problem(RatioLoss(), federation).model
    shape = tuple(samples.x.shape[1:])
    tempered = FlatModel(torch.nn.Sequential(build_model("mlp", shape, 4), torch.nn.Softmax(1)))
    cosine = FlatModel(build_model("cosine", shape, 4))
    found = [answers_with_its_output_layer(m, samples, federation.transform) for m in (plain, tempered, cosine)]
    assert found == [True, False, False]
    for model in (tempered, cosine):
        monitor, x = auxiliary_monitor(model, federation), torch.randn(len(model.vector))
        torch.testing.assert_close(monitor(x), class_by_class(model, x, samples, federation.transform, 4))


def test_without_an_auxiliary_set_the_error_names_the_setting() -> None:
    federation = awkward_federation(auxiliary=0)
    with pytest.raises(FedtailError, match=r"data\.auxiliary"):
        train(problem(RatioLoss(), federation))
