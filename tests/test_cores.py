"""How many cores a process may use: of the machine, of its container, beside other runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedtail import cores as module
from fedtail.cores import cgroup_limit, grant_cores, usable_cores
from fedtail.simulate.workers import MOST, Workers
from fedtail.study import cells


def test_a_containers_limit_is_found_where_it_is_set(tmp_path: Path) -> None:
    table, root = tmp_path / "table", tmp_path / "cgroup"
    assert cgroup_limit(root, table) == float("inf")
    table.write_text("0::/jobs/mine\n")
    (root / "jobs" / "mine").mkdir(parents=True)
    assert cgroup_limit(root, table) == float("inf")
    (root / "jobs" / "mine" / "cpu.max").write_text("max 100000\n")
    (root / "jobs" / "cpu.max").write_text("250000 100000\n")  # of the group above
    assert cgroup_limit(root, table) == 2.5
    table.write_text("5:memory:/jobs\n4:cpu,cpuacct:/docker\n")  # version 1
    (root / "cpu" / "docker").mkdir(parents=True)
    (root / "cpu" / "docker" / "cpu.cfs_quota_us").write_text("600000\n")
    (root / "cpu" / "docker" / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_limit(root, table) == 6.0


def test_auto_has_the_containers_cores_at_most_those_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cgroup_limit", lambda: 6.9)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(module, "_granted", float("inf"))
    assert usable_cores() == 6 and Workers("auto").n == 6 and Workers(9).n == 9
    with monkeypatch.context() as roomy:
        roomy.setattr(module, "cgroup_limit", lambda: 2.0 * MOST)
        assert Workers("auto").n == MOST
    grant_cores(2)
    assert usable_cores() == Workers("auto").n == 2


def test_cells_side_by_side_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    granted = []

    class Pool:
        def __init__(self, n: int, **how: object) -> None:
            granted.append((n, *how["initargs"]))  # type: ignore[misc]
            raise RuntimeError("enough is known")

    monkeypatch.setattr(cells, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(cells, "usable_cores", lambda: 16)
    for workers, n in ((4, 9), (4, 3), (30, 40)):
        with pytest.raises(RuntimeError):
            next(cells.in_processes(workers)([None] * n, tmp_path))  # type: ignore[list-item]
    assert granted == [(4, 4), (3, 5), (30, 1)]
