"""``fedtail methods`` and ``fedtail compare``."""

import json
import sys
from pathlib import Path

import pytest

from fedtail.cli import main
from fedtail.data.registry import DATASETS
from fedtail.errors import FedtailError
from fedtail.methods import METHODS
from fedtail.runs.config import load_config, result_keys
from fedtail.study.cells import Cell, Outcome
from fedtail.study.compare import best_lrs, chosen_methods, comparison_cells, method_configs

FAST = ["--dataset", "blobs", "data.n_max=40", "data.n_classes=3", "--clients", "3", "--rounds", "2", "--workers", "1"]


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["fedtail", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_methods_lists_every_method_with_wire_state_and_defaults(capsys, monkeypatch) -> None:
    code, out, _ = call(capsys, monkeypatch, "methods", "--json")
    listed = json.loads(out)["methods"]
    assert code == 0 and {m["name"] for m in listed} == set(METHODS)
    scaffold = next(m for m in listed if m["name"] == "scaffold")
    assert "control" in scaffold["client_state"] and "model-sized" in scaffold["wire"]
    assert next(m for m in listed if m["name"] == "fedprox")["defaults"]["mu"] == 0.01
    code, out, _ = call(capsys, monkeypatch, "methods")
    assert code == 0 and all(name in out for name in METHODS)


def test_compare_ranks_all_methods_and_keeps_what_is_done(capsys, monkeypatch, tmp_path: Path) -> None:
    arguments = ["compare", *FAST, "--methods", "all", "--seeds", "2", "--out", str(tmp_path / "c"), "--json"]
    code, out, err = call(capsys, monkeypatch, *arguments)
    assert code == 0, err
    answer = json.loads(out.splitlines()[-1])
    (problem,) = answer["problems"]
    ranking = problem["ranking"]
    assert len(ranking) == len(list(METHODS)) and answer["failed"] == []
    means = [row["mean"]["macro_f1"] for row in ranking]
    assert means == sorted(means, reverse=True)
    assert all(row["seeds"] == 2 and row["spread"]["macro_f1"] is not None for row in ranking)
    assert set(answer["learning_rates"].values()) == {0.1}
    assert problem["baseline"] == "FedAvg" and 0 < problem["floor"]["macro_f1"] < 1
    for name in ("comparison.md", "comparison.csv", "comparison.json", "report.html"):
        assert (tmp_path / "c" / name).stat().st_size > 0
    assert len((tmp_path / "c" / "comparison.csv").read_text().splitlines()) == 1 + 2 * len(list(METHODS))

    code, out, err = call(capsys, monkeypatch, *arguments)
    assert code == 0 and json.loads(out.splitlines()[-1]) == answer
    assert err.count("kept") == 2 * len(list(METHODS))


def test_compare_prints_a_table_and_picks_learning_rates(capsys, monkeypatch, tmp_path: Path) -> None:
    code, out, err = call(
        capsys, monkeypatch, "compare", *FAST, "--methods", "fedavg,fedprox", "--seeds", "1", "--lrs", "0.2,0.0001",
        "fedprox.mu=0.3", "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 0, err
    assert "FedProx" in out and "always the majority class" in out and "4 runs" in out
    table = (tmp_path / "comparison.csv").read_text()
    assert table.count("fedavg") == table.count("fedprox") == 1
    assert "lr0.2-" in table and "lr0.0001" not in table
    assert "chosen on validation splits: fedavg 0.2, fedprox 0.2" in out
    told = json.loads((tmp_path / "comparison.json").read_text())
    assert told["learning_rates"] == {"fedavg": 0.2, "fedprox": 0.2}
    assert {"p", "p_sign_flip", "difference"} <= told["problems"][0]["ranking"][0].keys()


def test_overrides_reach_the_methods_they_are_meant_for() -> None:
    configs = method_configs(
        ["fedavg", "fedprox", "fedcgnm"], None, ["fedprox.mu=0.3", "method.beta=0.7", "run.rounds=3"]
    )
    assert configs["fedprox"].method.options == {"mu": 0.3}
    assert configs["fedcgnm"].method.options == {"beta": 0.7}
    assert configs["fedavg"].method.options == {}
    assert {c.run.rounds for c in configs.values()} == {3}
    assert {c.local.lr for c in configs.values()} == {0.4}
    other = method_configs(["fedavg"], None, [], {"data.name": "blobs"})
    assert other["fedavg"].local.lr == 0.1


def test_cells_differ_in_method_seed_and_learning_rate_only() -> None:
    configs = method_configs(["fedavg", "fedcgnm"])
    cells = comparison_cells(configs, 2, [0.4, 0.1])
    assert len({c.digest for c in cells}) == len(cells) == 8
    assert {c.config.run.seed for c in cells} == {0, 1}


def test_the_example_config_spells_out_the_built_in_problem() -> None:
    example = result_keys(load_config(Path(__file__).parents[2] / "configs" / "digits.toml"))
    built_in = result_keys(method_configs(["fedcgnm"])["fedcgnm"])
    defaults = {f"data.{key}": value for key, value in DATASETS.options("digits").items()}
    defaults |= {f"method.{key}": value for key, value in METHODS.options("fedcgnm").items()}
    meant = {**defaults, **built_in, "data.partition": "dirichlet"}  # what auto is for digits
    assert set(built_in) <= set(example) and example == {key: meant[key] for key in example}


def test_another_rate_strategy_replaces_that_of_the_built_in_problem() -> None:
    config = method_configs(["fedavg"], flags={"rates.name": "fedhoo"})["fedavg"]
    assert config.rates.name == "fedhoo" and config.rates.options == {} and config.local.lr == 0.4


def outcome(tmp_path: Path, lr: float, seed: int, score: float | None, n: int) -> Outcome:
    config = method_configs(["fedavg"], None, [f"local.lr={lr}", f"run.seed={seed}"])["fedavg"]
    folder = tmp_path / f"{lr}-{seed}-{n}"
    folder.mkdir()
    records = [{"round": 0, "validation": {"accuracy": 0.99}}, {"round": 1, "validation": {"accuracy": score}}]
    (folder / "history.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "clients.json").write_text(json.dumps({"validation_sizes": [n // 2, n - n // 2]}))
    return Outcome(Cell("x", config), folder, error=None if score is not None else "diverged")


@pytest.mark.parametrize(("samples", "chosen"), [(100_000, 0.1), (50, 0.2)])
def test_the_learning_rate_is_the_best_on_validation_up_to_one_standard_error(
    samples: int, chosen: float, tmp_path: Path
) -> None:
    scores = {0.4: (0.95, None), 0.2: (0.80, 0.60), 0.1: (0.71, 0.72), 0.05: (0.70, 0.71)}
    outcomes = [
        outcome(tmp_path, lr, seed, score, samples) for lr, pair in scores.items() for seed, score in enumerate(pair)
    ]
    kept = best_lrs(outcomes, "accuracy")
    assert [o.cell.config.local.lr for o in kept] == [chosen, chosen]


def test_if_every_rate_fails_one_is_still_named(tmp_path: Path) -> None:
    assert len(best_lrs([outcome(tmp_path, lr, 0, None, 50) for lr in (0.4, 0.1)], "accuracy")) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "fedavg,fedproxx"], ["'fedproxx'", "did you mean 'fedprox'"]),
        (["--methods", ","], ["no method"]),
        (["--metric", "macro"], ["--metric", "macro_f1"]),
        (["--lrs", "0.1,fast"], ["--lrs", "0.4,0.2,0.1"]),
        (["--lrs", "0.1,-1"], ["--lrs"]),
        (["--methods", "fedavg", "fedprox.mu=1"], ["fedprox.mu", "--methods"]),
        (["--methods", "fedavg", "method.mu=1"], ["'mu'", "weight_decay"]),
        (["--methods", "fedavg", "method.name=x"], ["--methods"]),
        (["--methods", "fedprox", "fedprox.mu=-1"], ["mu"]),
        (["nowhere.toml"], ["'nowhere.toml' does not exist"]),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: list[str], capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, monkeypatch, "compare", "--seeds", "1", "--rounds", "1", *arguments)
    assert code == 2 and out == ""
    assert err.strip().count("\n") == 0
    assert all(word in err for word in words), err


