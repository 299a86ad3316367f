"""What a site has given away is counted once, for good, whatever a server calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedtail.federate.protocol.faults import CodedError
from fedtail.federate.protocol.policy import PolicyError
from fedtail.federate.site.ledger import Ledger, message_key
from tests.federate.conftest import full_disk


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_limit_holds_over_restarts_and_a_repeat_is_free(tmp_path: Path) -> None:
    clock = Clock()
    first = Ledger(tmp_path, clock)
    assert first.charge("rounds", "a", 2) and not first.charge("rounds", "a", 2) and first.charge("rounds", "b", 2)
    again = Ledger(tmp_path, clock)
    assert not again.charge("rounds", "a", 2), "known from before"
    with pytest.raises(PolicyError, match="2 of 2 rounds per day are used up"):
        again.charge("rounds", "c", 2)
    assert again.charge("releases", "c", 2), "each kind has its own"
    clock.now += 86401
    assert again.charge("rounds", "c", 2) and Ledger(tmp_path, clock).spent("rounds") == 1


def test_two_processes_with_one_folder_share_their_limits(tmp_path: Path) -> None:
    one, other = Ledger(tmp_path), Ledger(tmp_path)
    one.charge("rounds", "a", 2)
    other.charge("rounds", "b", 2)
    with pytest.raises(PolicyError):
        one.charge("rounds", "c", 2)


def test_a_line_that_was_cut_off_is_dropped_and_what_follows_is_kept(tmp_path: Path) -> None:
    Ledger(tmp_path).charge("rounds", "a", 0)
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"time": 1, "kind": "rou')
    torn = Ledger(tmp_path)
    torn.charge("rounds", "b", 0)
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == ["a", "b"]


def test_what_an_earlier_version_added_up_counts_for_good(tmp_path: Path) -> None:
    past = {"time": 0.0, "kind": "releases", "key": "past/0.5", "amount": 20, "noise": 0.5}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(past) + "\n")
    ledger = Ledger(tmp_path)
    ledger.charge("releases", "late", 0, noise=2.0)
    assert ledger.releases() == Ledger(tmp_path).releases() == {0.5: 20, 2.0: 1}


def test_a_message_is_known_by_its_bytes_and_not_by_their_order() -> None:
    key = message_key("train", {"meta": b"1", "tensor/x": b"23"})
    assert key == message_key("train", {"tensor/x": b"23", "meta": b"1"})
    others = [("train", {"meta": b"12", "tensor/x": b"3"}), ("hello", {"meta": b"1", "tensor/x": b"23"})]
    assert key not in [message_key(*other) for other in others]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (bytes(300), "is empty"), (bytes(300) + b"\n", "has a line that cannot be read")],
)
def test_a_ledger_that_was_lost_gives_no_full_budgets(tmp_path: Path, content: bytes, said: str) -> None:
    Ledger(tmp_path).charge("releases", "a", 0, noise=1.0)
    (tmp_path / "ledger.jsonl").write_bytes(content)
    with pytest.raises(CodedError, match=f"{said}, so nobody knows what this site gave away") as refused:
        Ledger(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_ledger_that_shrinks_under_a_worker_is_noticed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.charge("rounds", "a", 0)
    (tmp_path / "ledger.jsonl").write_bytes(b"")
    with pytest.raises(CodedError, match="has become shorter"):
        ledger.charge("rounds", "b", 0)


def test_what_could_not_be_written_was_not_given_away(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.charge("rounds", "a", 0)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        ledger.charge("rounds", "b", 0)
    assert ledger.charge("rounds", "b", 0), "not entered before"
    assert set(Ledger(tmp_path).entries) == {("rounds", "a"), ("rounds", "b")}
