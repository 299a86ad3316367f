"""What a hostile server gets from a site with default settings; docs/threat-model.md refers to these tests."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtail.core.privacy import gaussian_epsilon
from fedtail.core.records import Task
from fedtail.data import DATASETS, Federation, partition
from fedtail.federate.protocol.faults import CODES
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.wire import Parcel, Parts, pack, pack_task, unpack, unpack_update
from fedtail.federate.site.site import Site
from fedtail.models.flat import FlatModel
from fedtail.settings import Local

PATH = Path(__file__).parents[3] / "benchmarks" / "reconstruction.py"
spec = importlib.util.spec_from_file_location("reconstruction", PATH)
assert spec is not None and spec.loader is not None
reconstruction = importlib.util.module_from_spec(spec)
sys.modules["reconstruction"] = reconstruction
spec.loader.exec_module(reconstruction)
Own = reconstruction.Own


@pytest.fixture(scope="module")
def federation() -> Federation:
    pooled = DATASETS.build("blobs", n_max=200, n_features=6, n_classes=3)
    return partition(pooled.train, pooled.test, clients=2, classes=pooled.classes, transform=pooled.transform)


def site(federation: Federation, folder: Path | None = None, **policy: Any) -> Site:
    return Site("north", Own(federation, 0), Policy(**policy), folder)


def job(federation: Federation, **more: Any) -> Job:
    return Job(
        **{
            "run": "attack",
            "model": "mlp",
            "input_shape": federation.input_shape,
            "classes": federation.classes,
            "method": "fedcgnm",
            "rounds": 5,
            "model_options": {"hidden": [8]},
            "local": Local(batch_size=32),
            **more,
        }
    )


def first(job: Job) -> Tensor:
    """The model that an honest run begins with."""
    return FlatModel(job.build_model(job.seed)).vector.clone()


def message(job: Job, x: Tensor, probes: Any = (0.5,), lr: float = 0.1, round: int = 0, rival: int = 0) -> Parts:
    task = Task(round, x, (0,), {"rate": np.array([probes])}, lr, rival=rival)
    return pack(pack_task(task, 0, {"job": job.to_json(), "client": 0}))


def asked(site: Site, phase: str, parts: Parts) -> Parcel:
    return unpack(site.handle(phase, parts))


def test_rows_are_read_back_from_a_crafted_model_where_nothing_is_done_about_it_and_not_with_defaults() -> None:
    """One message of 0.19 MB, 650 rows. The defaults refuse it, and keep back what would tell of single rows from a
    server that calls it a later round: not one row is left, nor in the sum of three sites."""
    rows = [reconstruction.rows(650, seed) for seed in range(3)]
    assert reconstruction.attack(rows[0], reconstruction.OPEN).share > 0.6
    assert reconstruction.attack(rows[0], {}) == reconstruction.Outcome(0.0, "refused: policy-model")
    for craft in (reconstruction.bins, reconstruction.traps):
        assert reconstruction.attack(rows[0], {}, craft, round=5) == reconstruction.Outcome(0.0, "answered")
    assert reconstruction.attack_sum(rows, {}, round=5) == reconstruction.Outcome(0.0, "answered")
    assert reconstruction.attack(rows[0], reconstruction.OPEN, noise=0.01).share == 0.0


def constant(job: Job, answer: int, strength: float) -> Tensor:
    """A model with one answer for all."""
    model = FlatModel(job.build_model())
    with torch.no_grad():
        for part in model.params:
            part.zero_()
        model.params[-1][answer] = strength
    return model.vector.clone()


def test_constant_predictors_count_no_class(federation: Federation) -> None:
    """Off by a draw of deviation 5, the same however often and in whatever way it is asked for: asking 40 times in
    other words teaches nothing."""
    asked_for = job(federation)
    mine, victim = federation.client(0), site(federation)
    truth = np.bincount(mine.pool.y[mine.validation], minlength=3)
    for c in range(3):
        answers = set()
        for strength in np.linspace(1, 9, 20):
            x = constant(asked_for, c, float(strength))
            meta = {"job": asked_for.to_json(), "client": 0}
            reply = asked(victim, "confusion", pack(Parcel({**meta, "splits": ["validation"]}, {"x": x})))
            totals = asked(victim, "validate", pack(Parcel(meta, {"models": x[None]})))
            answers |= {int(reply.tensors["validation"][0]), int(totals.tensors["counts"][0, 0, 0])}
        assert len(answers) == 1, "sticky"
    open_site = site(federation, min_cell=0)
    x = constant(asked_for, 0, 5.0)
    meta = {"job": asked_for.to_json(), "client": 0, "splits": ["validation"]}
    assert int(asked(open_site, "confusion", pack(Parcel(meta, {"x": x}))).tensors["validation"][0]) == truth[0]
    draws = [site(federation).guard.blur(np.diag([0, 400, 0]), "test") for _ in range(300)]
    assert np.std([d for d in draws if d < 0]) * 2 > 3 and all(-25 < d <= 0 for d in draws), "clipped at what is there"
    draws = [site(federation).guard.blur(np.array([[0, 200, 0], [0, 200, 0], [0, 0, 0]]), "test") for _ in range(300)]
    assert 4 < np.std(draws) < 6


def test_an_honest_model_is_validated_as_it_is(federation: Federation) -> None:
    matrix = np.array([[20, 3, 0], [2, 30, 1], [0, 0, 4]])
    assert site(federation).guard.blur(matrix, "validation") == 0


def test_statistics_with_new_seeds_are_counted(federation: Federation) -> None:
    victim = site(federation)
    codes = [
        asked(victim, "statistics", pack(Parcel({"request": {"client": 0, "seed": seed}}))).meta.get("error")
        for seed in range(300)
    ]
    assert codes == [None] * 20 + ["policy-limit"] * 280
    again = asked(victim, "statistics", pack(Parcel({"request": {"client": 0, "seed": 3}})))
    assert "error" not in again.meta, "what was answered is answered again"


def test_models_that_are_all_called_round_0_are_counted_one_by_one(federation: Federation, tmp_path: Path) -> None:
    asked_for = job(federation)
    victim, x = site(federation, tmp_path, max_rounds_per_day=1), first(asked_for)
    replies = [asked(victim, "train", message(asked_for, x + 1e-6 * i)) for i in range(50)]
    assert [r.meta.get("error") for r in replies] == [None] + ["policy-limit"] * 49
    restarted = site(federation, tmp_path, max_rounds_per_day=1)
    again = asked(restarted, "train", message(asked_for, x))
    assert torch.equal(again.tensors["delta"], replies[0].tensors["delta"]), "the same message, the same bits, free"
    assert asked(restarted, "train", message(asked_for, x + 1e-5)).meta["error"] == "policy-limit"


def test_a_model_far_from_the_last_one_is_refused(federation: Federation) -> None:
    asked_for, victim = job(federation), site(federation)
    x = first(asked_for)
    assert asked(victim, "train", message(asked_for, 2 * x)).meta["error"] == "policy-model", "not what the seed gives"
    delta = unpack_update(asked(victim, "train", message(asked_for, x))).delta[0]
    assert "error" not in asked(victim, "train", message(asked_for, x + delta, round=1)).meta
    far = x + 30 * delta
    assert asked(victim, "train", message(asked_for, far, round=2)).meta["error"] == "policy-model"
    assert asked(victim, "train", message(asked_for, x * torch.nan, round=2)).meta["error"] == "policy-model"


def test_models_that_race_are_each_held_to_their_own_way(federation: Federation) -> None:
    asked_for, victim = job(federation), site(federation)
    x, deltas = first(asked_for), []
    for rival, lr in enumerate((0.001, 0.5)):
        reply = asked(victim, "train", message(asked_for, x, lr=lr, rival=rival))
        deltas.append(unpack_update(reply).delta[0])
    slow, fast = (x + delta for delta in deltas)
    assert asked(victim, "train", message(asked_for, fast, round=1)).meta["error"] == "policy-model"
    for rival, model in enumerate((slow, fast)):
        assert "error" not in asked(victim, "train", message(asked_for, model, round=1, rival=rival)).meta
    assert asked(victim, "train", message(asked_for, x, rival=8)).meta["error"] == "out-of-range"


def test_noise_does_not_average_out_over_equal_probes_or_messages(federation: Federation, tmp_path: Path) -> None:
    """2,000 equal probes: refused by default; where allowed, they are one release, with one noise."""
    asked_for = job(federation, noise=1.0)
    x = first(asked_for)
    for many, code in ((20, "policy-training"), (2000, "malformed")):
        assert asked(site(federation), "train", message(asked_for, x, [0.5] * many)).meta["error"] == code
    victim = site(federation, tmp_path, min_noise=1.0, max_probes=0)
    rows = unpack_update(asked(victim, "train", message(asked_for, x, [0.5] * 20 + [0.5 + 1e-12] * 20))).delta
    assert len(torch.unique(rows, dim=0)) == 1 and victim.ledger.releases() == {1.0: 1}
    again = unpack_update(asked(site(federation, tmp_path), "train", message(asked_for, x, [0.5] * 2))).delta
    assert torch.equal(again[0], rows[0]) and Site("o", Own(federation, 0), folder=tmp_path).ledger.releases() == {
        1.0: 1
    }
    elsewhere = unpack_update(asked(site(federation), "train", message(asked_for, x))).delta
    assert not torch.equal(elsewhere[0], rows[0]), "another site, other noise"


def test_the_budget_of_epsilon_holds_over_runs_and_restarts_and_a_resumed_round_is_free(
    federation: Federation, tmp_path: Path
) -> None:
    limit = gaussian_epsilon({4.0: 3}, 1e-5)
    policy = {"max_epsilon": limit + 1e-9, "max_move": 0.0}
    codes = []
    for i, run in enumerate(("one", "one", "two", "two")):
        for _ in range(2):  # each once more, as a server that is resumed sends it
            asked_for = job(federation, noise=4.0, run=run)
            x = first(asked_for) + 1e-3 * i
            reply = asked(site(federation, tmp_path, **policy), "train", message(asked_for, x))
            codes.append(reply.meta.get("error"))
    assert codes == [None] * 6 + ["policy-limit"] * 2
    plain = job(federation)
    assert (
        asked(site(federation, tmp_path, **policy), "train", message(plain, first(plain))).meta["error"]
        == "policy-noise"
    )


@pytest.mark.parametrize(
    ("change", "ask"),
    [
        ({"local": Local(batch_size=1)}, {}),
        ({"local": Local(batch_size=32, epochs=1000)}, {}),
        ({}, {"lr": 1e6}),
        ({}, {"lr": -1.0}),
    ],
)
def test_what_a_message_may_ask_of_training_has_bounds(federation: Federation, change: dict, ask: dict) -> None:
    asked_for = job(federation, **change)
    assert (
        asked(site(federation), "train", message(asked_for, first(asked_for), **ask)).meta["error"] == "policy-training"
    )


def test_a_message_beyond_the_limit_is_not_read(federation: Federation) -> None:
    parts = {"meta": b"{}", "tensor/x": bytes(2_000_000)}
    assert asked(site(federation, max_message_mb=1), "train", parts).meta["error"] == "policy-size"


def test_no_word_of_an_error_leaves_a_site(federation: Federation, tmp_path: Path) -> None:
    class Broken(Own):  # type: ignore[misc, valid-type]
        def client(self, index: int, job: Job) -> Any:
            raise ValueError("row 17: Jane Doe, born 1971 \x1b[31m" + "x" * 5_000_000)

    victim = Site("north", Broken(federation, 0), folder=tmp_path)
    asked_for = job(federation)
    reply = victim.handle("train", message(asked_for, first(asked_for)))
    said = unpack(reply).meta["error"]
    assert said in CODES and sum(map(len, reply.values())) < 200
    kept = json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[-1])
    assert "Jane Doe" in kept["reason"] and "\x1b" not in kept["reason"] and len(kept["reason"]) <= 1000
