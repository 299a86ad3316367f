import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from fedtail.errors import FedtailError
from fedtail.runs.config import check_config, load_config
from fedtail.runs.execution import run
from fedtail.settings import Settings
from fedtail.study.cells import Cell, run_cells, seeds_of
from fedtail_experiments.paper.convergence import run_point
from fedtail_experiments.paper.declared import GridFile, grid_names, load_grid
from fedtail_experiments.paper.figures import KINDS
from fedtail_experiments.paper.grid import SCALES
from fedtail_experiments.paper.recipes import load_toml

SMALL = ["data.name=blobs", "data.n_max=60", "data.clients=3", "run.rounds=2"]


@pytest.mark.parametrize("name", grid_names())
@pytest.mark.parametrize("scale", SCALES)
def test_every_grid_gives_valid_distinct_cells_at_every_scale(name: str, scale: str) -> None:
    cells = load_grid(name).cells(scale, range(2))
    assert scale == "full" or {cell.config.engine.device for _, cell in cells} == {"cpu"}
    assert len({cell.digest for _, cell in cells}) >= len(cells) / 2
    assert len({place for place, _ in cells}) == len(cells)


def test_a_grid_without_columns_at_a_scale_says_where_it_has_some() -> None:
    grid = replace(load_grid("chips"), scales={"cpu": {"columns": []}})
    with pytest.raises(FedtailError, match="--scale full --device cuda"):
        grid.cells("cpu")


@pytest.mark.parametrize("name", grid_names())
def test_the_papers_numbers_fit_the_grid(name: str) -> None:
    grid = load_grid(name)
    for block, rows in grid.paper.items():
        assert block in {b.name for b in grid.blocks}
        for row, values in rows.items():
            assert row in {r.name for r in grid.rows}, row
            assert len(values) == len(grid.columns)


def test_main_tables_hold_the_published_numbers() -> None:
    iid, other = load_grid("table-iid"), load_grid("table-noniid")
    assert iid.reported("K=5", "FedCGNM + U", "C10-20") == 0.8568
    assert iid.reported("K=20", "FedCGNM + U", "UNSW") == 0.7775
    assert other.reported("K=5", "FedCGNM + FedHOO", "Adult-20") == 0.9473
    assert iid.reported("K=20", "FedCGNM + FedHOO", "C10-20") is None


def test_images_train_longer_where_more_clients_are_sampled_less() -> None:
    cells = dict(load_grid("table-iid").cells("full", [0], ["C10-20", "FedAvg"]))
    local = {place.block: cell.config for place, cell in cells.items()}
    assert (local["K=5"].local.epochs, local["K=5"].run.participation) == (3, 1.0)
    assert (local["K=20"].local.epochs, local["K=20"].run.participation) == (5, 0.5)


def test_tuned_settings_do_not_undo_what_a_row_sets() -> None:
    cells = load_grid("table-beta").cells("cpu", [0], ["NB15", "K=5"], tuned=True)
    assert [cell.config.method.options["beta"] for _, cell in cells] == [0.0, 0.1, 0.3, 0.5, 0.7, 0.9]
    assert {cell.config.local.lr for _, cell in cells} == {load_toml("tuned.toml")["unsw_mlp"]["fedcgnm"]["local.lr"]}


def test_later_layers_of_a_cell_override_earlier_ones() -> None:
    grid = load_grid("table-iid")
    block, column, row = grid.blocks[0], grid.columns[0], grid.rows[0]
    layers = grid.layers(block, column, row, "full", {})
    order = ["recipe", "base", "column", "block", "recipe for this many clients", "row", "scale", "tuned"]
    assert list(layers) == order
    assert layers["column"]["data.imbalance"] == 20.0
    smoke = grid.layers(block, column, row, "smoke", {})
    assert smoke["recipe"]["data.name"] == "digits" and "data.imbalance" not in smoke["column"]
    assert smoke["block"] == {"data.clients": 5}


def test_only_keeps_what_is_named_and_says_what_there_is() -> None:
    grid = load_grid("table-iid")
    kept = grid.cells("cpu", [0], ["adult-10", "K=5"])
    assert {p.column for p, _ in kept} == {"Adult-10"} and {p.block for p, _ in kept} == {"K=5"}
    with pytest.raises(FedtailError, match="Adult-10"):
        grid.cells("cpu", [0], ["nonsense"])


def test_unknown_experiments_and_scales_are_named() -> None:
    with pytest.raises(FedtailError, match="did you mean 'table-iid'"):
        load_grid("table-idd")
    with pytest.raises(FedtailError, match="smoke"):
        load_grid("table-iid").cells("tiny", [0])


def cells_of(*more: str, seeds: int = 2) -> list[Cell]:
    return seeds_of(load_config(None, [*SMALL, *more]), "cell", range(seeds))


def test_finished_cells_are_kept_and_interrupted_ones_continue(tmp_path: Path) -> None:
    first = run_cells(cells_of(), tmp_path)
    assert not any(o.cached or o.error for o in first)
    stamp = (first[0].folder / "result.json").stat().st_mtime_ns
    (first[1].folder / "result.json").unlink()  # as if it had been stopped before the end
    again = run_cells(cells_of(), tmp_path)
    assert [o.cached for o in again] == [True, False]
    assert (first[0].folder / "result.json").stat().st_mtime_ns == stamp


