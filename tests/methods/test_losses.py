"""Loss-based methods against the formulas of their papers and the authors' code, derived again in plain numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor
from torch.nn import functional as F

from fedtail.errors import FedtailError
from fedtail.methods import METHODS, Batch, ClassBalanced, Focal, LocalRun, LogitAdjustment, Method, WeightedCE
from fedtail.methods.logit_adjustment import MASKED
from fedtail_experiments.methods.grw import GRW
from tests.core.closed_forms import resampled_proportions
from tests.methods.federations import problem, train

LOGITS = np.array([[2.0, -1.0, 0.5], [0.1, 0.2, -0.3], [-4.0, 3.0, 1.0], [1.5, 1.5, 1.5]])
LABELS = np.array([0, 2, 1, 2])


def losses(method: Method, counts: list[int], resampled: list[int] | None = None, **message: Tensor) -> np.ndarray:
    """The method's losses of LOGITS and LABELS at a client with these class counts."""
    n = np.array(counts)
    run = LocalRun(0, 0, n, n if resampled is None else np.array(resampled), 1, 1, 0.1, message)
    const, state = method.start(run, {})
    y = torch.as_tensor(LABELS)
    out, _ = method.loss(torch.as_tensor(LOGITS, dtype=torch.float32), Batch(y, torch.ones(len(y))), const, state)
    return out.numpy()


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


P_TRUE = softmax(LOGITS)[np.arange(4), LABELS]
CE = -np.log(P_TRUE)
counts_with_gaps = st.lists(st.integers(0, 500), min_size=2, max_size=12).filter(lambda c: sum(c) > 0)

# -- weighted cross-entropy ----------------------------------------------------------------------------------


def test_weighted_ce_golden_weights() -> None:
    np.testing.assert_allclose(WeightedCE().class_weights(np.array([100, 10])), [0.55, 5.5])


@given(counts_with_gaps)
def test_weighted_ce_weights_are_scikit_learns_balanced_weights(counts: list[int]) -> None:
    y = np.repeat(np.arange(len(counts)), counts)
    present = np.unique(y)
    got = WeightedCE().class_weights(np.array(counts))
    np.testing.assert_allclose(got[present], compute_class_weight("balanced", classes=present, y=y))
    assert (np.delete(got, present) == 0).all()


def test_weighted_ce_is_torchs_weighted_mean_unless_told_otherwise() -> None:
    counts = [40, 8, 2]
    w = 50 / (3 * np.array(counts))
    z, y, weight = torch.as_tensor(LOGITS), torch.as_tensor(LABELS), torch.as_tensor(w)
    torch_mean = float(F.cross_entropy(z, y, weight=weight))
    assert losses(WeightedCE(), counts).mean() == pytest.approx(torch_mean, rel=1e-5)
    plain = losses(WeightedCE(normalize=False), counts)
    np.testing.assert_allclose(plain, w[LABELS] * CE, rtol=1e-5)
    assert plain.mean() == pytest.approx(float(F.cross_entropy(z, y, weight=weight, reduction="sum")) / 4, rel=1e-5)


@pytest.mark.parametrize("name", ["weighted_ce", "class_balanced", "grw", "ratio_loss"])
def test_normalized_losses_do_not_depend_on_the_scale_of_the_weights_or_on_padding(name: str) -> None:
    method = METHODS.build(name)
    const = {"class_weight": torch.tensor([0.2, 3.0, 500.0])}
    y, z = torch.as_tensor(LABELS), torch.as_tensor(LOGITS, dtype=torch.float32)
    out, _ = method.loss(z, Batch(y, torch.ones(4)), const, {})
    scaled, _ = method.loss(z, Batch(y, torch.ones(4)), {"class_weight": 17 * const["class_weight"]}, {})
    torch.testing.assert_close(scaled, out)
    more = Batch(torch.cat([y, torch.tensor([2, 2])]), torch.tensor([1.0, 1, 1, 1, 0, 0]))
    padded, _ = method.loss(torch.cat([z, z[:2]]), more, const, {})
    torch.testing.assert_close(padded[:4], out)
    assert float(out.mean()) == pytest.approx(float(F.cross_entropy(z, y, weight=const["class_weight"])), rel=1e-5)


