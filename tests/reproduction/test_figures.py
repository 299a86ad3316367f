from pathlib import Path

from fedtail.report.results import RunRecord
from fedtail.reproduction.figures import minority_sizes

C10_20 = [5000, 3584, 2569, 1842, 1320, 946, 678, 486, 348, 250]


def test_the_rules_choice_is_that_of_each_clients_resampled_counts() -> None:
    history = [{"round": 0, "rates": [0.6, 0.0]}]
    run = RunRecord(Path("run"), {}, history, {"label_map": [C10_20, C10_20]}, {})
    assert minority_sizes(run) == [6, 7]