def test_two_tables_that_share_a_cell_share_its_run(tmp_path: Path) -> None:
    config = load_config(None, SMALL)
    (first,) = run_cells([Cell("one-table", config)], tmp_path)
    (second,) = run_cells([Cell("another", config)], tmp_path)
    assert second.cached and second.folder == first.folder
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cell_is_known_by_its_settings_and_not_by_where_it_ran(tmp_path: Path) -> None:
    cell = cells_of(seeds=1)[0]
    raw = cell.config.model_dump()
    raw["run"]["folder"], raw["engine"]["workers"] = str(tmp_path), 2
    assert Cell("other", check_config(raw)).digest == cell.digest
    assert cells_of("local.lr=0.2", seeds=1)[0].digest != cell.digest


def test_a_failing_cell_does_not_stop_the_others(tmp_path: Path) -> None:
    bad = cells_of("data.clients=100000", seeds=1)
    outcomes = run_cells([*bad, *cells_of(seeds=1)], tmp_path)
    assert outcomes[0].error is not None and "exceeds the" in outcomes[0].error
    assert outcomes[1].error is None


@pytest.mark.slow
def test_an_error_nobody_foresaw_is_its_own_cells_too(tmp_path: Path, monkeypatch) -> None:
    def fail_once(config: Settings, **options: object) -> object:
        if config.run.seed == 1:
            raise RuntimeError("out of memory\nand a page about it")
        return run(config, **options)

    monkeypatch.setattr("fedtail.study.cells.run", fail_once)
    outcomes = run_cells(cells_of(seeds=3), tmp_path)
    assert [o.error for o in outcomes] == [None, "RuntimeError: out of memory", None]


def test_data_that_cannot_be_had_is_asked_for_once_and_stops_only_its_own_cells(tmp_path: Path, monkeypatch) -> None:
    asked = []

    def locate(name: str, folder: str | None) -> Path:
        asked.append(name)
        raise FedtailError(f"no {name} here")

    monkeypatch.setattr("fedtail.study.cells.locate", locate)
    adult = seeds_of(load_config(None, ["data.name=adult"]), "adult", range(3))
    outcomes = run_cells([*adult, *cells_of(seeds=1)], tmp_path)
    assert [o.error for o in outcomes] == ["no adult here"] * 3 + [None]
    assert asked == ["adult"]


def test_cells_in_parallel_processes_give_the_same_results(tmp_path: Path) -> None:
    one = run_cells(cells_of(), tmp_path / "a", workers=1)
    two = run_cells(cells_of(), tmp_path / "b", workers=2)
    for a, b in zip(one, two, strict=True):
        assert (a.folder / "history.jsonl").read_bytes() == (b.folder / "history.jsonl").read_bytes()
        read = [json.loads((o.folder / "result.json").read_text())["test"] for o in (a, b)]
        assert read[0] == read[1]


def test_settled_rates_let_the_gradient_vanish_and_oscillating_ones_leave_a_floor() -> None:
    settled, moving = (run_point(name, 256, 0, delta=10.0, scale=5.0) for name in ("constant", "oscillating"))
    assert settled.late < 0.01 * moving.late
    assert settled.variation == 0 and moving.variation == pytest.approx(0.4 * 255)


def test_normalization_with_a_small_stabiliser_rests_where_unit_vectors_cancel() -> None:
    short, long = (run_point("constant", t, 0) for t in (256, 2048))
    assert long.late > 0.1 and abs(long.late - short.late) < abs(short.late)


def test_with_the_theorems_beta_the_mean_squared_gradient_does_not_fall_as_the_theorem_has_it() -> None:
    """A T of sixteen times as much should divide it by four, as with beta = .5, where the early rounds make it."""
    fixed, theorems = (
        [run_point("constant", t, 0, beta=beta, delta=10.0, scale=5.0).mean for t in (64, 1024)] for beta in (0.5, None)
    )
    assert fixed[0] / fixed[1] > 3.5 and theorems[0] / theorems[1] < 2.5


def test_with_the_theorems_beta_there_is_no_floor_where_unit_vectors_cancel() -> None:
    assert run_point("constant", 1024, 0, beta=None).late < 0.1 < run_point("constant", 1024, 0).late


def test_every_kind_of_figure_can_be_declared() -> None:
    assert {"table", *KINDS} == set(get_args(GridFile.model_fields["kind"].annotation))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows = 1", "did you mean 'row'"),
        ("[[row]]\nname = 'a'\nsett = {}", "key of row.0 'sett' is unknown; did you mean 'set'"),
        ("title = 'x'", "row: field required"),
        ("[[row]]\nset = {}", "row.0.name: field required"),
        ("metric = 'f1'\n[[row]]\nname = 'a'", "metric 'f1' is unknown"),
        ("kind = 'pie'\n[[row]]\nname = 'a'", "kind: input should be 'table'"),
        ("[[row]]\nname = 'a'\n[paper.all]\na = [1.0, 2.0]", "2 numbers for 1 columns"),
        ("[[row]]\nname = 'a'\n[paper.all]\nb = [1.0]", "'b' is unknown"),
        ("[[row]]\nname = 'a'\n[[row]]\nname = 'a'", "two entries of row are named 'a'"),
        ("[[row]", "not valid TOML"),
    ],
)
def test_a_bad_grid_file_is_one_line_that_names_the_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FedtailError, match=re.escape(message)) as error:
        load_grid(str(path))
    assert "\n" not in str(error.value) and "mine.toml" in str(error.value)


def test_a_missing_grid_file_is_named() -> None:
    with pytest.raises(FedtailError, match=r"nowhere\.toml"):
        load_grid("nowhere.toml")


def test_tables_and_dotted_keys_are_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[base.local]\nlr = 0.2\n[base]\n'run.rounds' = 3\n[[row]]\nname = 'a'\n", encoding="utf-8")
    ((place, cell),) = load_grid(str(path)).cells("cpu", [0])
    assert (cell.config.local.lr, cell.config.run.rounds) == (0.2, 3)
    assert str(place) == "all, all, a, seed 0"
