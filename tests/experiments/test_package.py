"""The experiments are a package of their own: found by entry points, missed with one line, imported by nothing else."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.cli.lazy import COMMANDS, UsageError, all_commands
from fedtail.data import DATASETS
from fedtail.data.sources import SOURCES, is_public
from fedtail.errors import FedtailError
from fedtail.methods import METHODS
from fedtail_experiments.paper.declared import load_grid
from fedtail_experiments.paper.reproduce import Reproduction

DIGESTS = {
    ("table-iid", "full"): "5dbf7940a03c",
    ("fedhoo", "cpu"): "8a954b4510ae",
    ("chips", "full"): "8f07af9e4aff",
    ("baselines", "smoke"): "22eae527a07f",
}
"""Grid and scale -> the digests of its cells at seed 0, as they were when the records of this repository were made."""


@pytest.mark.parametrize(("grid", "scale"), DIGESTS)
def test_digests_of_cells_stay_so_that_records_and_finished_runs_are_found(grid: str, scale: str) -> None:
    asked = Reproduction(
        grid=load_grid(grid),
        scale=scale,
        seeds=1,
        first_seed=0,
        tuned=False,
        overrides=[],
        device=None,
        data_dir=None,
    )
    digests = "".join(cell.digest for cell in asked.cells([]).values())
    assert hashlib.sha256(digests.encode()).hexdigest()[:12] == DIGESTS[grid, scale]


def test_its_commands_methods_and_data_sets_are_found_by_name() -> None:
    assert {"reproduce", "bench"} <= set(all_commands()) and not {"reproduce", "bench"} & set(COMMANDS)
    assert {"creff", "fedgrab", "fednoro", "ratio_loss"} <= set(METHODS)
    assert METHODS.build("creff", features=7).name == "creff"
    assert {"chips", "covertype", "elpv", "flights", "kdd99"} <= set(DATASETS)
    assert is_public("kdd99") and SOURCES["kdd99"].remotes
    assert not is_public("chips") and not is_public("mine.py:load")


def test_without_it_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtail.cli.lazy.entry_points", lambda **_: [])
    monkeypatch.setattr("fedtail.registry.entry_points", lambda **_: [])
    monkeypatch.setattr("fedtail.registry.importlib.util.find_spec", lambda name: None)
    all_commands.cache_clear()
    try:
        with pytest.raises(UsageError, match="fedtail-experiments, which is not installed"):
            app(["bench", "--list"], standalone_mode=False)
        assert "bench" not in CliRunner().invoke(app, ["--help"]).output
    finally:
        all_commands.cache_clear()
    with pytest.raises(FedtailError, match="fedtail-experiments, which is not installed, has more"):
        METHODS.build("not_a_method")


def test_demo_compare_and_run_import_nothing_of_it() -> None:
    code = (
        "import sys, fedtail, fedtail.cli.demo, fedtail.cli.compare, fedtail.cli.run\n"
        "from fedtail.study.compare import chosen_methods, comparison_cells, method_configs\n"
        "configs = method_configs(chosen_methods('fedavg,fedcgnm'))\n"
        "loaded = [m for m in sys.modules if m.startswith('fedtail_experiments')]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
