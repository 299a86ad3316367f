"""Messages survive the trip bit by bit, and what is not a message is refused."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtail.core.candidates import binary_candidates
from fedtail.core.records import Task, Update
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.limits import Budget, open_json
from fedtail.federate.protocol.wire import (
    Parcel,
    WireError,
    pack,
    pack_candidates,
    pack_task,
    pack_update,
    unpack,
    unpack_candidates,
    unpack_task,
    unpack_update,
)

numbers = st.floats(width=32, allow_nan=False)


@given(st.lists(numbers, min_size=1, max_size=20), st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 3))
def test_an_update_arrives_bit_by_bit(values: list[float], loss: float, probes: int) -> None:
    delta = torch.tensor(values, dtype=torch.float32).repeat(probes, 1)
    update = Update(
        4, delta, 17, (5,) * probes, (loss,) * probes, {"local_gain": np.full(probes, loss)}, {"c": delta[:, :1]}
    )
    back = unpack_update(unpack(pack(pack_update(update, {"round": 2}))))
    assert torch.equal(back.delta.view(torch.int32), delta.view(torch.int32))
    assert (back.client, back.n_samples, back.steps, back.loss) == (4, 17, update.steps, update.loss)
    assert np.array_equal(back.reports["local_gain"], update.reports["local_gain"])
    assert torch.equal(back.extras["c"], delta[:, :1])


def test_a_client_gets_its_own_row_and_messages_of_a_task_only() -> None:
    rates = np.array([[0.1, 0.2], [0.3, 0.4]])
    task = Task(
        7, torch.arange(3.0), (2, 5), {"rate": rates, "lr": rates + 1}, 0.05, {"w": torch.ones(2)},
        {2: {"secret": torch.zeros(1)}, 5: {"mine": torch.ones(1)}}, reports=frozenset({"local_gain"}),
    )  # fmt: skip
    back = unpack_task(unpack(pack(pack_task(task, 1, {}))))
    assert (back.round, back.clients, back.lr, back.reports) == (7, (5,), 0.05, task.reports)
    assert np.array_equal(back.probes["rate"], rates[1:]) and np.array_equal(back.probes["lr"], rates[1:] + 1)
    assert set(back.messages) == {5} and set(back.messages[5]) == {"mine"} and set(back.broadcast) == {"w"}


def test_candidates_cost_one_vector_more_than_there_are_clients() -> None:
    torch.manual_seed(0)
    candidates = binary_candidates(torch.randn(9), np.full(3, 1 / 3), torch.randn(3, 2, 9), np.arange(3), 3)
    parts = pack(pack_candidates(candidates))
    back = unpack_candidates(unpack(parts))
    assert sum(name.startswith("tensor/direction") for name in parts) == 3
    assert all(torch.equal(candidates.model(s), back.model(s)) for s in range(8))


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"meta": b""},
        {"meta": b"[1]"},
        {"meta": b"{}"},
        {"meta": b'{"format": 99}'},
        {"meta": b'{"format": 1}', "tensor/x": b"not a tensor"},
        {"meta": b"\xff\xfe"},
    ],
)
def test_what_is_not_a_message_is_refused_in_one_line(parts: dict[str, bytes]) -> None:
    with pytest.raises(WireError) as caught:
        unpack(parts)
    assert caught.value.code == "malformed" and "\n" not in str(caught.value)


def test_an_update_without_its_fields_is_refused() -> None:
    with pytest.raises(WireError, match="malformed update"):
        unpack_update(Parcel({"update": {"client": 0}}))


def test_a_job_comes_back_equal_from_json() -> None:
    job = Job("r", "mlp", (3,), ("a", "b"), "fedcgnm", 5, {"hidden": [4]}, {"beta": 0.7}, augment="flip")
    back = Job.from_json(unpack(pack(Parcel({"job": job.to_json()}))).meta["job"])
    assert back == job


def test_nothing_is_sent_under_a_name_that_no_reader_takes() -> None:
    with pytest.raises(WireError, match=r"a tensor '-1e\+308' that was not asked for"):
        pack(Parcel({}, {"-1e+308": torch.zeros(2)}))


def test_text_that_is_never_closed_is_read_once() -> None:
    """Not once for each of its quotation marks: 64 kB would keep a server busy for twenty seconds."""
    began = time.process_time()
    with pytest.raises(WireError):
        open_json(b'{"a":"' + b'\\"' * 32_000, Budget())
    with pytest.raises(WireError, match="bytes of JSON"):
        open_json(b" " * 70_000, Budget())
    assert time.process_time() - began < 2
