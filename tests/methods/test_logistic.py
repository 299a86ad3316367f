from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

from fedtail import Federation, fit, load_model, write_run_report
from fedtail.errors import FedtailError
from fedtail.methods.logistic import Logistic, dot, lbfgs_step
from fedtail.runs.config import changed, load_config
from fedtail.runs.execution import run
from fedtail.runs.export import export_onnx
from fedtail.runs.result import Result
from fedtail.settings import Settings
from fedtail.study.compare import comparison_cells, method_configs
from fedtail.study.tuning import tune_settings
from tests.encoders import TINY, draw, draw_folder

COUNTS = {"east": (40, 12, 6), "north": (30, 24, 0), "west": (36, 10, 9)}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("photos"), COUNTS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAIL_CACHE", str(tmp_path / "cache"))


def settings_of(photos: Path, folder: Path, *more: str) -> Settings:
    own = [f"data.path={photos}", f"model.encoder={TINY}", f"run.folder={folder}", "run.name=a", "run.rounds=8"]
    return load_config(None, [*own, *more], {"data.name": "images"}, suggest=True)


def rows(n_sites: int, order: np.ndarray) -> Federation:
    """The same 120 rows of three classes, dealt to sites in an order."""
    rng = np.random.default_rng(1)
    y = np.repeat(np.arange(3), (80, 30, 10))
    x = (rng.normal(size=(3, 9))[y] + rng.normal(size=(120, 9))).astype(np.float32)
    parts = np.array_split(order, n_sites)
    test = (rng.normal(size=(3, 9))[y] * 0, y)
    return Federation.from_arrays([(x[p], y[p]) for p in parts], test, classes=["a", "b", "c"], validation=0.0)


def head(federation: Federation, **more: Any) -> Result:
    return fit(federation, "linear", "logistic", metric="accuracy", select="last", **more)


def weighted_loss(x: torch.Tensor, federation: Federation, power: float, ridge: float) -> torch.Tensor:
    """What the method says that it minimises, of all rows of all sites."""
    data, y = federation.pool.x.double(), federation.pool.y
    normal = F.layer_norm(data, data.shape[1:])
    weight, bias = x[: 3 * 9].view(3, 9), x[3 * 9 :]
    n = torch.bincount(y).double()
    each = (len(y) / (3 * n)) ** power
    loss = (each[y] * F.cross_entropy(normal @ weight.T + bias, y, reduction="none")).mean()
    return loss + ridge / 2 * x.square().sum()


@pytest.mark.parametrize(("power", "ridge"), [(1.0, 0.1), (0.5, 0.01), (0.0, 0.03)])
def test_it_comes_to_the_minimum_of_the_pooled_loss(power: float, ridge: float) -> None:
    federation = rows(4, np.arange(120))  # the rare classes are at the last site
    options = {"power": power, "strongest": ridge, "weakest": ridge}
    settings = {"model": "linear", "metric": "accuracy", "select": "last", "rounds": 60}
    found = fit(federation, method=Logistic(**options), **settings)  # type: ignore[arg-type]
    x = found.x.double().requires_grad_()
    (gradient,) = torch.autograd.grad(weighted_loss(x, federation, power, ridge), x)
    assert float(gradient.norm()) < 1e-5
    data = F.layer_norm(federation.pool.x, (9,)).numpy()
    y = federation.pool.y.numpy()
    n = np.bincount(y)
    usual = LogisticRegression(C=1 / ridge, tol=1e-10, max_iter=5000)
    rows_of = np.concatenate([data, np.ones((120, 1))], 1)  # scikit-learn's own intercept has no ridge
    usual.set_params(fit_intercept=False).fit(rows_of, y, (120 / (3 * n[y])) ** power / 120)
    ours = x.detach().numpy()
    assert np.allclose(np.c_[ours[:27].reshape(3, 9), ours[27:]], usual.coef_, atol=1e-3)


def test_any_partition_gives_the_same_model() -> None:
    shuffled = np.random.default_rng(3).permutation(120)
    first = head(rows(1, np.arange(120)), rounds=12).x
    for n_sites, order in ((3, np.arange(120)), (7, shuffled)):
        assert torch.allclose(head(rows(n_sites, order), rounds=12).x, first, atol=1e-4)


