from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from fedtail.data import DATASETS, Federation, partition
from fedtail.models import build_model

torch.set_num_threads(1)
settings.register_profile("fedtail", deadline=None, derandomize=True)
settings.load_profile("fedtail")


def blob_federation(clients: int = 4, seed: int = 0, **options: object) -> Federation:
    """A small long-tailed federation that trains in milliseconds."""
    pool = DATASETS.build("blobs", **{"n_max": 60, "imbalance": 10.0, "test_per_class": 20, "seed": seed, **options})
    return partition(pool.train, pool.test, clients=clients, alpha=1.0, validation=0.2, seed=seed, auxiliary=3)


@pytest.fixture
def federation() -> Federation:
    return blob_federation()


@pytest.fixture
def module(federation: Federation) -> torch.nn.Module:
    return build_model("mlp", federation.input_shape, federation.n_classes, hidden=(16, 8))


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a twentieth of a second whenever somebody looks, however fast the machine is."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 0.05 * next(ticks))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was not tested, and with which command it would be; `make test` repeats it at its end."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    lines = [f"{n} test{'s' if n > 1 else ''} not run: {reason}" for reason, n in reasons.most_common()]
    for line in lines:
        terminalreporter.write_line(line, yellow=True)
    if file := os.environ.get("FEDTAIL_NOT_TESTED"):
        with Path(file).open("a", encoding="utf-8") as out:
            out.writelines(f"{line}\n" for line in lines)
