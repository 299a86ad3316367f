"""Several runs in one process, taking turns: each leaves the very files that it leaves alone."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from fedtail.runs.build import build_federation
from fedtail.runs.config import load_config
from fedtail.simulate import turns
from fedtail.simulate.graph.resident import shared_samples
from fedtail.study import cells as study
from fedtail.study.cells import (
    AT_ONCE,
    Cell,
    Outcome,
    launcher_of,
    one_by_one,
    run_cell,
    run_cells,
    seeds_of,
    together,
)

GRAPH = [
    "data.name=digits", "data.clients=2", "model.name=small_cnn", "engine.path=graph", "run.rounds=2",
    "local.batch_size=64",
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
    take = turns._Line.take

    def counted(self: turns._Line) -> None:
        take(self)
        handed.add(threading.get_ident())

    monkeypatch.setattr(turns._Line, "take", counted)
    *runs, bad = run_cells(cells, tmp_path / "together", launcher=together(3))
    assert len(handed) == 3
    for cell, outcome in zip(cells, runs, strict=False):
        kept = contents(outcome)
        assert kept == contents(run_cell(cell, tmp_path / "alone")) and len(kept) >= 3
    assert bad.error is not None and bad.error == run_cell(cells[-1], tmp_path / "alone").error


def test_a_cell_that_ran_out_of_memory_among_others_is_run_again_alone(tmp_path: Path, monkeypatch) -> None:
    cells, tried = seeds_of(config(), "cell", range(3)), list[str]()

    def scarce(cell: Cell, base: Path, on_round=None) -> Outcome:
        tried.append(cell.label)
        full = cell.label == "cell-s1" and tried.count(cell.label) == 1
        return Outcome(cell, base, error="OutOfMemoryError: CUDA out of memory" if full else None)

    monkeypatch.setattr(study, "run_cell", scarce)
    outcomes = list(together(2)(cells, tmp_path))
    assert [o.cell.label for o in outcomes][-1] == tried[-1] == "cell-s1" and len(tried) == 4
    assert {o.error for o in outcomes} == {None}


def test_a_caller_that_wants_no_more_ends_all_runs(tmp_path: Path) -> None:
    cells = [*seeds_of(config("run.rounds=1"), "short", [0]), *seeds_of(config("run.rounds=400"), "long", range(2))]
    before, launched = threading.active_count(), together(3)(cells, tmp_path)
    first = next(launched)
    assert first.cell.label == "short-s0" and first.error is None
    launched.close()
    assert threading.active_count() == before
    assert not any((c.folder(tmp_path) / "result.json").exists() for c in cells[1:])


def test_cells_on_a_gpu_share_a_process_and_others_have_their_own(monkeypatch) -> None:
    monkeypatch.setattr(study, "together", lambda runs: ("together", runs))
    monkeypatch.setattr(study, "in_processes", lambda workers: ("processes", workers))
    on_gpu, on_cpu = (seeds_of(config(f"engine.device={d}"), d, range(9)) for d in ("cuda", "cpu"))
    assert launcher_of(on_gpu, 16) == ("together", AT_ONCE) and launcher_of(on_gpu, 2) == ("together", 2)
    assert launcher_of(on_cpu, 16) == ("processes", 16)
    assert launcher_of(on_gpu, 1) is launcher_of(on_gpu[:1], 16) is one_by_one


def test_runs_on_the_same_data_hold_it_once() -> None:
    federation = build_federation(config())
    one, again = (shared_samples(federation, torch.device("cpu")) for _ in range(2))
    other = shared_samples(build_federation(config("run.seed=1")), torch.device("cpu"))
    assert one[0] is again[0] and one[1] is again[1] and other[0] is not one[0]
