"""Racing learning rates in the first rounds of a run: ``local.lr = "auto"``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedtail import fit
from fedtail.errors import FedtailError
from fedtail.methods import METHODS, FedAvg
from fedtail.models import build_model
from fedtail.rates import FedHOO, Setting, Uniform
from fedtail.rounds import search
from fedtail.rounds.checkpoint import load_checkpoint, save_checkpoint
from fedtail.rounds.history import history_text
from fedtail.rounds.loop import train_rounds
from fedtail.rounds.race import LRS, SHARE, Race, rungs
from fedtail.rounds.state import Problem, State
from fedtail.runs.build import assemble
from fedtail.settings import Settings
from tests.conftest import blob_federation

K = 4


def race(rounds: int = 50, *, rivals: bool = True) -> Race:
    out = Race(Uniform(K))
    out.begin(Setting(rounds, 1.0, np.full(K, 10), rivals=rivals))
    return out


def tried(it: Race) -> list[float]:
    """The learning rates that the coming round tries: rival by rival, or probe by probe."""
    if not it.rivals:
        assert it.patterns() == "uniform" and it.ask().shape == (K, len(it.trials()))
        return it.trials().tolist()
    out = []
    for rival in it.rivals:
        it.rival = rival
        assert it.lr == it.trials().item() and it.ask().shape == (K, 1) and it.patterns() is None
        out.append(it.lr)
    return out


def played(it: Race, rewards: Any, failed: Any = None) -> int:
    field = tried(it)
    r = np.array([rewards(values) for values in field], dtype=np.float64)
    bad = np.zeros(len(field), dtype=bool) if failed is None else np.array([failed(values) for values in field])
    return it.judge(r, {"reward": r}, bad)


def run_out(it: Race, rewards: Any, failed: Any = None) -> None:
    while it.racing:
        played(it, rewards, failed)


@pytest.mark.parametrize("rivals", [True, False])
@pytest.mark.parametrize("rounds", [1, 3, 5, 10, 20, 50, 300])
def test_a_race_adds_at_most_its_share_of_local_runs(rounds: int, rivals: bool) -> None:
    it = race(rounds, rivals=rivals)
    extra = done = 0
    while it.racing:
        extra += len(tried(it)) - 1
        done += 1
        played(it, lambda lr: 0.0)
    assert extra <= SHARE * rounds
    assert done == it.length <= rounds


@pytest.mark.parametrize("rivals", [True, False])
@pytest.mark.parametrize("best", LRS["sgd"])
def test_the_best_learning_rate_wins_and_is_then_held(best: float, rivals: bool) -> None:
    it = race(rivals=rivals)
    run_out(it, lambda lr: -abs(np.log(lr / best)))
    assert it.lr == best and LRS["sgd"][it.rival] == (best if rivals else LRS["sgd"][0])
    assert it.trials().tolist() == [best]
    assert it.done and it.patterns() is None and it.ask().shape == (K, 1)


def test_rivals_are_compared_by_where_they_are_and_not_by_how_they_started() -> None:
    it = race()
    (_, first), (_, last) = rungs(50)
    for t in range(first + last):
        played(it, lambda lr, t=t: lr * (t - first) if lr >= 0.3 else -9.0)
    assert not it.racing and it.lr == 1.0


def test_probes_from_a_common_model_are_compared_by_what_they_gained_in_all_rounds() -> None:
    it, length = race(rivals=False), sum(rounds for _, rounds in rungs(50))
    for t in range(length):
        played(it, lambda lr, t=t: float(lr == 0.1) if t < length - 1 else 0.1 * (lr == 0.3))
    assert not it.racing and it.lr == 0.1


def test_a_short_run_races_fewer_learning_rates() -> None:
    assert [rungs(rounds) for rounds in (3, 8, 10)] == [[(2, 1)], [(3, 1), (2, 1)], [(4, 1), (2, 1)]]
    assert rungs(50) == [(5, 2), (2, 10)]


@pytest.mark.parametrize("rivals", [True, False])
def test_a_learning_rate_at_which_a_client_diverges_is_out(rivals: bool) -> None:
    it = race(rivals=rivals)
    run_out(it, lambda lr: lr, lambda lr: lr > 0.2)
    assert it.lr == 0.1


def test_a_very_short_run_has_no_race() -> None:
    assert rungs(2) == []
    assert race(2).trials().tolist() == [LRS["sgd"][0]] and race(2).rivals == ()


def test_a_saved_race_goes_on_as_the_original() -> None:
    rng = np.random.default_rng(0)
    one = race()
    for _ in range(3):
        played(one, lambda lr: rng.random())
    two = Race(Uniform(K))
    two.load_state(one.state())
    two.begin(Setting(50, 1.0, np.full(K, 10), rivals=True))
    assert one.rival == two.rival
    while one.racing:
        rewards = {lr: rng.random() for lr in tried(one)}
        assert played(one, rewards.__getitem__) == played(two, rewards.__getitem__)
    assert not two.racing and one.lr == two.lr


def test_a_race_that_version_0_2_saved_goes_on() -> None:
    before = {"held": {"lr": 0.1}, "heats": [["lr", [[5, 2], [2, 10]]]], "heat": 0, "round": 3, "rival": 1}
    it = Race(Uniform(K))
    it.load_state({"race": {**before, "field": [0.3, 0.1], "gain": [0.0, None]}, "inner": {}})
    it.begin(Setting(50, 1.0, np.full(K, 10), rivals=True))
    assert it.racing and it.length == 12 and tried(it) == [0.3, 0.1]


def test_the_strategy_behind_a_race_gets_the_rounds_that_are_left() -> None:
    it = Race(FedHOO(K, cold_rounds=1, max_rounds=4))
    it.begin(Setting(50, 1.0, np.full(K, 10), rivals=True))
    run_out(it, lambda lr: lr)
    assert not it.done and it.patterns() == "binary" and it.ask().shape == (K, 2)
    assert it.trials().shape == (1,)


def problem(
    path: str = "batched", lr: Any = "auto", rounds: int = 20, method: str = "fedcgnm", **more: Any
) -> tuple[Problem, Settings]:
    federation = blob_federation(K)
    module = build_model("mlp", federation.input_shape, federation.n_classes, hidden=(8,))
    settings = Settings.of(batch_size=16, path=path, lr=lr, rounds=rounds, **more)
    return assemble(federation, module, METHODS.build(method), Uniform(K), settings), settings


@pytest.mark.parametrize("method", ["fedcgnm", "scaffold", "fedgrab"])
@pytest.mark.parametrize("path", ["reference", "batched"])
def test_a_raced_run_is_the_run_that_had_the_winning_learning_rate_from_the_start(method: str, path: str) -> None:
    """Whatever server, method and clients keep between rounds: a rival has its own."""
    more: dict[str, Any] = {"server": {"optimizer": "adam"}, "metric": "macro_f1", "participation": 0.5}
    raced, settings = problem(path, method=method, **more)
    found = train_rounds(raced, settings, raced.begin())
    assert sum("race" in r for r in found.history) == raced.rates.length and not found.rivals
    assert {"lr", "reward", "balanced_loss", "pr_auc"} <= {*found.history[0]["race"][0]}
    fixed, plain = problem(path, lr=raced.rates.lr, method=method, **more)
    alone = train_rounds(fixed, plain, fixed.begin())
    assert torch.equal(found.x, alone.x)
    for k, kept in fixed.engine.state().items():
        assert all(torch.equal(value, raced.engine.state()[k][name]) for name, value in kept.items())


@pytest.mark.parametrize("rivals", [True, False])
@pytest.mark.parametrize("path", ["reference", "batched"])
def test_a_run_races_then_trains_at_what_won(path: str, rivals: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p, settings = problem(path)
    monkeypatch.setattr(p.engine, "takes_rivals", rivals)  # as under masks, where a model is asked about once
    history = train_rounds(p, settings, p.begin()).history
    raced = [r for r in history if "race" in r]
    assert raced and raced == history[: len(raced)]
    assert all(r["searching"] for r in history[: len(raced) - 1]) and not history[-1]["searching"]
    assert len(raced[0]["race"]) > len(raced[-1]["race"]) or len(raced) == 1
    assert history[-1]["lr"] == pytest.approx(1e-4)


@pytest.mark.parametrize("method", ["fedcgnm", "scaffold"])
def test_a_raced_run_resumes_with_the_same_bits(method: str, tmp_path: Path) -> None:
    p, settings = problem(method=method)

    def save(state: State, record: dict[str, Any], seconds: float) -> None:
        if state.round == 2:
            assert len(state.rivals) == 2
            save_checkpoint(tmp_path, p.capture(state))

    whole = train_rounds(p, settings, p.begin(), save)
    again, _ = problem(method=method)
    state = load_checkpoint(tmp_path, again.model.vector, whole.history)
    assert state is not None and again.rates.evidence == []
    resumed = train_rounds(again, settings, again.restore(state))
    assert torch.equal(resumed.x, whole.x)
    assert history_text(resumed.history) == history_text(whole.history)


@pytest.mark.parametrize("path", ["reference", "batched"])
def test_a_rival_that_diverges_loses_and_its_clients_stay(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LRS, "sgd", (0.1, 1e12, 1e9))  # type: ignore[arg-type]
    federation = blob_federation(K)
    result = fit(federation, "mlp", FedAvg(), 0.5, lr="auto", rounds=10, path=path, batch_size=4)
    assert result.summary["refused"] == 0
    assert result.history[0]["race"][0]["diverged"]
    assert result.history[-1]["lr"] < 0.1 and np.isfinite(result.history[-1]["train_loss"])


def test_two_searches_for_a_learning_rate_are_refused() -> None:
    strategy = FedHOO(K, searches="lr", low=0.01, high=0.4, log=True)
    with pytest.raises(FedtailError, match="both search for a learning rate"):
        fit(blob_federation(K), rates=strategy, lr="auto", rounds=10)


@pytest.mark.parametrize("bad", [-1, 0, "fast"])
def test_a_bad_learning_rate_is_one_line_that_names_auto(bad: Any) -> None:
    with pytest.raises(FedtailError, match=r"^lr = .* or 'auto'$"):
        Settings.of(lr=bad)


@pytest.mark.parametrize(
    ("precision", "told", "winner"),
    [([0.30, 0.36], True, 1), ([0.30, 0.305], True, 0), ([np.nan, np.nan], True, 0), ([np.nan, np.nan], False, 1)],
)
def test_a_race_compares_by_loss_and_order_and_by_what_is_told_of_them(precision, told, winner, monkeypatch) -> None:
    """A model that is sure of nothing has the lesser class-balanced loss and the worse order."""
    values = {
        "macro_f1": np.array([0.2, 0.3]),
        "balanced_loss": np.array([0.40, 0.38]) if told else np.full(2, np.nan),
        "pr_auc": np.array(precision),
    }
    monkeypatch.setattr(search, "_values", lambda *given: {m: values[m] for m in given[3:]})
    problem: Any = SimpleNamespace()
    found, shown = search.race_values(problem, Settings.of(metric="macro_f1"), None, np.arange(2))  # type: ignore[arg-type]
    assert int(np.argmax(found)) == winner
    assert ("pr_auc" in shown) == bool(np.isfinite(precision).all())
    if told:
        assert shown["balanced_loss"] == pytest.approx(1 / values["balanced_loss"] - 1)


def test_where_the_race_ends_below_the_last_learning_rate_it_stays_and_does_not_rise(monkeypatch) -> None:
    monkeypatch.setattr(search, "LAST", 5.0)
    result = fit(blob_federation(K), "mlp", FedAvg(), rounds=12, lr="auto", batch_size=16)
    after = [r["lr"] for r in result.history if "race" not in r]
    assert len(after) > 3 and set(after) == {result.summary["found"]["lr"]}
