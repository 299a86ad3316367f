"""What every method must do, whatever it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtail.errors import FedtailError
from fedtail.methods import METHODS, Method
from fedtail.rates import RATES
from fedtail.rounds.checkpoint import load_checkpoint, save_checkpoint
from fedtail.rounds.loop import train_rounds
from fedtail.rounds.state import Problem, State
from fedtail.rounds.validation import kept_model
from fedtail.settings import Settings
from fedtail.simulate.reference import ReferenceSimulator
from tests.methods.federations import awkward_federation, problem, train

OPTIONS: dict[str, dict[str, Any]] = {
    "fednoro": {"warmup": 1, "ramp": 2},  # so that three rounds see both stages
    "climb": {"primal_rounds": 1, "eta": 5.0, "eps": 0.0},
    "fedgrab": {"bypass": True},
    "logit_adjustment": {"prior": "global"},
    "creff": {"features": 8, "match_steps": 10, "steps": 30},
    "ccvr": {"virtual": 50, "steps": 30},
    "fedyoyo": {"warmup": 2},
    "fednpc": {"noise": 100},
    "fedrela": {"begin": 0.0},
    "ldam_drw": {"defer": 0.0},
}
"""Options under which three rounds reach every branch of a method."""


def build(name: str) -> Method:
    return METHODS.build(name, **OPTIONS.get(name, {}))


@pytest.fixture(params=list(METHODS))
def method(request: pytest.FixtureRequest) -> Method:
    return build(request.param)


def test_three_rounds_are_finite_and_the_loss_goes_down(method: Method) -> None:
    state = train(problem(method))
    assert torch.isfinite(state.x).all()
    losses = [r["train_loss"] for r in state.history]
    assert losses[-1] < losses[0]
    json.dumps(state.history)


def test_a_negative_weight_decay_is_refused(method: Method) -> None:
    with pytest.raises(FedtailError, match=r"method\.weight_decay = -0\.1 must be at least 0"):
        replace(method, weight_decay=-0.1)


def test_the_model_learns(method: Method) -> None:
    made = problem(method)
    before = made.engine.confusion(made.begin().x, "test").trace()
    after = made.engine.confusion(train(made, 5).x, "test").trace()
    assert after > before


def test_the_same_seed_gives_the_same_bits_with_any_number_of_workers_in_any_order(method: Method) -> None:
    def backwards(engine: ReferenceSimulator) -> None:
        engine._map = lambda work, items, _=0.0: [work(engine.model, i) for i in reversed(items)][::-1]  # type: ignore

    first = train(problem(method), participation=0.8)
    for other in (problem(method), problem(method, workers=2), problem(method, wrap=backwards)):
        again = train(other, participation=0.8)
        assert torch.equal(first.x, again.x)
        assert json.dumps(first.history) == json.dumps(again.history)


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_a_run_resumed_half_way_ends_with_the_same_bits(method: Method, participation: float, tmp_path: Path) -> None:
    plan = Settings.of(rounds=4, lr=0.05, participation=participation, seed=11, validate_every=0)
    whole = problem(method)
    expected = train_rounds(whole, plan, whole.begin())

    class Killed(Exception):
        pass

    def stop(state: State, record: dict[str, Any], seconds: float) -> None:
        save_checkpoint(tmp_path, first.capture(state))
        if state.round == 2:
            raise Killed

    first = problem(method)
    begun = first.begin()
    with pytest.raises(Killed):
        train_rounds(first, plan, begun, stop)

    second = problem(method)
    state = load_checkpoint(tmp_path, second.model.vector, begun.history)
    assert state is not None
    resumed = train_rounds(second, plan, second.restore(state))
    assert torch.equal(resumed.x, expected.x)
    assert resumed.method.keys() == expected.method.keys()
    for key, value in expected.method.items():
        assert torch.equal(resumed.method[key], value), key
    kept, wanted = second.engine.state(), whole.engine.state()
    assert kept.keys() == wanted.keys()
    for client, tensors in wanted.items():
        for key, value in tensors.items():
            assert torch.equal(kept[client][key], value), (client, key)


def test_every_method_goes_with_the_joint_rate_search(method: Method, tmp_path: Path) -> None:
    federation = awkward_federation(validation=0.2)

    def searched() -> Problem:
        return problem(method, federation, rates=RATES.build("fedhoo", 5, cold_rounds=1), epochs=1)

    whole = searched()
    expected = train(whole, 3)
    assert torch.isfinite(expected.x).all()
    assert len(set(expected.history[-1]["rates"])) > 1 or expected.history[-1]["searching"]

    first = searched()
    save_checkpoint(tmp_path, first.capture(train(first, 2)))
    second = searched()
    state = load_checkpoint(tmp_path, second.model.vector, expected.history[:2])
    assert state is not None
    assert torch.equal(train(second, 3, state=second.restore(state)).x, expected.x)


def test_client_state_is_kept_exactly_by_the_methods_that_say_so(method: Method) -> None:
    made = problem(method)
    train(made)
    has_state = bool(made.engine.state())
    assert has_state == (method.client_state != "none")


def test_uploads_beyond_fedavg_are_declared(method: Method) -> None:
    made = problem(method)
    uploads: set[str] = set()
    run = made.engine.train

    def spy(task: Any) -> Any:
        updates, refusals = run(task)
        for u in updates:
            uploads.update(u.extras)
            uploads.update(u.reports)
            assert all(v.shape[0] == task.n_probes for v in u.extras.values())
        if task.broadcast or task.messages:
            uploads.add("down")
        return updates, refusals

    made.engine.train = spy  # type: ignore[method-assign]
    measured: list[str] = []
    measure = made.engine.measure
    made.engine.measure = lambda x, what: (measured.append(what), measure(x, what))[1]  # type: ignore[method-assign]
    state = train(made)
    kept_model(made, Settings.of(), state)
    if uploads or measured:
        assert method.wire != "nothing"
    else:
        assert method.wire.startswith("nothing")  # or with another option only


def test_options_survive_a_round_trip(method: Method) -> None:
    assert type(method)(**method.config()) == method


def test_the_federation_is_as_awkward_as_claimed() -> None:
    table = awkward_federation().label_map()
    assert (table == 0).any(axis=1).sum() >= 3
    assert ((table > 0).sum(axis=1) == 1).sum() >= 2
    assert 1 in table.sum(axis=1)


def test_what_engines_ask_of_a_method_follows_from_what_it_overrides() -> None:
    class Halved(Method):
        def loss(self, *given: Any) -> Any:
            losses, state = super().loss(*given)
            return losses / 2, state

    class Kept(Halved):
        def finish(self, *given: Any) -> Any:
            return {}, {}

    declared = [(m.traits.own_loss, m.traits.own_finish) for m in (Method, Halved, Kept)]
    assert declared == [(False, False), (True, False), (True, True)]
