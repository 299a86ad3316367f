"""A model after training: judged, promised, watched and recalibrated on rows that it has not seen."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedtail as ft
from fedtail.core.decisions import COVERAGES, Decision
from fedtail.core.shift import drift_p, evidence_of_loss, spent
from fedtail.core.totals import total
from fedtail.errors import FedtailError
from fedtail.runs.evaluate import evaluate, evaluation
from fedtail.runs.explain import importance, parts_of, reasons, sentence
from fedtail.runs.judged import Judged, judge
from fedtail.runs.monitor import ALPHA, GRADES, Look, Seen, Watch, count
from fedtail.runs.recalibrate import keep, recalibrate
from fedtail.runs.saved import SavedModel, load_model
from fedtail.words import percent

SITES = ("north", "south", "west")


def rows(n: int, seed: int, rare: float = 0.1, shift: float = 0.0) -> pd.DataFrame:
    """Numbers and a word that tell a rare class from a usual one, fairly well."""
    rng = np.random.default_rng(seed)
    y = rng.random(n) < rare
    return pd.DataFrame(
        {
            "a": rng.normal(1.6 * y + shift),
            "b": rng.normal(0.8 * y),
            "word": np.where(rng.random(n) < 0.2 + 0.4 * y, "high", "low"),
            "site": np.array(SITES)[rng.integers(3, size=n)],
            "y": np.where(y, "rare", "usual"),
        }
    )


@pytest.fixture(scope="module")
def model() -> SavedModel:
    federation = ft.Federation.from_tables(rows(3000, 0), label="y", site="site", validation=0.3)
    decision = {"goal": "recall", "find": "rare", "recall": 0.8, "confidence": 0.9}
    return ft.fit(federation, "mlp", rounds=8, lr=0.3, decision=decision).model()


def simulated(n: int, rng: np.random.Generator, honest: bool = True) -> Judged:
    """Rows of a model whose probabilities are right, or too sure."""
    p = rng.beta(0.5, 2.0, n)
    y = (rng.random(n) < p).astype(np.int64)
    shown = p if honest else p**2 / (p**2 + (1 - p) ** 2)
    return Judged(("no", "yes"), np.stack([1 - shown, shown], 1), Decision(), y)


def test_a_trained_model_carries_a_promise_and_sets(model: SavedModel, tmp_path: Path) -> None:
    promise = model.decision.promise
    assert promise is not None and promise.kept and promise.recall == 0.8 and promise.positives > 50
    again = load_model(model.save(tmp_path / "m"))
    assert again.decision == model.decision and len(again.decision.sets) == len(COVERAGES)


def test_the_promise_is_kept_on_new_rows_and_evaluated_with_intervals(model: SavedModel) -> None:
    found = evaluate(judge(model, rows(4000, 1)))
    rare, usual = found["classes"]
    assert (rare["class"], usual["class"]) == ("rare", "usual")
    assert rare["recall"]["value"] >= 0.8 and rare["found"] + rare["missed"] == rare["cases"]
    for entry in found["metrics"].values():
        if "interval" in entry:
            assert entry["interval"][0] <= entry["value"] <= entry["interval"][1]
    with_interval = {name for name, entry in found["metrics"].items() if "interval" in entry}
    assert {"accuracy", "macro_f1", "pr_auc", "rare_pr_auc"} <= with_interval
    assert set(found["sites"]) == set(SITES) and sum(s["rows"] for s in found["sites"].values()) == 4000
    assert found["rows"] == 4000 and np.sum(found["confusion"]) == 4000


def test_a_model_without_a_mistake_on_few_rows_is_not_certain_to_make_none() -> None:
    y = np.repeat([0, 1], [12, 48])
    p = np.where(y[:, None] == [0, 1], 0.9, 0.1)
    metrics = evaluate(Judged(("rare", "usual"), p, Decision(), y))["metrics"]
    for name in ("accuracy", "macro_f1", "balanced_accuracy"):
        assert metrics[name]["value"] == 1.0 and 0.85 < metrics[name]["interval"][0] < 0.98, name


def test_a_model_that_finds_none_of_few_cases_is_not_certain_to_find_none() -> None:
    y = np.repeat([0, 1], [12, 400])
    metrics = evaluate(Judged(("rare", "usual"), np.tile([0.1, 0.9], (412, 1)), Decision(), y))["metrics"]
    recall = 0.15  # at which 12 cases are all missed in one of seven draws
    assert metrics["balanced_accuracy"]["interval"][1] > (1 + recall) / 2
    assert metrics["macro_f1"]["interval"][1] > metrics["macro_f1"]["value"] + 0.05


def test_a_site_with_one_class_alone_cannot_tell_how_good_the_model_is() -> None:
    y = np.array([0, 1, 1, 1, 1, 1])
    p = np.where(y[:, None] == [0, 1], 0.9, 0.1)
    p[1] = 0.9, 0.1
    sites = np.array(["a", "a", "a", "b", "b", "b"])
    found = evaluate(Judged(("rare", "usual"), p, Decision(), y, sites))
    assert found["sites"]["b"]["macro_f1"] is None and found["sites"]["b"]["classes"]["rare"]["cases"] == 0
    assert found["metrics"]["worst_site"]["value"] == pytest.approx(found["sites"]["a"]["macro_f1"])


def test_evaluation_agrees_with_scikit_learn(model: SavedModel) -> None:
    from sklearn.metrics import average_precision_score, f1_score

    frame = rows(1500, 2)
    judged = judge(model, frame)
    found, answers = evaluate(judged), model.answers(judged.p)
    assert found["metrics"]["macro_f1"]["value"] == pytest.approx(f1_score(frame["y"], answers, average="macro"))
    exact = average_precision_score(frame["y"] == "rare", judged.p[:, 0])
    assert found["classes"][0]["pr_auc"] == pytest.approx(exact, abs=0.015)  # rows with equal scores count as mixed


def test_rare_levels_of_few_reference_rows_are_no_alarm_however_many_new_rows_there_are() -> None:
    rng, alarms = np.random.default_rng(2), 0

    def drawn(n: int, share: np.ndarray) -> Judged:
        x = torch.from_numpy((rng.random((n, len(share))) < share).astype(np.float32))
        y = (rng.random(n) < 0.3).astype(np.int64)
        return Judged(("no", "yes"), np.tile([0.7, 0.3], (n, 1)), Decision(), y, x=x)

    for _ in range(150):
        share = rng.uniform(0.2, 3.0, 3) / 200
        reference, now = drawn(200, share), drawn(30_000, share)
        alarms += bool(Watch.begin(reference).look(replace(now, y=None)).changed)
    assert alarms <= 3, "of 150 first looks, which may spend half of half of 5 %"
    strange = Watch.begin(drawn(1000, np.full(3, 0.3))), drawn(200, np.full(3, 0.3))
    strange[1].x[:10] = 20.0
    assert any(row["what"] == "strange rows" and row["p"] < 0.01 for row in strange[0].look(strange[1]).drift)


def test_sets_hold_the_truth_in_every_class(model: SavedModel) -> None:
    frame = rows(4000, 3)
    sets = model.sets(model.predict_proba(frame), 0.9)
    for name in model.classes:
        inside = [name in s for s, y in zip(sets, frame["y"], strict=True) if y == name]
        assert np.mean(inside) >= 0.82  # found on about 90 rare rows
    assert min(map(len, sets)) == 1 and max(map(len, sets)) == 2
    with pytest.raises(FedtailError, match=r"coverage.*0\.7"):
        model.sets(model.predict_proba(frame), 0.7)


def test_a_scikit_learn_model_and_an_onnx_file_are_judged_alike(
    model: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    from fedtail.runs.export import export_onnx

    frame = rows(300, 4)
    file = export_onnx(model, tmp_path / "m.onnx")
    ours, theirs = evaluate(judge(model, frame)), evaluate(judge(file, frame))
    assert theirs["confusion"] == ours["confusion"]
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "class Model:\n"
        "    classes_ = ['rare', 'usual']\n"
        "    def predict_proba(self, frame):\n"
        "        assert 'y' not in frame\n"
        "        p = 1 / (1 + np.exp(2 - frame['a']))\n"
        "        return np.stack([p, 1 - p], 1)\n"
        "model = Model()\n"
    )
    monkeypatch.chdir(tmp_path)
    found = evaluate(judge("mine.py:model", frame, label="y", site="site"))
    assert found["rows"] == 300 and 0.5 < found["metrics"]["roc_auc"]["value"] < 1
    with pytest.raises(FedtailError, match="--label"):
        judge("mine.py:model", frame)


def test_rows_without_labels_cannot_be_evaluated(model: SavedModel) -> None:
    with pytest.raises(FedtailError, match="have no labels"):
        evaluate(judge(model, rows(50, 5).drop(columns="y")))


def test_months_without_a_change_are_quiet_and_a_change_is_noticed(model: SavedModel, tmp_path: Path) -> None:
    watch = Watch.begin(judge(model, rows(2000, 6)))
    for month in range(12):
        record = watch.look(judge(model, rows(400, 10 + month)), str(month))
        assert record.changed == [], record.drift
        assert record.mix["rare"] == pytest.approx(0.1, abs=0.08)
    watch.save(tmp_path / "monitor.json")
    watch = Watch.load(tmp_path / "monitor.json")
    assert len(watch.looks) == 12
    record = watch.look(judge(model, rows(400, 30, shift=1.0)), "13")
    assert any(what == "input a" for what in record.changed) and "changed: " in record.sentence()


def test_values_never_seen_are_strange(model: SavedModel) -> None:
    watch = Watch.begin(judge(model, rows(2000, 6)))
    far = rows(400, 31)
    far.loc[:39, "a"] = 60.0
    record = watch.look(judge(model, far), "1")
    assert 40 <= record.seen.strange < 80 and "strange rows" in record.changed


def test_the_inputs_of_trees_are_watched_by_name_the_site_among_them() -> None:
    forest = ft.fit(ft.Federation.from_tables(rows(600, 0), label="y", site="site"), method="trees", rounds=2).model()
    watch = Watch.begin(judge(forest, rows(600, 1)))
    assert set(watch.inputs) == {"a", "b", "word", "site"} and watch.inputs[-1] == "site"
    moved = rows(600, 2).assign(site="north")
    assert "input site" in watch.look(judge(forest, moved)).changed


def test_a_life_without_drift_ends_without_an_alarm_in_nineteen_of_twenty_cases() -> None:
    alarms = 0
    for life in range(60):
        rng = np.random.default_rng(life)
        watch = Watch.begin(simulated(500, rng), ("yes", 0.3))
        for month in range(12):
            if watch.look(simulated(60, rng), str(month)).changed:
                alarms += 1
                break
    assert alarms <= 3


def cells(found: int, missed: int, wrong: int = 0, right: int = 0) -> Seen:
    """Labelled rows of "yes", found or missed, and of "no", answered right or wrong, all as sure."""
    seen = Seen.none(2, 0)
    seen.truth[1, :, 5] = missed, found
    seen.truth[0, :, 5] = right, wrong
    return replace(seen, cells=seen.truth.sum(0))


def test_a_look_may_spend_its_share_of_half_the_error_and_no_more() -> None:
    close = 0
    for more in range(60, 400):
        watch = Watch(("no", "yes"), (), cells(100, 0, 0, 900))
        watch.looks = [Look(str(i), Seen.none(2, 0), {}) for i in range(2)]
        look = watch.look(replace(cells(more, 0, 0, 1000 - more), truth=0 * watch.reference.truth))
        p = {row["what"]: row["p"] for row in look.drift}
        limit = spent(ALPHA / 2, 3)
        assert look.changed == [what for what, value in p.items() if value <= limit]
        close += limit < p["answers"] < 2 * limit
        single = drift_p(np.array([900, 100]), np.array([1000 - more, more]), ordered=False)
        assert p["answers"] == pytest.approx(min(1.0, 4 * single))  # two tests of each of two spans
    assert close  # where the share decides


def test_a_promise_is_given_up_at_four_times_the_odds_of_the_shared_error() -> None:
    for missed in range(10, 40):
        watch = Watch(("no", "yes"), (), cells(900, 100), "yes", 0.9)
        broken = any(what.startswith("recall") for what in watch.look(cells(100 - missed, missed)).changed)
        assert broken == (evidence_of_loss(100 - missed, missed, 0.9) >= np.log(4 / ALPHA))


def test_calibration_is_corrected_for_every_cell_and_span_that_is_tested() -> None:
    close, limit = 0, spent(ALPHA / 4, 1)
    for wrong in range(10, 40):
        watch = Watch(("no", "yes"), (), cells(0, 0, 100, 900))
        look = watch.look(cells(0, 0, wrong, 100 - wrong))
        p = drift_p(np.array([100, 900]), np.array([wrong, 100 - wrong]))
        assert ("calibration" in look.changed) == (p * GRADES <= limit)
        close += p <= limit < p * GRADES
    assert close  # where the correction decides


def test_labels_of_an_earlier_look_are_taken_once_and_rows_are_not_counted_twice() -> None:
    rng = np.random.default_rng(0)
    watch = Watch.begin(simulated(2000, rng), ("yes", 0.9))
    rows = simulated(500, rng)
    first = watch.look(replace(rows, y=None), "May")
    assert first.changed == [] and not first.seen.truth.any()
    again = watch.look(rows, "May")
    assert again is first and len(watch.looks) == 1 and again.seen.n == again.seen.truth.sum() == 500
    assert [what.split(" (")[0] for what in again.changed] == ["recall of yes"]
    for repeated in (rows, replace(rows, y=None)):
        with pytest.raises(FedtailError, match="look 'May' already"):
            watch.look(repeated, "May")


def test_counts_of_sites_give_what_their_rows_together_give(model: SavedModel) -> None:
    held, new = judge(model, rows(1500, 6)), judge(model, rows(400, 10))
    whole = Watch.begin(held)
    parts, later = list(held.by_site().values()), list(new.by_site().values())
    known = total(count(part) for part in parts).inputs
    reference = total(count(part, known, among=True) for part in parts)
    assert all(np.array_equal(v, vars(whole.reference)[name]) for name, v in vars(reference).items())
    watch = Watch.of(reference, held.classes, held.preprocessing, ("rare", 0.8))
    seen = total(count(part, known) for part in later)
    seen = Seen.none(2, len(watch.inputs)).like(seen.flat())
    assert watch.look(seen, "1").to_json() == whole.look(new, "1").to_json()
    scores = total(part.scores for part in later)
    assert evaluation(scores, new.classes)["classes"] == evaluate(new)["classes"]
    ours, theirs = evaluation(scores, new.classes)["metrics"], evaluate(new)["metrics"]
    assert ours == {name: theirs[name] for name in ours} and {"log_loss", "brier", "pr_auc"} < set(ours)


def test_labels_that_come_late_show_a_broken_promise_and_boasting_probabilities() -> None:
    rng = np.random.default_rng(0)
    watch = Watch.begin(simulated(2000, rng), ("yes", 0.9))  # about half is found at 0.5
    for month in range(4):
        record = watch.look(simulated(300, rng, honest=False), str(month))
    assert any(what.startswith("recall of yes") for what in record.changed)
    assert "calibration" in record.changed


def test_recalibration_restores_honest_probabilities_and_the_promise(model: SavedModel, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    found = recalibrate(simulated(4000, rng, honest=False))
    assert found.decision.temperature == pytest.approx(2.0, rel=0.1)
    assert found.after["log_loss"] < found.before["log_loss"]
    fresh = recalibrate(judge(model, rows(3000, 7)))
    assert fresh.decision.promise is not None and fresh.decision.promise.positives > 200
    folder = model.save(tmp_path / "m")
    before = keep(folder, fresh)
    assert load_model(folder).decision == fresh.decision
    assert Decision.from_json(pd.read_json(before, typ="series").to_dict()).temperature == model.decision.temperature


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_a_new_class_mix_found_without_labels_leaves_what_a_threshold_finds_as_it_is(share: float) -> None:
    rng = np.random.default_rng(0)

    def drawn(n: int, share: float) -> Judged:
        y = (rng.random(n) < share).astype(np.int64)
        odds = 2 * rng.normal(2.0 * y) - 2 + np.log(0.1 / 0.9)
        p = 1 / (1 + np.exp(-odds))
        return Judged(("usual", "rare"), np.stack([1 - p, p], 1), Decision(thresholds=(None, 0.12)), y)

    watch, new = Watch.begin(drawn(8000, 0.1)), drawn(4000, share)
    moved = recalibrate(replace(new, y=None), watch).decision
    assert (moved.thresholds[1] < 0.05) if share < 0.1 else (moved.thresholds[1] > 0.2)
    before, after = (d.answers(d.probabilities(new.raw)) for d in (new.decision, moved))
    assert (before == after).mean() > 0.999
    refit = recalibrate(new).decision  # and with labels, where nothing is promised of it
    assert (before == refit.answers(refit.probabilities(new.raw))).mean() > 0.99


def test_weights_are_refitted_for_the_goal_they_were_chosen_for() -> None:
    rng = np.random.default_rng(0)
    y = (rng.random(4000) < 0.1).astype(np.int64)
    p = 1 / (1 + np.exp(-(2 * rng.normal(2.0 * y) - 2 + np.log(0.1 / 0.9))))
    rows = Judged(("usual", "rare"), np.stack([1 - p, p], 1), Decision(weights=(0.5, 1.5)), y)
    equal, best = (recalibrate(rows, goal=goal) for goal in ("balanced_accuracy", "macro_f1"))
    assert equal.after["balanced_accuracy"] > best.after["balanced_accuracy"] + 0.03
    assert best.after["macro_f1"] > equal.after["macro_f1"] + 0.03
    kept = recalibrate(replace(rows, decision=Decision()), goal="argmax").decision
    assert not kept.weights


def test_a_promise_is_not_found_anew_on_rows_without_a_case(model: SavedModel) -> None:
    with pytest.raises(FedtailError, match=r"0 rows are 'rare'.*give 11 cases or more"):
        recalibrate(judge(model, rows(400, 7, rare=0.0)))


def test_a_new_class_mix_is_found_without_labels_and_probabilities_follow(model: SavedModel) -> None:
    many = rows(3000, 8, rare=0.4)
    plain = replace(judge(model, many), decision=Decision())
    watch = Watch.begin(replace(judge(model, rows(2000, 6)), decision=Decision()))
    found = recalibrate(replace(plain, y=None), watch)
    assert found.mix["rare"] == pytest.approx(0.4, abs=0.12)
    after = replace(plain, decision=found.decision)
    assert abs(after.p[:, 0].mean() - 0.4) < abs(plain.p[:, 0].mean() - 0.4)
    with pytest.raises(FedtailError, match="no labels"):
        recalibrate(replace(plain, y=None))


def test_few_rows_are_no_reference_and_tell_no_class_mix(model: SavedModel) -> None:
    with pytest.raises(FedtailError, match=r"3 labelled rows of 1 class cannot.*give 20 of two classes"):
        Watch.begin(judge(model, rows(3, 6, rare=0.0)))
    with pytest.raises(FedtailError, match="200 labelled rows of 1 class cannot"):
        Watch.begin(judge(model, rows(200, 6, rare=0.0)))
    new, few = replace(judge(model, rows(100, 8)), y=None), Watch.begin(judge(model, rows(100, 6)))
    with pytest.raises(FedtailError, match=r"and \d+ reference cases of 'rare'.*takes 20 reference cases of each"):
        recalibrate(new, few)
    watch = Watch.begin(judge(model, rows(2000, 6)))
    cases = int((judge(model, rows(2000, 6)).y == 0).sum())
    needed = -(-20 * 2000 // cases)
    with pytest.raises(FedtailError, match=rf"100 rows without labels.*here {needed} rows"):
        recalibrate(new, watch)
    assert recalibrate(replace(judge(model, rows(needed, 8)), y=None), watch).mix


def test_a_share_is_never_told_by_an_exponent() -> None:
    shares = {
        0.0: "0 %",
        3e-15: "less than 0.1 %",
        0.0009: "less than 0.1 %",
        0.0015: "0.15 %",
        0.52: "52 %",
        1: "100 %",
    }
    assert {share: percent(share) for share in shares} == shares


def test_the_paths_of_trees_explain_their_scores_exactly() -> None:
    federation = ft.Federation.from_tables(rows(1500, 0), label="y", site="site")
    trees = ft.fit(federation, method="trees", rounds=15).model()
    x = trees.inputs(rows(60, 9), [])
    forest = trees.module.read()
    bins = forest.start.bins.of(trees.module.values(x))
    total = forest.attributions(bins).sum(-1) + forest.start.scores[:, None]
    assert np.allclose(total, forest.scores(bins), atol=1e-9)
    names, moved = reasons(trees, x, np.zeros(len(x), dtype=int))
    a = x[:, 0].numpy()
    assert np.corrcoef(a, moved[:, names.index("a")])[0, 1] > 0.7  # the larger a, the likelier the rare class


def test_reasons_name_the_column_that_tells_and_importance_agrees(model: SavedModel) -> None:
    frame = rows(600, 9)
    judged = judge(model, frame)
    names, moved = reasons(model, judged.x, np.zeros(600, dtype=int))
    assert names == ["a", "b", "word"] and np.abs(moved).mean(0).argmax() == 0
    sure = frame["a"].to_numpy() > 2.5
    assert moved[sure, 0].mean() > 0 and "a +" in sentence(names, moved[np.flatnonzero(sure)[0]])
    names, lost = importance(model, judged)
    assert lost[:, 0].argmax() == 0 and lost[0, 0] > 0.1
    with pytest.raises(FedtailError, match="takes images"):
        parts_of(replace(model, input_shape=(1, 8, 8)))
