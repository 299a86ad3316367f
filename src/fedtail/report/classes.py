"""The parts of the page about classes: what is found of each, how precisely, and what is mistaken for what."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedtail.core.evidence import wilson
from fedtail.report.bars import Series, bar_chart
from fedtail.report.chart import Cell, charts, fold, html_table, number, scroll
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.heatmap import heatmap
from fedtail.report.lines import Dot, Line, line_chart
from fedtail.report.rows import row_chart
from fedtail.report.series import mean_spread, palette, thirds
from fedtail.runs.record import RunRecord

MOST_PANELS = 8
MOST_TABLE = 24
"""Rows beyond which the table of classes is folded away."""
MOST_CURVES = 6
"""Precision-recall curves shown at once, of the rarest classes; the others are folded away."""
COLUMNS = (
    ("precision", "Precision"),
    ("accuracy", "Recall"),
    ("f1", "F1"),
    ("pr_auc", "PR-AUC"),
    ("roc_auc", "ROC-AUC"),
)
SHARES = {v: f"{v:g}" for v in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)}
GRID = np.linspace(0.0, 1.0, 51)
"""Recalls at which the curves of several seeds are averaged."""


def classes(comparison: Comparison) -> str:
    """Recall of each class, head / middle / tail, precision-recall curves and all numbers."""
    first = scored(comparison)
    if first is None:
        return ""
    colours, order = palette(comparison), class_order(first)
    counts, names = first.train_counts, [first.classes[c] for c in order]
    series: list[Series] = []
    groups: list[Series] = []
    for contender in comparison.contenders:
        stack = _stack(contender, "accuracy", len(order))
        if stack.size:
            found = stack[:, order]
            series.append((contender.label, colours[contender.label], *mean_spread(found)))
            groups.append((contender.label, colours[contender.label], *mean_spread(thirds(found))))
    seeds = max(len(one.runs) for one in comparison.contenders) > 1
    said = ["Dots: mean over seeds, ± one standard deviation." if seeds else ""]
    said += ["Pale bars: training samples, on a square-root scale." if counts is not None else ""]
    panels = [
        row_chart(
            "Recall of each class",
            names,
            series,
            x_label="recall",
            heading="class",
            sides=[f"{int(n):,}" for n in counts[order]] if counts is not None else (),
            side_label="training" if counts is not None else "",
            behind=np.sqrt(counts[order] / max(counts.max(), 1)).tolist() if counts is not None else (),
            caption=" ".join(filter(None, said)),
            runs=True,
        ),
        _thirds_chart(groups, len(order)) if counts is not None else "",
        _shots(comparison, colours),
    ]
    drawn = _pr_charts(comparison, first, order)
    if len(comparison.contenders) == 1:  # its classes share a chart
        panels[1:1] = drawn[:1]
        return charts(panels, "packed") + _table(comparison, first, order) + _more(drawn[1:])
    text = (
        "<h3>Precision and recall</h3><p>Precision against recall for each class, rarest first. Each point on a "
        "curve is a "
        "threshold; the dot marks the current decision rule.</p>"
    )
    shown = text + charts(drawn[:MOST_CURVES], "small") + _more(drawn[MOST_CURVES:]) if drawn else ""
    return charts(panels, "packed") + _table(comparison, first, order) + shown


def _more(drawn: Sequence[str]) -> str:
    many = "s" if len(drawn) != 1 else ""
    return fold(f"Precision and recall of more classes, in {len(drawn)} chart{many}", charts(drawn, "small"))


def scored(comparison: Comparison) -> RunRecord | None:
    """The first run with numbers per class."""
    return next((r for r in comparison.runs if np.isfinite(r.per_class()).any()), None)


def class_order(run: RunRecord) -> np.ndarray:
    """Classes with the most training samples first; as they are where that is not known."""
    counts = run.train_counts
    return np.arange(run.per_class().size) if counts is None else np.argsort(-counts, kind="stable")


def _stack(contender: Contender, name: str, n_classes: int) -> np.ndarray:
    """(seeds, C) of one number per class."""
    return np.array([v for r in contender.runs if (v := r.per_class(name)).size == n_classes])


def _thirds_chart(groups: Sequence[Series], n_classes: int) -> str:
    if n_classes < 3:
        return ""
    size = max(1, n_classes // 3)
    between = n_classes - 2 * size
    names = [f"head ({size})", f"middle ({between})", f"tail ({size})"] if between else ["head", "tail"]
    caption = "Mean recall by thirds of the classes, ordered by training frequency (number of classes in parentheses)."
    return bar_chart("Head, middle and tail", names, groups, y_label="recall", caption=caption)


def _shots(comparison: Comparison, colours: dict[str, int]) -> str:
    names = [n for n in ("many", "medium", "few") if any(math.isfinite(one.mean(n)) for one in comparison.contenders)]
    if len(names) < 2:
        return ""
    series: list[Series] = [
        (one.label, colours[one.label], np.array(list(map(one.mean, names))), np.array(list(map(one.spread, names))))
        for one in comparison.contenders
    ]
    caption = "Classes with at least 100, 21 to 99 and at most 20 training samples."
    return bar_chart("Many-, medium- and few-shot classes", names, series, y_label="recall", caption=caption)


def _table(comparison: Comparison, first: RunRecord, order: np.ndarray) -> str:
    """A row per class and contender, every number that runs have; recall of one seed with its interval."""
    known = [(key, title) for key, title in COLUMNS if np.isfinite(first.per_class(key)).any()]
    colours, counts = palette(comparison), first.train_counts
    several = len(comparison.contenders) > 1
    support = first.per_class("support")
    stacks = {(one.label, key): _stack(one, key, len(order)) for one in comparison.contenders for key, _ in known}
    rows: list[list[str | Cell]] = []
    runs = []
    for c in order:
        for contender in comparison.contenders:
            row: list[str | Cell] = [first.classes[c], *([contender.label] if several else [])]
            row += [f"{int(counts[c]):,}"] if counts is not None else []
            row += [f"{int(support[c]):,}"] if support.size else []
            for key, _ in known:
                stack = stacks[contender.label, key]
                mean, spread = (float(v[0]) for v in mean_spread(stack[:, [c]])) if stack.size else (math.nan,) * 2
                small = f"± {spread:.3f}" if math.isfinite(spread) else ""
                if key == "accuracy" and support.size and len(contender.runs) == 1 and math.isfinite(mean):
                    low, high = wilson(mean, int(support[c]))
                    small = f"{low:.2f} to {high:.2f}"
                row.append(Cell(number_of(mean), small=small))
            rows.append(row)
            runs.append(colours[contender.label] if several else None)
    head = ["Class", *(["Method"] if several else []), *(["Training"] if counts is not None else [])]
    head += [*(["Test"] if support.size else []), *(title for _, title in known)]
    table = scroll(html_table(head, rows, runs=runs, look="left2" if several else ""), "Classes")
    note = "<p class='note'>Below each recall: its 95 % interval, which is wide for classes with few test samples.</p>"
    table += note if support.size and not all(len(one.runs) > 1 for one in comparison.contenders) else ""
    return fold(f"All {len(order)} classes in numbers", table) if len(rows) > MOST_TABLE else table


def number_of(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"


def _pr_charts(comparison: Comparison, first: RunRecord, order: np.ndarray) -> list[str]:
    """Precision-recall curves, rarest class first: of one contender some classes a chart, of several one each."""
    found = [c for c in reversed(order.tolist()) if any(_pr(r, first.classes[c]) for r in comparison.runs)]
    if len(comparison.contenders) > 1:
        return [_one_class(comparison, first, c) for c in found]
    groups = [found[i : i + MOST_PANELS] for i in range(0, len(found), MOST_PANELS)]
    return [_one_contender(comparison.contenders[0], first, group) for group in groups]


def _one_contender(contender: Contender, first: RunRecord, group: Sequence[int]) -> str:
    lines, dots = [], []
    for i, c in enumerate(group):
        recall, precision = _mean_curve(contender, first.classes[c])
        lines.append(Line(first.classes[c], i, recall, precision))
        dots += _answers(contender, c, i)
    caption = f"{_split_note(first)} Each point is a threshold; the dot marks the current decision rule."
    return _precision_recall("Precision and recall of each class", lines, dots, caption)


def _one_class(comparison: Comparison, first: RunRecord, c: int) -> str:
    colours, lines, dots = palette(comparison), [], []
    for contender in comparison.contenders:
        recall, precision = _mean_curve(contender, first.classes[c])
        if recall.size:
            lines.append(Line(contender.label, colours[contender.label], recall, precision))
            dots += _answers(contender, c, colours[contender.label])
    support = first.per_class("support")
    caption = (
        f"{int(support[c]):,} of {int(support.sum()):,} test samples belong to this class." if support.size else ""
    )
    return _precision_recall(first.classes[c], lines, dots, caption, runs=True)


def _precision_recall(
    title: str, lines: Sequence[Line], dots: Sequence[Dot], caption: str, *, runs: bool = False
) -> str:
    return line_chart(
        title,
        lines,
        x_label="recall",
        y_label="precision",
        floor=0.0,
        ceiling=1.0,
        full=True,
        x_ticks=SHARES,
        between=True,
        dots=dots,
        caption=caption,
        runs=runs,
    )


def _answers(contender: Contender, c: int, colour: int) -> list[Dot]:
    """Where the decision stands on the curve of a class, over seeds."""
    values = [(r.per_class("accuracy"), r.per_class("precision")) for r in contender.runs]
    found = [(a[c], p[c]) for a, p in values if a.size > c and p.size > c and math.isfinite(a[c])]
    if not found:
        return []
    recall, precision = np.mean(found, axis=0).tolist()
    name = f"decision: recall {number(recall)}, precision {number(precision)}"
    return [Dot(recall, precision, colour, name)] if recall > 0 else []


def _pr(run: RunRecord, name: str) -> dict[str, list[float]]:
    found = run.result.get("curves") or {}
    split = found.get("test") or found.get("validation") or {}
    return dict((split.get("pr") or {}).get(name) or {})


def _split_note(run: RunRecord) -> str:
    return "On the test set." if (run.result.get("curves") or {}).get("test") else "On the private validation splits."


def _mean_curve(contender: Contender, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(recall, precision): the recorded points of one run; of several, their mean at common recalls."""
    curves = [found for r in contender.runs if (found := _pr(r, name))]
    points = [np.array([c["recall"], c["precision"]], dtype=np.float64) for c in curves]
    if len(points) <= 1:
        return (points[0][0], points[0][1]) if points else (np.empty(0), np.empty(0))
    return GRID, np.mean([np.interp(GRID, p[0], p[1]) for p in points], axis=0)


