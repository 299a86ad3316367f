"""Several runs in one process, taking turns: each leaves the very files that it leaves alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fedtail.runs.config import load_config
from fedtail.simulate import turns
from fedtail.simulate.graph.resident import shared_samples
from fedtail.study import cells as study
from fedtail.study.cells import Cell, Outcome, run_cell, run_cells, seeds_of, together

GRAPH = [
    "data.name=digits", "data.clients=3", "model.name=small_cnn", "engine.path=graph", "run.rounds=2",
    "local.batch_size=32",
]  # fmt: skip
KEPT = ("history.jsonl", "model.safetensors", "rates.csv", "clients.json")


def config(*overrides: str):
    return load_config(None, [*GRAPH, *overrides])


def contents(outcome: Outcome) -> dict[str, bytes]:
    assert outcome.error is None, outcome.error
    return {name: (outcome.folder / name).read_bytes() for name in KEPT if (outcome.folder / name).is_file()}


def test_each_run_has_the_bits_it_has_alone_and_an_error_of_one_is_its_own(tmp_path: Path, monkeypatch) -> None:
    cells = [
        *seeds_of(config("rates.name=fedhoo"), "hoo", range(2)),
        *seeds_of(config("method.name=fedgrab"), "grab", [0]),
        Cell("bad", config("local.lr=1e30", "run.quorum=1.0")),
    ]
    handed: set[int] = set()
    take = turns.Turns._take

    def counted(self: turns.Turns) -> None:
        take(self)
        handed.add(threading.get_ident())

    monkeypatch.setattr(turns.Turns, "_take", counted)
    *runs, bad = run_cells(cells, tmp_path / "together", launcher=together(3))
    assert len(handed) == 3
    for cell, outcome in zip(cells, runs, strict=False):
        kept = contents(outcome)
        assert kept == contents(run_cell(cell, tmp_path / "alone")) and len(kept) >= 3
    assert bad.error is not None and bad.error == run_cell(cells[-1], tmp_path / "alone").error