@dataclass(frozen=True)
class GroupedWeightedCE(WeightedCE):
    """Weighted cross-entropy in class groups, which no built-in method has."""

    def group_count(self, n_classes: int) -> int:
        return 2

    def groups(self, resampled: np.ndarray) -> np.ndarray:
        return np.arange(len(resampled)) % 2


@pytest.mark.parametrize("path", ["reference", "batched", "graph"])
def test_group_gradients_of_a_normalized_loss_add_up_to_the_batch_gradient_on_every_path(path: str) -> None:
    whole = train(problem(WeightedCE(), path=path), 2)
    grouped = train(problem(GroupedWeightedCE(), path=path), 2)
    plain = train(problem(WeightedCE()), 2)
    torch.testing.assert_close(grouped.x, whole.x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.x, plain.x, rtol=1e-4, atol=1e-5)


@given(st.floats(0.0, 1.0))
def test_original_counts_invert_the_imbalance_and_resampled_counts_level_it(rate: float) -> None:
    counts = np.array([1000.0, 100.0, 10.0])
    q = resampled_proportions(counts, rate)
    original = q * WeightedCE().class_weights(counts)
    np.testing.assert_allclose(original / original[0], (counts / counts[0]) ** -rate, rtol=1e-9)
    level = q * WeightedCE().class_weights(q)
    np.testing.assert_allclose(level, level[0])


def test_weight_counts_chooses_between_original_and_resampled() -> None:
    original = losses(WeightedCE(weight_counts="original", normalize=False), [40, 8, 2], [40, 20, 10])
    resampled = losses(WeightedCE(weight_counts="resampled", normalize=False), [40, 8, 2], [40, 20, 10])
    np.testing.assert_allclose(original, 50 / (3 * np.array([40, 8, 2]))[LABELS] * CE, rtol=1e-5)
    np.testing.assert_allclose(resampled, 70 / (3 * np.array([40, 20, 10]))[LABELS] * CE, rtol=1e-5)


@pytest.mark.parametrize(("power", "ratio"), [(0.0, 1.0), (0.5, 20**0.5), (1.0, 20.0)])
def test_a_power_tempers_the_weights(power: float, ratio: float) -> None:
    weights = WeightedCE(power=power).class_weights(np.array([40.0, 0.0, 2.0]))
    assert weights[2] / weights[0] == pytest.approx(ratio)
    assert weights[1] == 0


# -- focal loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
def test_focal_loss_is_the_papers_formula(gamma: float) -> None:
    np.testing.assert_allclose(losses(Focal(gamma=gamma), [1, 1, 1]), (1 - P_TRUE) ** gamma * CE, rtol=1e-5)


def test_focal_golden_value() -> None:
    # p = 0.9, gamma = 2: a hundred times less than cross-entropy (Lin et al., section 3.2)
    logits = torch.log(torch.tensor([[0.9, 0.1]]))
    out, _ = Focal().loss(logits, Batch(torch.tensor([0]), torch.ones(1)), {}, {})
    assert float(out) == pytest.approx(0.01 * -np.log(0.9), rel=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 2.0])
def test_focal_gradients_are_finite_where_a_sample_is_certain(gamma: float) -> None:
    logits = torch.tensor([[100.0, -100.0], [-100.0, 100.0]], requires_grad=True)
    out, _ = Focal(gamma=gamma).loss(logits, Batch(torch.tensor([0, 0]), torch.ones(2)), {}, {})
    assert torch.isfinite(torch.autograd.grad(out.sum(), [logits])[0]).all()


# -- class-balanced loss -------------------------------------------------------------------------------------


def test_class_balanced_golden_weights() -> None:
    got = ClassBalanced().class_weights(np.array([5000, 50]))
    np.testing.assert_allclose(got, [0.025034, 1.974966], atol=5e-7)


