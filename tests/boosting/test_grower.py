"""Trees across sites are the trees of all rows together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtail.boosting.bins import Column, read_columns
from fedtail.boosting.grower import Level, Question, Site, asking, best_round, boost, lowest_round
from fedtail.boosting.predictor import Forest, Plan
from fedtail.methods.trees import Trees
from tests.boosting.growing import a_plan, grown, same, table
from tests.totals import LocalTotals


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.sampled_from([2, 3]))
def test_every_partition_into_sites_gives_the_bits_of_pooled_rows(seed: int, n_sites: int, n_classes: int) -> None:
    x, y = table(seed, 150, n_classes)
    plan, rng = a_plan(n_classes=n_classes, rounds=2, column_share=0.6), np.random.default_rng(seed)
    owner = rng.integers(0, n_sites, len(y))
    pooled, _ = grown(x, y, [np.arange(len(y))], plan)
    apart, _ = grown(x, y, [rng.permutation(np.flatnonzero(owner == k)) for k in range(n_sites)], plan)
    assert same(pooled, apart)
    assert (pooled.column >= 0).any()


def test_rows_of_all_sites_tell_after_each_round_how_good_the_forest_is() -> None:
    x, y = table(1)
    forest, sites = grown(x, y, [np.arange(200), np.arange(200, 300)], held=np.arange(300, 400))
    assert len(forest.checks) == forest.rounds
    assert all(check[3:].sum() == 100 for check in forest.checks)
    assert forest.checks[-1][0] < forest.checks[0][0] and forest.checks[-1][1] < forest.checks[0][1]
    assert sites[0].rows is not None
    z = forest.logits(sites[0].rows[1].scores)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    table_of = np.zeros((3, 3), dtype=int)
    np.add.at(table_of, (y[300:], p.argmax(1)), 1)
    assert np.array_equal(forest.checks[-1][3:].reshape(3, 3), table_of)


def test_a_forest_that_goes_on_is_the_forest_that_never_stopped() -> None:
    x, y = table(2)
    parts, held = [np.arange(150), np.arange(150, 300)], np.arange(300, 400)
    whole, _ = grown(x, y, parts, a_plan(rounds=5, column_share=0.6), held)
    half, _ = grown(x, y, parts, a_plan(rounds=2, column_share=0.6), held)
    again, _ = grown(x, y, parts, a_plan(rounds=5, column_share=0.6), held, half)
    assert same(whole, again)
    assert all(np.array_equal(a, b) for a, b in zip(whole.checks, again.checks, strict=True))


def test_scores_of_the_forest_are_those_that_rows_have_after_training() -> None:
    x, y = table(3)
    forest, sites = grown(x, y, [np.arange(300)], held=np.arange(300, 400))
    assert sites[0].rows is not None
    for rows in sites[0].rows:
        assert np.array_equal(forest.scores(rows.bins), rows.scores)


def test_trees_keep_to_their_leaves_and_their_depth() -> None:
    x, y = table(4, 1000)
    forest, _ = grown(x, y, [np.arange(1000)], a_plan(leaves=5, depth=3))
    assert (forest.column >= 0).sum(-1).max() == 4
    for t, k in np.ndindex(forest.column.shape[:2]):
        assert _depth(forest, t, k, 0) <= 3


def _depth(forest: Forest, t: int, k: int, node: int) -> int:
    if forest.column[t, k, node] < 0:
        return 0
    child = int(forest.child[t, k, node])
    return 1 + max(_depth(forest, t, k, child), _depth(forest, t, k, child + 1))


def test_trees_of_a_round_ask_for_their_share_of_the_columns_alone_and_sites_send_no_others() -> None:
    x, y = table(2)
    plan = a_plan(rounds=8, column_share=0.5)
    seen = [plan.seen(t) for t in range(plan.rounds)]
    assert {len(columns) for columns in seen} == {2} and set().union(*seen) == {0, 1, 2, 3}
    assert seen != [a_plan(seed=1, column_share=0.5).seen(t) for t in range(plan.rounds)]
    levels: list[Level] = []

    def listening(question: Question) -> np.ndarray:
        levels.extend([question] if isinstance(question, Level) else [])
        return ask(question)

    ask = asking(LocalTotals(1), {0: Site((read_columns(x, plan.columns), y), (np.zeros((4, 0)), y[:0]))})
    forest = boost(plan, listening)
    for t, columns in enumerate(seen):
        used = set(forest.column[t].ravel().tolist()) - {-1}
        assert used and used <= set(columns)
    assert {level.columns for level in levels if level.tree == 3} == {seen[3]}
    for level in levels:
        assert level.size == len(level.built) * sum(int(forest.start.bins.sizes[f]) for f in level.columns)


def test_training_ends_when_held_out_rows_find_nothing_better() -> None:
    rng = np.random.default_rng(5)
    x, y = table(5)
    y = rng.permutation(y)  # nothing to learn
    forest, _ = grown(x, y, [np.arange(300)], a_plan(rounds=30, patience=3), np.arange(300, 400))
    assert forest.rounds < 30
    assert lowest_round(forest) == forest.rounds - 3 <= best_round(forest)


def test_the_forest_to_keep_is_the_longest_that_held_out_rows_cannot_tell_from_the_best() -> None:
    forest, _ = grown(*table(8), [np.arange(300)], a_plan(rounds=3), np.arange(300, 400))
    counts = forest.checks[0][3:]
    losses = np.array([1.0, 0.9, 0.92, 0.99, 0.93, 1.0]) * 100
    for spread, kept in ((0.1, 2), (1.0, 5), (3.0, 6)):
        both = zip(losses * 2**20, ((losses / 100) ** 2 + spread**2) * 100 * 2**8, strict=True)
        forest.checks = [np.array([0, a, b, *counts]).astype(np.int64) for a, b in both]
        assert best_round(forest) == kept and lowest_round(forest) == 2


def test_a_rare_class_weighs_more_in_training_and_its_probability_is_corrected() -> None:
    x, y = table(6, 3000)
    forest, sites = grown(x, y, [np.arange(3000)], a_plan(rounds=20))
    share = np.bincount(y) / len(y)
    assert np.allclose(forest.start.weights / forest.start.weights[0], (share / share[0]) ** -0.5)
    assert sites[0].rows is not None
    z = forest.logits(sites[0].rows[0].scores)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    assert np.allclose(p.mean(0), share, atol=0.02)


def test_importance_is_of_the_columns_that_tell() -> None:
    x, y = table(7, 2000)
    forest, _ = grown(x, y, [np.arange(2000)])
    share = dict(zip("abkc", forest.importance(), strict=True))
    assert share["a"] > 0.3 and share["k"] > 0.2 and share["b"] < 0.05
    assert sum(share.values()) == pytest.approx(1)


def test_forests_are_as_good_as_those_of_scikit_learn() -> None:
    from sklearn.ensemble import HistGradientBoostingClassifier

    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 8)).astype(np.float32)
    z = np.tanh(x[:, :4] @ rng.normal(size=(4, 3))) * 2 + x[:, :3] * x[:, 1:4]
    y = (z + rng.gumbel(size=z.shape)).argmax(1)
    plan = Plan(tuple(Column(f"{i}", i) for i in range(8)), 3, 25, Trees(depth=6, power=0.0, column_share=1.0))
    forest, _ = grown(x[:2000], y[:2000], [np.arange(2000)], plan)
    logits = forest.logits(forest.scores(forest.start.bins.of(read_columns(x[2000:], plan.columns))))
    other = HistGradientBoostingClassifier(
        max_iter=25, max_depth=6, l2_regularization=1.0, max_bins=128, early_stopping=False
    ).fit(x[:2000], y[:2000])
    loss = [-np.mean(lp[np.arange(1000), y[2000:]]) for lp in (_log(logits), np.log(other.predict_proba(x[2000:])))]
    assert loss[0] < loss[1] + 0.01


def _log(z: np.ndarray) -> np.ndarray:
    return np.asarray(z - np.log(np.exp(z).sum(1, keepdims=True)))
