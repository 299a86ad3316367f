import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedtail.data import DATASETS
from fedtail.errors import FedtailError
from fedtail.runs.config import load_config
from fedtail.study.cells import Cell, run_cell, run_cells, seeds_of
from fedtail_experiments.launchers import launcher_for, on_ray

SMALL = ["data.name=blobs", "data.n_max=60", "data.clients=2", "run.rounds=1"]


class FakeRay(types.ModuleType):
    """The few calls of Ray that the launcher makes, run in this process; the second task is lost."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.up, self.asked, self.tasks = False, [], []

    def is_initialized(self) -> bool:
        return self.up

    def init(self, **options: object) -> None:
        self.up = True
        assert options["include_dashboard"] is False

    def shutdown(self) -> None:
        self.up = False

    def remote(self, **resources: float):
        self.asked.append(resources)

        def wrap(function):
            def submit(*arguments):
                self.tasks.append((function, arguments))
                return len(self.tasks) - 1

            return types.SimpleNamespace(remote=submit)

        return wrap

    def wait(self, references, num_returns: int):
        return references[:num_returns], references[num_returns:]

    def get(self, reference: int):
        if reference == 1:
            raise RuntimeError("node died\nwith a long trace")
        function, arguments = self.tasks[reference]
        return function(*arguments)


def test_ray_runs_every_cell_and_a_lost_node_is_that_cells_error(tmp_path: Path, monkeypatch) -> None:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    cells = seeds_of(load_config(None, SMALL), "cell", range(3))
    outcomes = run_cells(cells, tmp_path, launcher=on_ray(gpus=1.0))
    assert [o.error for o in outcomes] == [None, "RuntimeError: node died", None]
    assert (outcomes[0].folder / "result.json").is_file() and not fake.up
    assert fake.asked == [{"num_cpus": 1.0, "num_gpus": 1.0}]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (pip install 'ray>=2.30')")
def test_a_ray_cluster_on_this_machine_gives_the_bits_of_processes(tmp_path: Path) -> None:
    broken = seeds_of(load_config(None, [*SMALL, "data.n_classes=1"]), "broken", range(1))
    cells = [*seeds_of(load_config(None, SMALL), "cell", range(2)), *broken]
    here, there = run_cells(cells, tmp_path / "here"), run_cells(cells, tmp_path / "there", launcher=on_ray())
    assert [o.error for o in there] == [o.error for o in here]
    assert [o.error is None for o in there] == [True, True, False]
    for a, b in zip(here[:2], there[:2], strict=True):
        ours, theirs = load_file(a.folder / "model.safetensors"), load_file(b.folder / "model.safetensors")
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_missing_ray_and_unknown_launchers_are_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FedtailError, match="pip install 'ray>="):
        on_ray()
    with pytest.raises(FedtailError, match="processes"):
        launcher_for("slurm", [])


def test_cells_of_the_same_data_read_them_once_and_have_the_bits_they_have_alone(tmp_path: Path, monkeypatch) -> None:
    read = []
    build = type(DATASETS).build

    def counted(self: Any, name: str, *given: Any, **options: Any) -> Any:
        read.append(name)
        return build(self, name, *given, **options)

    monkeypatch.setattr(type(DATASETS), "build", counted)
    cells = [
        Cell(f"c{i}", load_config(None, [*SMALL, "data.seed=0", *more]))
        for i, more in enumerate(
            (["run.seed=0"], ["run.seed=1"], ["method.name=fedavg"], ["data.n_max=50"], ["data.seed=1"])
        )
    ]
    done = run_cells(cells, tmp_path / "together")
    assert read.count("blobs") == 3
    run_cells(cells[:1], tmp_path / "later")
    assert read.count("blobs") == 4  # files may have changed
    alone = [run_cell(cell, tmp_path / "alone") for cell in cells]
    for one, other in zip(done, alone, strict=True):
        assert one.error is None and other.error is None
        weights = [(o.folder / "model.safetensors").read_bytes() for o in (one, other)]
        assert weights[0] == weights[1]