def test_class_balanced_weights_between_uniform_and_inverse_frequency() -> None:
    n = np.array([900, 90, 9])
    np.testing.assert_array_equal(ClassBalanced(b=0.0).class_weights(n), [1, 1, 1])
    inverse = 1 / n
    np.testing.assert_allclose(ClassBalanced(b=1 - 1e-9).class_weights(n), 3 * inverse / inverse.sum(), rtol=1e-5)


@given(counts_with_gaps, st.floats(0.0, 0.99999))
def test_class_balanced_weights_are_the_authors(counts: list[int], b: float) -> None:
    # class-balanced-loss 1d78572, src/cifar_main.py, on the classes present
    n = np.array([c for c in counts if c > 0])
    effective = 1.0 - np.power(b, n)
    weights = (1.0 - b) / effective
    weights = weights / np.sum(weights) * len(n)
    got = ClassBalanced(b=b).class_weights(np.array(counts))
    np.testing.assert_allclose(got[np.array(counts) > 0], weights, rtol=1e-6)


def test_class_balanced_variants_are_the_authors() -> None:
    # class-balanced-loss 1d78572, src/cifar_main.py: sums over outputs, alpha_i = w_{y_i}, focal modulator
    counts = [400, 40, 4]
    w = ClassBalanced().class_weights(np.array(counts))[LABELS]
    labels = np.eye(3)[LABELS]
    sigmoid_ce = np.maximum(LOGITS, 0) - LOGITS * labels + np.log1p(np.exp(-np.abs(LOGITS)))
    gamma = 1.7
    modulator = np.exp(-gamma * labels * LOGITS - gamma * np.log1p(np.exp(-1.0 * LOGITS)))
    want = {
        "softmax": w * CE,
        "sigmoid": w * sigmoid_ce.sum(axis=1),
        "focal": w * (modulator * sigmoid_ce).sum(axis=1),
    }
    for variant, values in want.items():
        got = losses(ClassBalanced(variant=variant, gamma=gamma, normalize=False), counts)
        np.testing.assert_allclose(got, values, rtol=1e-5, err_msg=variant)
    np.testing.assert_allclose(
        losses(ClassBalanced(variant="focal", gamma=0.0), counts), losses(ClassBalanced(variant="sigmoid"), counts)
    )


# -- generalized re-weighting --------------------------------------------------------------------------------


@given(counts_with_gaps, st.floats(0.0, 2.0))
def test_grw_weights_sum_to_the_classes_present_and_follow_the_power_law(counts: list[int], rho: float) -> None:
    n = np.array(counts)
    w = GRW(rho=rho).class_weights(n)
    present = n > 0
    assert w.sum() == pytest.approx(present.sum())
    pi = n[present] / n.sum()
    want = (1 / pi) ** rho
    np.testing.assert_allclose(w[present], want * present.sum() / want.sum(), rtol=1e-6)


def test_grw_uses_resampled_counts_by_default() -> None:
    w = GRW().class_weights(np.array([40, 20, 10]))
    got = losses(GRW(normalize=False), [40, 8, 2], [40, 20, 10])
    np.testing.assert_allclose(got, w[LABELS] * CE, rtol=1e-5)
    np.testing.assert_allclose(losses(GRW(), [40, 8, 2], [40, 20, 10]), 4 * got / w[LABELS].sum(), rtol=1e-5)


# -- logit adjustment ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_logit_adjustment_is_the_authors_loss(tau: float) -> None:
    # google-research logit_adjustment 1d4d2f1: cross-entropy of logits + log(base_probs^tau + 1e-12)
    q = np.array([40, 20, 10]) / 70
    shifted = LOGITS + np.log(q**tau + 1e-12)
    want = -np.log(softmax(shifted)[np.arange(4), LABELS])
    np.testing.assert_allclose(losses(LogitAdjustment(tau=tau), [40, 8, 2], [40, 20, 10]), want, rtol=1e-5)