def test_what_federating_gains_says_which_method_it_is_told_of(capsys, monkeypatch, tmp_path: Path) -> None:
    for methods, several in (("fedavg,fedprox", True), ("fedavg", False)):
        arguments = ["--methods", methods, "--seeds", "1", "--yardsticks", "--out", str(tmp_path / methods)]
        code, out, err = call(capsys, monkeypatch, "compare", *FAST, *arguments)
        assert code == 0 and "than alone" in out, err
        assert ("led on validation rows" in " ".join(out.split())) == several
        page = (tmp_path / methods / "report.html").read_text()
        assert ("led on validation rows" in " ".join(page.split())) == several


def test_a_method_that_fails_is_named_and_the_rest_is_ranked(capsys, monkeypatch, tmp_path: Path) -> None:
    code, out, err = call(
        capsys, monkeypatch, "compare", *FAST, "--methods", "fedavg,ratio_loss", "--seeds", "1", "data.auxiliary=0",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 1
    assert "FedAvg" in out and "data.auxiliary" in err


def test_a_method_of_the_users_own_file_is_compared(capsys, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("from fedtail.methods import FedProx\nclass Mine(FedProx):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    arguments = ["compare", *FAST, "--methods", "fedavg,my.py:Mine", "--seeds", "1", "--out", "c", "--json"]
    code, out, err = call(capsys, monkeypatch, *arguments)
    assert code == 0, err
    answer = json.loads(out.splitlines()[-1])
    assert {row["method"] for row in answer["problems"][0]["ranking"]} >= {"FedAvg", "Mine"}
    assert set(answer["learning_rates"]) == {"fedavg", "my.py:Mine"}


def test_no_learning_rate_is_named_for_a_method_whose_runs_all_failed(capsys, monkeypatch, tmp_path: Path) -> None:
    faulty = "class Broken(FedProx):\n    def direction(self, step):\n        raise KeyError"
    (tmp_path / "broken.py").write_text(f"from fedtail.methods import FedProx\n{faulty}")
    monkeypatch.chdir(tmp_path)
    arguments = ["--methods", "fedavg,broken.py:Broken", "--seeds", "1", "--lrs", "0.4,0.1", "--out", "c"]
    code, out, err = call(capsys, monkeypatch, "compare", *FAST, *arguments)
    assert code == 1 and "failed: " in err
    assert "chosen on validation splits: fedavg 0." in out and "Broken 0." not in out


def test_all_means_all() -> None:
    assert chosen_methods("all") == list(METHODS)
    assert chosen_methods("fedavg, fedprox,fedavg") == ["fedavg", "fedprox"]
    assert chosen_methods("FedAvg,FedProx + FedHOO") == ["fedavg", "fedprox+fedhoo"]
    with pytest.raises(FedtailError):
        chosen_methods("al")
