"""Runs: folders, determinism, checkpoints, kill and resume."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedtail as ft
from fedtail import fit, partition
from fedtail.data import DATASETS
from fedtail.errors import FedtailError
from fedtail.runs.config import load_config
from fedtail.runs.execution import run
from fedtail.runs.folder import choose_folder, claimed
from fedtail_experiments.models.classifiers import SimplexETF
from tests.waiting import HANGS

SMALL = ["data.name=blobs", "data.n_max=60", "data.clients=3", "run.rounds=6", "local.batch_size=16"]


def small(folder: Path, *more: str, **flags: object):
    return load_config(None, [*SMALL, f"run.folder={json.dumps(str(folder))}", *more], flags)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    one, two = weights(a), weights(b)
    return (
        one.keys() == two.keys()
        and all(torch.equal(one[k], two[k]) for k in one)
        and (a / "history.jsonl").read_bytes() == (b / "history.jsonl").read_bytes()
    )


def test_run_folder_holds_everything_needed_later(tmp_path: Path) -> None:
    result = run(small(tmp_path))
    names = {p.name for p in result.folder.iterdir()}
    assert names >= {
        "config.toml", "history.jsonl", "timings.csv", "clients.json", "rates.csv", "checkpoint",
        "model.safetensors", "model.json", "result.json",
    }  # fmt: skip
    history = [json.loads(line) for line in (result.folder / "history.jsonl").read_text().splitlines()]
    assert [r["round"] for r in history] == list(range(6))
    about = json.loads((result.folder / "result.json").read_text())
    assert about["test"]["macro_f1"] == pytest.approx(history[-1]["test"]["macro_f1"])
    assert (result.folder / "rates.csv").read_text().startswith("round,client 0,client 1,client 2\n0,0.6,")
    assert not list(result.folder.glob(".*partial"))


def test_the_saved_config_runs_again_to_the_same_bits(tmp_path: Path) -> None:
    first = run(small(tmp_path, "method.beta=0.7")).folder
    again = load_config(first / "config.toml", [], {"run.folder": str(tmp_path / "again")})
    assert same(first, run(again).folder)


def test_workers_do_not_change_the_bits(tmp_path: Path) -> None:
    one = run(small(tmp_path / "a", "engine.path='reference'")).folder
    assert same(one, run(small(tmp_path / "b", "engine.path='reference'", "engine.workers=2")).folder)


def test_threads_set_by_the_user_do_not_change_the_bits(tmp_path: Path) -> None:
    for threads in ("1", "2"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        command = [sys.executable, "-m", "fedtail", "run", "--rounds", "3", "-q", "--out", str(tmp_path)]
        subprocess.run([*command, "--name", threads], env=environment, check=True, capture_output=True)
    assert same(tmp_path / "1", tmp_path / "2")


def test_partial_participation_samples_other_clients_each_round_and_is_deterministic(tmp_path: Path) -> None:
    more = ("data.clients=6", "run.participation=0.5", "data.n_max=120")
    a, b = (run(small(tmp_path / n, *more)) for n in "ab")
    cohorts = {tuple(r["clients"]) for r in a.history}
    assert len(cohorts) > 1 and all(len(c) == 3 for c in cohorts)
    assert same(a.folder, b.folder)


def test_a_run_never_overwrites_another(tmp_path: Path) -> None:
    first, second = run(small(tmp_path)).folder, run(small(tmp_path)).folder
    assert first != second
    run(small(tmp_path, "run.name='mine'"))
    with pytest.raises(FedtailError, match="--resume"):
        run(small(tmp_path, "run.name='mine'"))


def test_resume_refuses_another_config_and_names_the_difference(tmp_path: Path) -> None:
    run(small(tmp_path, "run.name='mine'"))
    with pytest.raises(FedtailError, match=r"local\.lr \(0\.1 before, 0\.2 now\)"):
        run(small(tmp_path, "run.name='mine'", "local.lr=0.2"), resume=True)


def test_a_run_whose_name_was_taken_meanwhile_gets_the_next_one(tmp_path: Path) -> None:
    config = small(tmp_path)
    folder = choose_folder(config, resume=False)
    with claimed(config, folder, resume=False) as first, claimed(config, folder, resume=False) as second:
        assert first == folder and second.name == f"{folder.name}-2"
    named = small(tmp_path, "run.name=x")
    with (
        claimed(named, tmp_path / "x", resume=False),
        pytest.raises(FedtailError, match=r"exists; continue .* \(run\.name="),
    ):
        run(named)


def test_two_processes_never_write_one_run(tmp_path: Path) -> None:
    config = small(tmp_path, "run.name=x")
    with claimed(config, tmp_path / "x", resume=True), pytest.raises(FedtailError, match="by another process; wait"):
        run(config, resume=True)
    assert run(config, resume=True).folder == tmp_path / "x"


def test_a_config_edited_in_the_run_folder_is_refused(tmp_path: Path) -> None:
    folder = run(small(tmp_path, "run.name=x")).folder
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("clients = 3", "clients = 2"))
    with pytest.raises(FedtailError, match=r"a different config: data.clients \(3 before, 2 now\)"):
        run(load_config(folder), resume=True)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("history.jsonl", "", "is of round 6, but history.jsonl has 0 rounds; restore the complete file"),
        ("history.jsonl", "{}\n{}\n", "line 1: not a record of a round; the file is damaged"),
        ("checkpoint/round-000006/state.json", "[]", "cannot be read .*; delete it to start over"),
        ("checkpoint/round-000006/state.json", '{"format": 1}', "it lacks 'round'"),
        ("checkpoint/round-000006/state.json", '{"format": 9}', "has format 9, this version reads 1"),
        ("checkpoint/round-000006/tensors.safetensors", "x", "is damaged: its checksum does not match; delete it"),
    ],
)
def test_a_damaged_run_folder_is_one_clear_line(tmp_path: Path, file: str, content: str, words: str) -> None:
    config = small(tmp_path, "run.name=x")
    run(config)
    (tmp_path / "x" / file).write_text(content)
    with pytest.raises(FedtailError, match=words):
        run(config, resume=True)


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json"])
def test_a_checkpoint_with_a_flipped_bit_is_refused_and_one_without_checksums_is_read(
    tmp_path: Path, file: str
) -> None:
    config = small(tmp_path, "run.name=x")
    run(config)
    path = tmp_path / "x" / "checkpoint" / "round-000006" / file
    before = path.read_bytes()
    flipped = before[:-9] + bytes([before[-9] ^ 1]) + before[-8:]
    path.write_bytes(flipped if file == "tensors.safetensors" else before.replace(b'"format": 1', b'"format": 1.0', 1))
    with pytest.raises(FedtailError, match=r"round-000006' is damaged: its checksum does not match"):
        run(config, resume=True)
    path.write_bytes(before)
    state = json.loads((path.parent / "state.json").read_text())
    state = {key: value for key, value in state.items() if not key.startswith("sha256")}
    (path.parent / "state.json").write_text(json.dumps(state))
    assert len(run(config, resume=True).history) == 6


def test_fit_takes_the_classifier_that_it_is_given_and_saves_it(tmp_path: Path) -> None:
    pooled = DATASETS.build("blobs", n_max=40, n_classes=3, n_features=4)
    rows = pooled.test.x.numpy()
    for model in ("mlp", nn.Sequential(nn.Flatten(), nn.Linear(4, 3))):
        result = fit(partition(pooled, clients=2), model, rounds=1, classifier="etf")
        assert any(isinstance(m, SimplexETF) for m in result.module.modules())
    named = fit(partition(pooled, clients=2), "mlp", rounds=1, classifier="etf")
    again = ft.load_model(named.save(tmp_path / "named"))
    assert np.array_equal(again.predict_proba(rows), named.model().predict_proba(rows))


def test_fit_refuses_a_setting_that_has_no_effect() -> None:
    pooled = DATASETS.build("blobs", n_max=40, n_classes=3, n_features=4)
    federation = partition(pooled, clients=2)
    with pytest.raises(FedtailError, match=r"server\.lr has no effect with server\.optimizer = 'none'"):
        fit(federation, rounds=1, server={"lr": 0.1})
    with pytest.raises(FedtailError, match=r"lr_min = 0\.01: this is no longer a setting"):
        fit(federation, rounds=1, lr_min=0.01)
    with pytest.raises(FedtailError, match=r"server\.beta1 = 0\.5: this is no longer a setting"):
        fit(federation, rounds=1, server={"optimizer": "adam", "beta1": 0.5})


def test_another_optimizer_brings_its_learning_rate_in_a_fresh_run_and_on_a_run_folder(tmp_path: Path) -> None:
    run(small(tmp_path, "run.name=x", "run.rounds=1", "local.lr=0.2"))
    assert load_config(tmp_path / "x", ["local.optimizer=adam"]).local.lr == 0.2, "the one that was set"
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / "config.toml").write_text(load_config(tmp_path / "x", ["local.lr=0.1"]).to_toml())
    for base in (None, tmp_path / "usual", tmp_path / "usual" / "config.toml"):
        assert load_config(base, ["local.optimizer=adam"]).local.lr == 0.001
        assert load_config(base, ["local.optimizer=adam", "local.lr=0.1"]).local.lr == 0.1


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    done = run(small(tmp_path, "run.name='mine'")).folder
    before = weights(done)
    again = run(small(tmp_path, "run.name='mine'"), resume=True)
    assert all(torch.equal(before[k], v) for k, v in weights(again.folder).items())
    assert len(again.history) == 6


def test_an_exploding_loss_stops_with_a_clear_line_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    config = small(
        tmp_path, "run.name='boom'", "method.name=fedavg", "local.lr=1e30", "model.name=mlp", "model.norm_groups=0"
    )
    with pytest.raises(FedtailError, match=r"lower local\.lr"):
        run(config)
    calm = small(tmp_path, "run.name='calm'")

    def bomb(state: object, record: dict, seconds: float) -> None:
        if record["round"] == 3:
            raise FedtailError("stop")

    with pytest.raises(FedtailError):
        run(calm, on_round=bomb)
    kept = list((tmp_path / "calm" / "checkpoint").glob("round-*"))
    assert [k.name for k in kept] == ["round-000004"]
    assert same(run(calm, resume=True).folder, run(small(tmp_path / "other")).folder)


def test_best_model_is_the_latest_within_half_a_standard_error_of_the_best_validation_metric(tmp_path: Path) -> None:
    result = run(small(tmp_path, "run.select='best'", "run.metric='macro_f1'", "run.rounds=8"))
    scores = [r["validation"]["macro_f1"] for r in result.history]
    samples, best = sum(result.about.validation_sizes), max(scores)
    error = 0.5 * (best * (1 - best) / samples) ** 0.5
    assert result.summary["selected_round"] == max(i for i, v in enumerate(scores, 1) if v >= best - error)


@pytest.mark.parametrize("metric", ["accuracy", "defect_score"])
def test_the_best_model_cannot_be_chosen_without_validation_data(metric: str) -> None:
    """A defect score without samples is 0, in every round."""
    pool = ft.datasets.load("blobs", n_max=20)
    federation = replace(ft.partition(pool, clients=2, validation=0.0), background=0)
    with pytest.raises(FedtailError, match="needs validation data, but the clients have none"):
        ft.fit(federation, rounds=2, select="best", metric=metric)


def test_the_best_model_cannot_be_chosen_where_nothing_is_validated() -> None:
    pool = ft.datasets.load("blobs", n_max=20)
    with pytest.raises(FedtailError, match="needs validation"):
        ft.fit(ft.partition(pool, clients=2), rounds=2, select="best", validate_every=0)


def start(folder: Path, name: str, *more: str) -> subprocess.Popen:
    command = [
        sys.executable, "-m", "fedtail", "run", "--dataset", "blobs", "data.n_max=60", "--clients", "3",
        "--rounds", "40",
        "local.batch_size=16", "local.epochs=2", "--out", str(folder), "--name", name, "--quiet", *more,
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_a_run_killed_at_random_rounds_and_resumed_ends_bit_identical(tmp_path: Path) -> None:
    """SIGKILL five times at random moments; history and weights equal those of an uninterrupted run."""
    whole = start(tmp_path, "whole")
    rng, history = random.Random(0), tmp_path / "killed" / "history.jsonl"

    def rounds() -> int:
        return len(history.read_text().splitlines()) if history.exists() else 0

    for kill in range(5):
        process, target = start(tmp_path, "killed", *(["--resume"] if kill else [])), rounds() + rng.randint(1, 6)
        while process.poll() is None and rounds() < target:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = start(tmp_path, "killed", "--resume")
    assert last.wait(HANGS) == 0, last.stderr.read()
    assert whole.wait(HANGS) == 0, whole.stderr.read()
    assert same(tmp_path / "whole", tmp_path / "killed")


def test_fit_in_a_few_lines() -> None:
    pool = ft.data.DATASETS.build("blobs", n_max=60)
    federation = ft.partition(pool.train, pool.test, clients=3)
    seen = []
    result = ft.fit(federation, "mlp", "fedcgnm", 0.5, rounds=3, on_round=lambda s, r, t: seen.append(r["round"]))
    assert seen == [0, 1, 2] and 0 <= result.test["macro_f1"] <= 1
    assert result.module(federation.test.x[:2]).shape == (2, 5)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("schedule", "cosin"), ("metric", "macrof1"), ("select", "beest"),
        ("epoch_length", "orignal"),
    ],
)  # fmt: skip
def test_fit_refuses_a_misspelt_choice_instead_of_taking_another(option: str, value: str) -> None:
    pool = ft.datasets.load("blobs", n_max=20)
    with pytest.raises(FedtailError, match=f"{option} '{value}' is unknown; did you mean"):
        ft.fit(ft.partition(pool, clients=2), rounds=1, **{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rounds", 0), ("lr", 0.0), ("participation", 1.5), ("quorum", 0.0), ("batch_size", 0), ("evaluate_every", 0),
        ("validate_every", -1), ("warmup", -1),
    ],
)  # fmt: skip
def test_fit_refuses_numbers_out_of_range(option: str, value: float) -> None:
    pool = ft.datasets.load("blobs", n_max=20)
    with pytest.raises(FedtailError, match=rf"{option} = {value} (is outside|must be)"):
        ft.fit(ft.partition(pool, clients=2), **{"rounds": 1, option: value})


def test_a_result_tells_rates_and_what_else_was_searched_apart(tmp_path: Path) -> None:
    search = ["rates.name=fedhoo", "rates.searches=lr", "rates.low=0.01", "rates.high=0.2", "rates.base_rate=0.5"]
    result = run(small(tmp_path, *search))
    told = json.loads((result.folder / "result.json").read_text())
    assert told["rates"] == result.rates.tolist() == [0.5] * 3
    assert told["searched"] == result.history[-1]["searched"] and len(told["searched"]["lr"]) == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": torch.nn.Linear(4, 3)}, r"does not accept samples of shape \(3,\)"),
        ({"model": torch.nn.Linear(3, 4)}, "one row of 2 scores per sample"),
        ({"model": torch.nn.Linear}, "neither an nn.Module nor a name"),
        ({"method": ft.methods.FedProx}, "neither a Method"),
        ({"rates": [0.1, 0.2, 0.3]}, "rates.rates has 3 values for 2 clients"),
        ({"momentm": 1}, "setting 'momentm' is unknown"),
    ],
)
def test_fit_refuses_what_does_not_fit_in_one_line(given: dict[str, object], words: str) -> None:
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    federation = ft.Federation.from_arrays([(x, y), (x, y)])
    with pytest.raises(FedtailError, match=words):
        ft.fit(federation, **{"rounds": 1, **given})
    assert ft.fit(federation, torch.nn.Linear(3, 2), rates=[0.1, 0.2], rounds=1).rates.tolist() == [0.1, 0.2]


def test_columns_of_a_frame_may_be_numbers() -> None:
    frame = pd.DataFrame({0: [i % 7 for i in range(40)], 1: ["a", "b"] * 20, 2: ["s", "t"] * 20})
    assert ft.data.table_from_frame(frame, label=1, site=2).classes == ("a", "b")


def test_a_run_that_no_longer_improves_stops_and_resumes_to_the_same_end(tmp_path: Path) -> None:
    settings = small(tmp_path, "run.select='best'", "run.patience=2", "run.rounds=30", "run.name=early")
    result = run(settings)
    scores = [r["validation"]["accuracy"] for r in result.history]
    assert result.summary["rounds"] == len(scores) == scores.index(max(scores)) + 1 + 2 < 30
    assert "test" in result.history[-1]
    again = run(settings, resume=True)
    assert torch.equal(again.x, result.x) and len(again.history) == len(scores)