def test_golden_values() -> None:
    found = head(rows(3, np.arange(120)), rounds=6)
    losses = [r["train_loss"] for r in found.history]  # log 3 twice: the first round finds the weights of classes
    assert losses == pytest.approx([1.0986, 1.0986, 0.9778, 0.747, 0.4954, 0.3849], abs=1e-4)
    assert found.x[:4].tolist() == pytest.approx([0.0125, 0.6386, -0.4159, -0.9137], abs=1e-4)


def test_the_first_step_follows_the_weighted_gradient() -> None:
    federation = rows(3, np.arange(120))
    found = fit(
        federation, "linear", "logistic", metric="accuracy", select="last", rounds=3,
        on_round=lambda state, record, seconds: state.round == 2,
    )  # fmt: skip
    zero = torch.zeros(30, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(weighted_loss(zero, federation, 1.0, 1.0), zero)
    assert torch.allclose(found.x.double(), -gradient / (10 / 2 + 1.0), atol=1e-6)


def test_the_ridge_is_held_for_a_quarter_of_the_rounds_and_falls_to_the_weakest_in_the_last() -> None:
    ridges = [Logistic(strongest=2.0, weakest=0.02).ridge(t, 42) for t in range(1, 42)]
    assert ridges[:11] == [2.0] * 11 and ridges[-1] == pytest.approx(0.02)
    factors = [after / before for before, after in pairwise(ridges[10:])]
    assert factors == pytest.approx([0.01 ** (1 / 30)] * 30)


def test_a_step_is_newtons_once_pairs_span_a_quadratic() -> None:
    rng = np.random.default_rng(0)
    root = torch.from_numpy(rng.normal(size=(4, 4)))
    hessian, gradient = root @ root.T + torch.eye(4), torch.from_numpy(rng.normal(size=4))
    moves: list[torch.Tensor] = []
    for v in torch.from_numpy(rng.normal(size=(4, 4))):  # conjugate directions
        moves.append(v - sum(((m @ hessian @ v) / (m @ hessian @ m) * m for m in moves), torch.zeros(4)))
    step = lbfgs_step(gradient, [(m, hessian @ m) for m in moves], 1.0)
    assert torch.allclose(step, torch.linalg.solve(hessian, gradient), atol=1e-9)
    assert torch.equal(lbfgs_step(gradient, [], 0.5), 0.5 * gradient)


def test_a_sum_of_products_is_rounded_once_in_any_order() -> None:
    a = torch.tensor([1e16, 1.0, -1e16, 1.0], dtype=torch.float64)
    assert dot(a, torch.ones(4, dtype=torch.float64)) == 2.0
    assert dot(a.flip(0), torch.ones(4, dtype=torch.float64)) == 2.0


def test_a_folder_of_photos_gets_it_by_default_and_the_round_with_the_lowest_log_loss(
    photos: Path, tmp_path: Path
) -> None:
    config = settings_of(photos, tmp_path)
    assert (config.method.name, config.run.metric, config.run.select) == ("logistic", "macro_f1", "best")
    found = run(config)
    assert found.test["macro_f1"] > 0.6
    losses = [r["validation"]["log_loss"] for r in found.history]
    assert found.summary["selected_round"] == 1 + int(np.argmin(losses))
    assert found.titles["method"] == "Logistic regression"


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(photos: Path, tmp_path: Path) -> None:
    whole = run(settings_of(photos, tmp_path / "whole"))
    run(settings_of(photos, tmp_path / "half"), on_round=lambda state, record, seconds: state.round == 4)
    again = run(settings_of(photos, tmp_path / "half"), resume=True)
    assert torch.equal(again.x, whole.x)
    histories = [(tmp_path / name / "a" / "history.jsonl").read_text() for name in ("half", "whole")]
    assert histories[0] == histories[1]


def test_the_fast_path_agrees_with_the_reference(photos: Path, tmp_path: Path) -> None:
    models = [run(settings_of(photos, tmp_path / p, f"engine.path={p}")).x for p in ("reference", "batched")]
    assert torch.allclose(*models, atol=1e-3)


def test_a_saved_model_predicts_exports_and_decides(photos: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    decide = ["decision.goal=recall", "decision.find=kind2", "decision.recall=0.5", "decision.calibrate=temperature"]
    run(settings_of(photos, tmp_path, "data.validation=0.4", *decide))
    model = load_model(tmp_path / "a", allow_code=True)
    assert model.decision.promise is not None
    x = np.stack([np.asarray(draw(k, np.random.default_rng(k)), dtype=np.float32)[None] for k in range(3)])
    session = onnxruntime.InferenceSession(export_onnx(model, tmp_path / "a.onnx"))
    assert np.allclose(session.run(None, {"x": x})[0], model.predict_proba(x), atol=1e-5)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("local.lr=0.3", "local.lr = 0.3 has no effect with method 'logistic'"),
        ("rates.rate=0.6", "rates.rate = 0.6 has no effect with method 'logistic'"),
        ("rates.name=fedhoo", "rates.name = 'fedhoo' has no effect with method 'logistic'"),
        ("run.participation=0.5", "run.participation = 0.5 has no effect"),
        ("server.optimizer=adam", "server.optimizer = 'adam' has no effect"),
        ("method.weight_decay=0.1", "method.weight_decay has no effect on method 'logistic', which has a ridge"),
        ("method.weakest=2.0", r"method.weakest = 2.0 must be in \(0.0, 1.0\]|method.weakest"),
    ],
)
def test_what_has_no_effect_is_refused_in_one_line(photos: Path, tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(FedtailError, match=said) as error:
        run(settings_of(photos, tmp_path, "method.name=logistic", override))
    assert "\n" not in str(error.value)


def test_a_model_that_is_no_linear_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedtailError, match="trains a linear head from zero"):
        fit(rows(2, np.arange(120)), "mlp", "logistic", rounds=2, metric="accuracy", select="last")
    with pytest.raises(FedtailError, match=r"lr = 0\.2 has no effect with method 'logistic'"):
        fit(rows(2, np.arange(120)), "linear", "logistic", lr=0.2)