def confusion(comparison: Comparison) -> str:
    """Where each contender sends the samples of each class."""
    colours, panels, n_classes, longest = palette(comparison), [], 0, 0
    for contender in comparison.contenders[:MOST_PANELS]:
        found = [r.confusion for r in contender.runs if r.confusion is not None and r.confusion.any()]
        if not found:
            continue
        run = contender.runs[0]
        total = np.sum(found, axis=0)
        counts = run.train_counts
        order = np.argsort(-counts, kind="stable") if counts is not None else np.arange(len(total))
        share = total[np.ix_(order, order)] / np.maximum(total[order].sum(1, keepdims=True), 1)
        names = [run.classes[c] for c in order]
        n_classes, longest = len(names), max(map(len, names))
        panels.append(
            heatmap(
                contender.label,
                share.round(3),
                names,
                names,
                row_label="true class",
                column_label="predicted class",
                shade=share,
                wide=n_classes > 12,
                run=colours[contender.label],
            )
        )
    if not panels:
        return ""
    seeds = ", over all seeds" if len(comparison.runs) > len(comparison.contenders) else ""
    text = (
        f"<p>How the samples of each true class are classified, as fractions{seeds}; classes ordered by training "
        "frequency.</p>"
    )
    drawn = charts(panels, "small" if len(panels) > 2 and n_classes * longest < 60 else "")
    return text + (fold(f"Confusion matrices of {n_classes} classes", drawn) if n_classes > 30 else drawn)
