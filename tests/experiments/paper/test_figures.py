from pathlib import Path

from fedtail.runs.record import RunRecord
from fedtail_experiments.paper.declared import load_grid
from fedtail_experiments.paper.figures import KINDS, minority_sizes
from fedtail_experiments.paper.grid import Place
from fedtail_experiments.paper.tables import Entry, GridResult

C10_20 = [5000, 3584, 2569, 1842, 1320, 946, 678, 486, 348, 250]


def test_the_rules_choice_is_that_of_each_clients_resampled_counts() -> None:
    history = [{"round": 0, "rates": [0.6, 0.0]}]
    run = RunRecord(Path("run"), {}, history, {"label_map": [C10_20, C10_20]}, {})
    assert minority_sizes(run) == [6, 7]


def test_panels_of_curves_share_a_scale_with_room_for_all_of_them() -> None:
    def run(*scores: float) -> RunRecord:
        return RunRecord(
            Path("run"), {}, [{"round": t, "test": {"defect_score": v}} for t, v in enumerate(scores)], {}, {}
        )

    grid = load_grid("chips")
    runs = {Place("all", "uniform", "FedAvg", 0): run(0.5, 0.6), Place("all", "FedHOO", "FedAvg", 0): run(0.2, 0.95)}
    entries = tuple(
        Entry(block=p.block, row=p.row, column=p.column, values=(0.5,), paper=None, seconds=1.0) for p in runs
    )
    figure = KINDS["curves"](GridResult(grid, entries, runs))
    low, high = figure.axes[0].get_ylim()
    assert low < 0.2 and high > 0.95 and figure.axes[1].get_ylim() == (low, high)