@given(st.lists(st.integers(1, 1000), min_size=3, max_size=3))
def test_balanced_softmax_is_logit_adjustment_at_tau_1(counts: list[int]) -> None:
    # BalancedMetaSoftmax 34a61e4: logits + log(samples per class); softmax does not see the shift log n
    logits = torch.as_tensor(LOGITS) + torch.tensor(counts, dtype=torch.float64).log()
    want = F.cross_entropy(logits, torch.as_tensor(LABELS), reduction="none")
    np.testing.assert_allclose(losses(LogitAdjustment(), counts), want.numpy(), rtol=2e-5, atol=1e-6)


def test_absent_classes_leave_the_softmax_and_get_no_gradient() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0]], requires_grad=True)
    run = LocalRun(0, 0, np.array([3, 0, 1]), np.array([3, 0, 1]), 1, 1, 0.1, {})
    const, _ = LogitAdjustment().start(run, {})
    assert const["adjustment"][1] == MASKED
    out, _ = LogitAdjustment().loss(logits, Batch(torch.tensor([2]), torch.ones(1)), const, {})
    two = torch.tensor([[1.0, 2.0]]) + torch.tensor([0.75, 0.25]).log()
    assert float(out.detach()) == pytest.approx(float(F.cross_entropy(two, torch.tensor([1]))), rel=1e-6)
    grad = torch.autograd.grad(out.sum(), [logits])[0]
    assert grad[0, 1] == 0.0
    assert torch.isfinite(grad).all()


def test_a_client_with_one_class_has_no_loss_under_its_own_prior() -> None:
    run = LocalRun(0, 0, np.array([0, 9, 0]), np.array([0, 9, 0]), 1, 1, 0.1, {})
    const, _ = LogitAdjustment().start(run, {})
    out, _ = LogitAdjustment().loss(torch.as_tensor(LOGITS), Batch(torch.ones(4).long(), torch.ones(4)), const, {})
    assert (out == 0).all()


def test_a_global_prior_keeps_classes_the_client_lacks() -> None:
    method = LogitAdjustment(prior="global")
    run = LocalRun(0, 1, np.array([3, 0, 1]), np.array([3, 0, 1]), 1, 1, 0.1, {"prior": torch.tensor([0.5, 0.5, 0.0])})
    const, _ = method.start(run, {})
    # class 1 is known to others; class 2 was reported by nobody yet, so the client's own share stands in
    want = np.array([0.5, 0.5, 0.25]) / 1.25
    np.testing.assert_allclose(const["adjustment"].numpy(), np.log(want), rtol=1e-6)


def test_the_local_prior_sends_nothing() -> None:
    run = LocalRun(0, 0, np.array([3, 1]), np.array([3, 2]), 1, 1, 0.1, {})
    assert LogitAdjustment().finish(run, torch.zeros(1), {}, {}, {}) == ({}, {})
    assert LogitAdjustment().init_server(2, 2, 1) == {}
    _, extras = LogitAdjustment(prior="global").finish(run, torch.zeros(1), {}, {}, {})
    assert set(extras) == {"proportions"}
    np.testing.assert_allclose(extras["proportions"].numpy(), [0.6, 0.4], rtol=1e-6)


# -- bad values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("weighted_ce", {"weight_counts": "resample"}, "resampled"),
        ("weighted_ce", {"power": -0.5}, "power"),
        ("focal", {"gamma": -1.0}, "gamma"),
        ("class_balanced", {"b": 1.0}, "method.b"),
        ("class_balanced", {"variant": "hinge"}, "softmax"),
        ("grw", {"rho": float("nan")}, "rho"),
        ("logit_adjustment", {"prior": "globl"}, "global"),
        ("fedprox", {"mu": -0.1}, "mu"),
        ("climb", {"primal_rounds": 0}, "primal_rounds"),
        ("fedgrab", {"balance": "head"}, "tail"),
        ("fednoro", {"temperature": 0.0}, "temperature"),
        ("pcn", {"batches": "random"}, "stratified"),
        ("ratio_loss", {"beta": "much"}, "method.beta"),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(name: str, options: dict[str, object], word: str) -> None:
    with pytest.raises(FedtailError, match=word) as caught:
        METHODS.build(name, **options)
    assert "\n" not in str(caught.value)
