"""A run that came to nothing says so, with the likely reason and what to try."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtail as ft
from fedtail.runs.config import load_config
from fedtail.runs.execution import run
from fedtail.runs.verdict import Verdict, verdict
from fedtail.settings import Settings

CLASSES = ("ok", "cracked", "dead")
FLOOR = {"macro_f1": 0.3, "accuracy": 0.8}


def judge(
    macro_f1: float = 0.7,
    losses: tuple[float, ...] = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3),
    confusion: Any = None,
    refused: int = 0,
    scores: tuple[float, ...] = (),
    n_validation: int = 500,
    before: Any = None,
    **settings: Any,
) -> Verdict | None:
    counts = np.array([[80, 0, 0], [5, 5, 0], [5, 0, 5]]) if confusion is None else np.asarray(confusion)
    history = [
        {
            "train_loss": loss,
            "refused": [{"client": 0, "reason": "loss became nan at step 1 of 3"}] if t < refused else [],
            "validation": {"macro_f1": scores[t] if scores else macro_f1 + 0.02 * t * (len(set(losses)) > 1)},
        }
        for t, loss in enumerate(losses)
    ]
    plain = None if before is None else np.asarray(before)
    chosen = Settings.of(**settings)
    return verdict({"macro_f1": macro_f1}, counts, FLOOR, history, CLASSES, chosen, n_validation, plain)


@pytest.mark.parametrize(
    ("change", "keywords"),
    [
        ("local.lr=auto", {"lr": "auto"}),
        ("local.lr=0.01", {"lr": 0.01}),
        ("run.rounds=150", {"rounds": 150}),
        ("method.name=fedcgnm", {"method": "fedcgnm"}),
        ("decision.goal=macro_f1", {"decision": {"goal": "macro_f1"}}),
    ],
)
def test_advice_can_be_run_as_it_is_printed(change: str, keywords: dict[str, Any]) -> None:
    found = Verdict("still", "", change)
    assert eval(found.command(), {"fit": lambda *_, **given: given}) == keywords
    words = shlex.split(found.command(Path("my runs/x")))
    assert words == ["fedtail", "run", "my runs/x", change, "--name", "x-again"]
    assert load_config(None, words[3:4])


def test_a_good_run_has_no_verdict() -> None:
    assert judge() is None


def test_a_run_whose_validation_still_rises_at_its_end_says_so_and_asks_for_more_rounds() -> None:
    rising = tuple(0.4 + 0.004 * t for t in range(50))
    losses = tuple(1.0 - 0.01 * t for t in range(50))
    found = judge(losses=losses, scores=rising, rounds=50)
    assert found is not None and found.kind == "rising" and "0.538, then 0.578 over the last 10" in found.said
    assert found.line(Path("runs/x")).endswith("try: fedtail run runs/x run.rounds=150 --name x-again")
    assert judge(losses=losses, scores=rising, rounds=60) is None, "patience ended it"
    assert judge(losses=losses, scores=rising, rounds=50, n_validation=60) is None, "a sample or two"
    assert judge(losses=losses[:19], scores=rising[:19], rounds=19) is None, "too short to say"
    settled = (*rising[:40], *[rising[39]] * 10)
    assert judge(losses=losses, scores=settled, rounds=50) is not None, "by .018 from fifth to fifth"
    assert judge(losses=losses, scores=(*rising[:30], *[rising[29]] * 20), rounds=50) is None


def test_a_model_that_answers_one_class_is_named_with_the_class_and_what_to_try() -> None:
    found = judge(0.3, confusion=[[80, 0, 0], [10, 0, 0], [10, 0, 0]])
    assert found is not None and found.kind == "one class"
    line = found.line(Path("runs/x"))
    assert "predicts 'ok' for all 100 test samples" in line and "\n" not in line
    assert line.endswith("try: fedtail run runs/x local.lr=auto --name x-again")


def test_a_macro_f1_at_the_floor_is_said_even_if_several_classes_are_answered() -> None:
    found = judge(0.301)
    assert found is not None and found.kind == "floor" and "0.301" in found.said
    assert judge(0.32) is None


def test_a_loss_that_rose_or_updates_that_were_refused_are_a_divergence() -> None:
    found = judge(losses=(1.0, 0.5, 2.0, 9.0), scores=(0.5, 0.7, 0.6, 0.4))
    assert found is not None and found.kind == "diverged" and found.change == "local.lr=0.01"
    assert (again := judge(refused=4)) is not None and again.kind == "diverged"


def test_a_loss_that_rose_while_macro_f1_did_not_fall_is_no_divergence() -> None:
    """Local losses of small sites rise when a schedule takes the learning rate down to nothing."""
    assert judge(losses=(0.5, 0.34, 0.6, 0.85), scores=(0.50, 0.52, 0.53, 0.52)) is None


def test_a_training_that_did_not_move_stood_still() -> None:
    found = judge(losses=(1.0,) * 6)
    assert found is not None and found.kind == "still" and "too low" in found.said
    assert judge(losses=(1.0,) * 3) is None


def test_what_was_tried_already_is_not_proposed_again() -> None:
    def change(**settings: Any) -> str:
        found = judge(0.3, **settings)
        assert found is not None
        return found.change

    assert change() == "local.lr=auto"
    assert change(lr="auto", rounds=6) == "run.rounds=50"
    assert change(lr="auto", rounds=10) == "", "patience ended it: more rounds would end it there again"
    assert change(lr="auto") == ""
    assert (found := judge(0.3, lr="auto")) is not None
    assert found.command(Path("runs/x")) == "fedtail tune runs/x --budget 5m"


def test_totals_alone_are_judged_by_the_history_only() -> None:
    assert judge(0.3, confusion=[[80, 100]]) is None


def test_the_verdict_is_in_the_result_the_folder_and_the_report(tmp_path: Path) -> None:
    config = load_config(None, ["data.name=blobs", "local.lr=1e-6", "run.rounds=5", f"run.folder={tmp_path}"])
    result = run(config)
    assert result.verdict is not None and "warning: " in repr(result)
    assert result.folder is not None
    said = json.loads((result.folder / "result.json").read_text())["verdict"]
    assert said["kind"] == result.verdict.kind and "local.lr=auto" in said["try"]
    assert "local.lr=auto" in result.report().read_text()


def own(tmp_path: Path, *overrides: str) -> Settings:
    flags = {"data.name": "table", "data.path": str(tmp_path / "t.csv"), "data.label": "y"}
    return load_config(None, overrides, flags, suggest=True)


def test_own_data_has_defaults_that_find_themselves_where_the_user_did_not_say(tmp_path: Path) -> None:
    grown = own(tmp_path)
    assert (grown.method.name, grown.run.metric, grown.run.select) == ("trees", "macro_f1", "best")
    config = own(tmp_path, "method.name=fedcgnm")
    assert (config.local.lr, config.run.metric, config.run.select) == ("auto", "macro_f1", "best")
    assert config.run.patience > 0
    assert (config.local.batch_size, config.server.optimizer, config.decision.goal) == ("auto", "auto", "macro_f1")
    said = own(tmp_path, "local.lr=0.2", "run.select=last", "run.metric=accuracy", "run.patience=0")
    assert (said.local.lr, said.run.metric, said.run.select, said.run.patience) == (0.2, "accuracy", "last", 0)
    assert said.decision.goal == "argmax", "answers are not to be good for another metric than the user's"
    assert own(tmp_path, "run.metric=macro_f1").decision.goal == "macro_f1"
    assert own(tmp_path, "run.metric=balanced_accuracy").decision.goal == "balanced_accuracy"
    assert own(tmp_path, "decision.goal=argmax").decision.goal == "argmax"
    assert own(tmp_path, "local.batch_size=8").local.batch_size == 8
    assert own(tmp_path, "server.optimizer=yogi").server.optimizer == "yogi"
    assert own(tmp_path, "privacy.mode=central", "privacy.noise=1").server.optimizer == "none", "steps of noise"


@pytest.mark.parametrize("blind", ["data.validation=0", "run.validate_every=0"])
def test_nothing_is_raced_or_selected_without_validation(tmp_path: Path, blind: str) -> None:
    config = own(tmp_path, blind, "method.name=fedcgnm")
    assert (config.local.lr, config.run.select, config.run.patience) == (0.1, "last", 0)
    assert (config.local.batch_size, config.decision.goal) == ("auto", "argmax")


def test_named_sets_keep_their_defaults() -> None:
    for name in ("adult", "blobs"):
        config = load_config(None, [f"data.name={name}"], suggest=True)
        assert (config.local.lr, config.run.metric, config.run.select) == (0.1, "accuracy", "last")


def test_the_config_of_a_run_folder_is_complete(tmp_path: Path) -> None:
    result = ft.fit(ft.partition(ft.datasets.load("blobs", n_max=20), clients=2), rounds=1)
    folder = result.save(tmp_path / "x")
    text = (folder / "config.toml").read_text().replace('name = "blobs"', 'name = "images"\npath = "x"')
    (folder / "config.toml").write_text(text)
    assert load_config(folder, suggest=True).local.lr == 0.1


def test_a_class_that_is_never_predicted_is_named() -> None:
    found = judge(confusion=[[80, 0, 0], [5, 5, 0], [4, 6, 0]])
    assert found is not None and found.kind == "never" and found.change == "decision.goal=balanced_accuracy"
    assert found.said == "the model never predicts 'dead' (10 test samples)"
    decided = judge(confusion=[[80, 0, 0], [5, 5, 0], [4, 6, 0]], decision={"goal": "macro_f1"})
    assert decided is not None and decided.change == "local.lr=auto"
    assert judge(confusion=[[80, 0, 0], [5, 5, 0], [0, 0, 0]]) is None, "a class without test samples"


def test_a_class_that_the_decision_silences_is_named_with_what_was_found_without_it() -> None:
    plain, decided = [[80, 0, 0], [2, 6, 2], [4, 1, 5]], [[60, 20, 0], [0, 10, 0], [0, 10, 0]]
    goal = {"goal": "recall", "find": "cracked"}
    found = judge(confusion=decided, before=plain, decision=goal)
    assert found is not None and found.kind == "silenced" and found.change == "decision.goal=balanced_accuracy"
    assert found.said == "the decision (goal 'recall') finds nothing of 'dead' (without it 5 of 10 test samples)"
    called = judge(confusion=[[60, 20, 0], [0, 10, 0], [0, 9, 1]], before=plain, decision=goal)
    assert called is None, "one is found"
    everywhere = judge(confusion=[[0, 80, 0], [0, 10, 0], [0, 10, 0]], before=plain, decision=goal)
    assert everywhere is not None and everywhere.kind == "silenced", "it is not the training that failed"
    silent = judge(confusion=decided, before=[[80, 0, 0], [0, 10, 0], [4, 6, 0]], decision=goal)
    assert silent is not None and silent.kind == "never", "without it there was nothing either"


@pytest.mark.parametrize("seed", range(2))
def test_a_run_without_settings_finds_every_class(seed: int, tmp_path: Path) -> None:
    """As ``fedtail run`` in an empty folder."""
    result = run(load_config(None, [f"run.folder={tmp_path}", f"run.seed={seed}"], suggest=True))
    assert min(result.test["per_class_accuracy"]) > 0.2 and result.test["macro_f1"] > 0.8 and result.verdict is None


def test_trees_are_not_told_to_change_a_learning_rate_that_they_do_not_have() -> None:
    history = [{"train_loss": 1.0 - 0.1 * t, "refused": [], "validation": {"macro_f1": 0.3}} for t in range(6)]
    settings = Settings.of(rounds=100)
    settings = settings.model_copy(update={"method": settings.method.model_copy(update={"name": "trees"})})
    wrong = verdict({"macro_f1": 0.3}, np.array([[90, 0], [10, 0]]), FLOOR, history, CLASSES, settings, 500)
    assert wrong is not None and wrong.change == "" and "learning rate" not in wrong.said