def test_networks_are_trained_where_somebody_sets_what_only_they_have(photos: Path, tmp_path: Path) -> None:
    for said in ("local.lr=0.1", "rates.rate=0.5", "method.name=fedavg", "model.name=cosine", "model.unfreeze=1"):
        assert settings_of(photos, tmp_path, said).method.name != "logistic", said


def test_another_method_does_not_inherit_what_this_one_needs(photos: Path, tmp_path: Path) -> None:
    config = settings_of(photos, tmp_path)
    other = changed(config, {"method.name": "fedavg"})
    assert (other.local.lr, other.local.batch_size, other.rates.options.get("rate")) == (0.1, 64, None)
    assert changed(other, {"method.name": "logistic"}).local.batch_size == 1_000_000


def test_it_is_compared_and_tuned_like_any_other(photos: Path, tmp_path: Path) -> None:
    own = [f"data.path={photos}", f"model.encoder={TINY}", "run.rounds=6", f"run.folder={tmp_path}"]
    found = method_configs(["logistic", "fedavg"], None, [*own, "local.epochs=2"], {"data.name": "images"})
    assert (found["logistic"].local.epochs, found["fedavg"].local.epochs) == (1, 2)
    lrs = [cell.config.local.lr for cell in comparison_cells(found, 1, (0.1, 0.3))]
    assert lrs == [1.0, 0.1, 0.3]
    tuned, trials = tune_settings(settings_of(photos, tmp_path), {"data.path"}, 30.0)
    assert tuned.method.name == "logistic" and len(trials.trials) > 1
    assert {key.partition(".")[0] for trial in trials.trials for key in trial.values} == {"method"}


def test_the_history_is_plain(photos: Path, tmp_path: Path) -> None:
    found = run(settings_of(photos, tmp_path))
    json.dumps(found.history)
    page = write_run_report(tmp_path / "a").read_text()
    assert "Logistic regression" in page and "Resampling rates" not in page
    assert {r["lr"] for r in found.history} == {1.0}
