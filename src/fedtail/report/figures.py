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
from fedtail.report.facts import at_sites
from fedtail.report.pictures import curve, groups, label_map, moved, progress, rates_of, recall_by_class
from fedtail.report.probabilities import reliability
from fedtail.report.sections.classes import pr_charts, scored
from fedtail.report.sections.sites import sites_chart
from fedtail.runs.record import RunRecord

Picture = Callable[[Comparison], "Chart | None"]


def _curve(name: str, label: str) -> Picture:
    share = {"floor": 0.0, "ceiling": 1.0} if name.startswith("test.") else {}
    return lambda c: curve(c, name, "", label, **share)


def _classes(comparison: Comparison) -> Chart | None:
    first = scored(comparison)
    return None if first is None else recall_by_class(comparison, first)


def _groups(comparison: Comparison) -> Chart | None:
    first = scored(comparison)
    return None if first is None or first.train_counts is None else groups(comparison, first)


def _rates(comparison: Comparison) -> Chart | None:
    moving = [one for one in comparison.contenders if moved(one)]
    return rates_of(comparison, moving[-1]) if moving else None


FIGURES: dict[str, Picture] = {
    "macro-f1": _curve("test.macro_f1", "macro F1"),
    "tail-accuracy": _curve("test.tail", "accuracy of the rarest third"),
    "accuracy": _curve("test.accuracy", "accuracy"),
    "train-loss": _curve("train_loss", "training loss"),
    "alignment": _curve("alignment", "mean cosine to the aggregate"),
    "per-class": _classes,
    "groups": _groups,
    "rates": _rates,
    "label-map": lambda c: label_map(c.runs[0]),
}
WIDE = ("per-class", "label-map")


def write_figures(compared: Sequence[Comparison], folder: Path, suffix: str) -> list[Path]:
    """Write every figure that the runs have numbers for, as ``<figure>.<suffix>``; a subfolder per comparison."""
    from matplotlib import rc_context

    written = []
    for i, comparison in enumerate(compared):
        place = folder / f"problem-{i + 1}" if len(compared) > 1 else folder
        place.mkdir(parents=True, exist_ok=True)
        for name, picture in FIGURES.items():
            chart = picture(comparison)
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
    """Return one picture of one run as a figure; see ``PLOTS``."""
    if kind not in PLOTS:
        raise one_of("plot", kind, PLOTS)
    METRICS[metric]
    chart = PLOTS[kind](Comparison("", (Contender(run.method_title, (run,)),), 0), metric)
    if not chart:
        raise FedtailError("nothing to draw: the sites do not share what this picture is made of")
    return draw(chart, PAGE if kind in ("classes", "sites") else None)


def _plot_classes(comparison: Comparison, metric: str) -> Chart | None:
    first = scored(comparison)
    return None if first is None else recall_by_class(comparison, first, precision=True)


def _plot_sites(comparison: Comparison, metric: str) -> Chart | None:
    one = comparison.contenders[0]
    split, rows = at_sites(one.runs[0])
    return sites_chart(comparison, [(one, split, rows)], metric) if rows else None


def _plot_curves(comparison: Comparison, metric: str) -> Chart | None:
    charts = pr_charts(comparison, comparison.runs[0])
    return charts[0] if charts else None


PLOTS: dict[str, Callable[[Comparison, str], Chart | None]] = {
    "curves": progress,
    "classes": _plot_classes,
    "sites": _plot_sites,
    "reliability": lambda c, metric: reliability(c, c.contenders[0]),
    "pr": _plot_curves,
}
"""What ``result.plot`` draws: a metric over rounds, recall and precision of classes, a metric of each site, how often
the top class is right, precision against recall."""
