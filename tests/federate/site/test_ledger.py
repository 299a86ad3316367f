"""What a site has given away is counted once, for good, whatever a server calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedtail.federate.protocol.faults import CodedError
from fedtail.federate.protocol.policy import Policy, PolicyError
from fedtail.federate.site.ledger import Ledger
from tests.federate.conftest import full_disk


def test_an_answer_counts_once_and_over_restarts(tmp_path: Path) -> None:
    first = Ledger(tmp_path)
    for exchange in ("a", "a", "b"):
        first.charge(exchange, 2.0)
    again = Ledger(tmp_path)
    again.charge("a", 2.0)
    again.charge("c", 0.5)
    assert again.releases() == Ledger(tmp_path).releases() == {2.0: 2, 0.5: 1}


def test_two_processes_with_one_folder_share_their_budget(tmp_path: Path) -> None:
    one, other = Ledger(tmp_path), Ledger(tmp_path)
    one.charge("a", 1.0)
    other.charge("b", 1.0)
    one.charge("a", 1.0)
    assert one.releases() == {1.0: 2}


def test_a_budget_that_another_process_has_spent_is_spent(tmp_path: Path) -> None:
    """And what is paid for is paid for, when its answer is made again."""
    one, other, allowed = Ledger(tmp_path), Ledger(tmp_path), Policy(max_epsilon=9.0).check_epsilon
    for k in range(3):
        one.charge(f"a/{k}", 1.0, allowed)
    with pytest.raises(PolicyError, match="epsilon would be 10"):
        other.charge("b/1", 1.0, allowed)
    other.charge("a/2", 1.0, allowed)
    assert Ledger(tmp_path).releases() == {1.0: 3}


def test_a_line_that_was_cut_off_is_dropped_and_what_follows_is_kept(tmp_path: Path) -> None:
    Ledger(tmp_path).charge("a", 1.0)
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"time": 1, "kind": "rel')
    Ledger(tmp_path).charge("b", 1.0)
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == ["a", "b"]


def test_what_an_earlier_version_wrote_counts_for_good(tmp_path: Path) -> None:
    past = {"time": 0.0, "kind": "releases", "key": "past/0.5", "amount": 20, "noise": 0.5}
    round_ = {"time": 0.0, "kind": "rounds", "key": "0" * 64, "amount": 1, "noise": 0.0}
    (tmp_path / "ledger.jsonl").write_text(f"{json.dumps(past)}\n{json.dumps(round_)}\n")
    ledger = Ledger(tmp_path)
    ledger.charge("late", 2.0)
    assert ledger.releases() == Ledger(tmp_path).releases() == {0.5: 20, 2.0: 1}


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (bytes(300), "is empty"), (bytes(300) + b"\n", "has a line that cannot be read")],
)
def test_a_ledger_that_was_lost_gives_no_full_budgets(tmp_path: Path, content: bytes, said: str) -> None:
    Ledger(tmp_path).charge("a", 1.0)
    (tmp_path / "ledger.jsonl").write_bytes(content)
    with pytest.raises(CodedError, match=f"{said}, so nobody knows what this site gave away") as refused:
        Ledger(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_ledger_that_shrinks_under_a_worker_is_noticed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.charge("a", 1.0)
    (tmp_path / "ledger.jsonl").write_bytes(b"")
    with pytest.raises(CodedError, match="has become shorter"):
        ledger.charge("b", 1.0)


def test_what_could_not_be_written_was_not_given_away(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.charge("a", 1.0)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        ledger.charge("b", 1.0)
    assert set(ledger.answers) == {"a"}
    ledger.charge("b", 1.0)
    assert set(Ledger(tmp_path).answers) == {"a", "b"}
