"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_granted = math.inf


def grant_cores(cores: int) -> None:
    """Let this process have no more cores than these: others run beside it."""
    global _granted
    _granted = max(cores, 1)


def usable_cores() -> int:
    """Cores for this process: those it may run on, at most a container's limit and what was granted."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(available, cgroup_limit(), _granted)))


def cgroup_limit(root: Path = Path("/sys/fs/cgroup"), table: Path = Path("/proc/self/cgroup")) -> float:
    """Cores that a container grants (Docker's ``--cpus``, Kubernetes' limits, Slurm); infinite where none is set.

    The process's own group may be limited, or any above it; version 2 has one file for it, version 1 two.
    """
    try:
        lines = [line.split(":", 2) for line in table.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return math.inf
    least = math.inf
    for _, kinds, path in (line for line in lines if len(line) == 3):
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = root / "cpu" if kinds else root
        own = top / path.strip("/")
        least = min(least, *(_quota(group) for group in (own, *own.parents) if group == top or top in group.parents))
    return least


def _quota(group: Path) -> float:
    files = [group / "cpu.max"]
    if not files[0].is_file():
        files = [group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"]
    try:
        quota, period = (int(word) for file in files for word in file.read_text(encoding="utf-8").split())
    except (OSError, ValueError):  # not there, or "max"
        return math.inf
    return quota / period if quota > 0 else math.inf
