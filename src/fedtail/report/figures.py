"""The pictures of a report as matplotlib figures: vector files for papers, and what ``Result.plot`` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtail.core.metrics import METRICS
from fedtail.errors import FedtailError, one_of
from fedtail.plots import PAGE, STYLE, Chart, draw
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.pictures import curve, groups, label_map, moved, progress, rates_of, recall_by_class
from fedtail.report.probabilities import pr_charts, reliability
from fedtail.report.sections.sites import at_all_sites, sites_chart
from fedtail.runs.record import RunRecord

Picture = Callable[[Comparison, str], "Chart | None"]


def _curve(name: str, label: str) -> Picture:
    share = {"floor": 0.0, "ceiling": 1.0} if name.startswith("test.") else {}
    return lambda comparison, metric: curve(comparison, name, "", label, **share)


FIGURES: dict[str, Picture] = {
    "curves": progress,
    "macro-f1": _curve("test.macro_f1", "macro F1"),
    "tail-accuracy": _curve("test.tail", "accuracy of the rarest third"),
    "accuracy": _curve("test.accuracy", "accuracy"),
    "train-loss": _curve("train_loss", "training loss"),
    "alignment": _curve("alignment", "mean cosine to the aggregate"),
    "classes": lambda comparison, metric: recall_by_class(comparison),
    "groups": lambda comparison, metric: groups(comparison),
    "sites": lambda comparison, metric: sites_chart(comparison, at_all_sites(comparison)[:1], metric),
    "reliability": lambda comparison, metric: reliability(comparison, comparison.contenders[0]),
    "pr": lambda comparison, metric: next(iter(pr_charts(comparison, comparison.runs[0])), None),
    "rates": lambda comparison, metric: next(
        (rates_of(comparison, o) for o in comparison.contenders if moved(o)), None
    ),
    "label-map": lambda comparison, metric: label_map(comparison.runs[0]),
}
"""What ``fedtail report --format pdf`` draws, by the name of the file, and what ``result.plot`` does."""
WIDE = ("classes", "sites", "label-map")


def write_figures(compared: Sequence[Comparison], folder: Path, suffix: str) -> list[Path]:
    """Write every figure that the runs have numbers for, as ``<figure>.<suffix>``; a subfolder per comparison."""
    from matplotlib import rc_context

    written = []
    for i, comparison in enumerate(compared):
        place = folder / f"problem-{i + 1}" if len(compared) > 1 else folder
        place.mkdir(parents=True, exist_ok=True)
        for name, picture in FIGURES.items():
            chart = picture(comparison, "macro_f1")
            if not chart:
                continue
            path = place / f"{name}.{suffix}"
            # without dates the same runs give the same bytes
            metadata = {"CreationDate": None} if suffix == "pdf" else {"Date": None}
            figure = draw(replace(chart, title="", caption=""), PAGE if name in WIDE else None)
            with rc_context(STYLE):
                figure.savefig(path, metadata=metadata, bbox_inches="tight", pad_inches=0.02)
            written.append(path)
    return written


def plot(run: RunRecord, kind: str, metric: str) -> Any:
    """Return one picture of one run as a figure; see ``FIGURES``."""
    if kind not in FIGURES:
        raise one_of("plot", kind, FIGURES)
    METRICS[metric]
    only = Contender(run.method_title, (run,))
    chart = FIGURES[kind](Comparison("", (only,), only), metric)
    if not chart:
        raise FedtailError("nothing to draw: the sites do not share what this picture is made of")
    return draw(chart, PAGE if kind in WIDE else None)
