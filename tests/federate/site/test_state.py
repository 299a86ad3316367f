"""A site's method state follows the server, also backwards."""

from __future__ import annotations

from pathlib import Path

import torch

from fedtail.federate.site.prepared import SiteState


def value(state: dict[str, torch.Tensor]) -> float | None:
    return float(state["v"]) if state else None


def test_a_resumed_server_finds_the_state_of_the_round_it_repeats(tmp_path: Path) -> None:
    store = SiteState(tmp_path / "run")
    for t in range(4):
        store.hold(t, [{"v": torch.tensor(10.0 * t)}, {"v": torch.tensor(10.0 * t + 1)}])
        store.commit(t, 1)
        store.commit(t, 1)
    store = SiteState(tmp_path / "run")
    assert value(store.before(4)) == 31.0
    assert value(store.before(2)) == 11.0
    assert value(store.before(4)) == 11.0, "states after the repeated round are forgotten"


def test_a_round_that_was_missed_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    store = SiteState(tmp_path)
    assert store.before(0) == {}
    store.hold(0, [{"v": torch.tensor(1.0)}])
    store.commit(0, 0)
    store.hold(1, [{"v": torch.tensor(2.0)}])
    assert value(store.before(2)) == 1.0, "round 1 was never committed"
