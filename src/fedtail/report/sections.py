"""The parts of the page; each takes a comparison and returns HTML, or nothing where there is nothing to show."""

from __future__ import annotations

import math

import numpy as np

from fedtail.core.metrics import METRICS
from fedtail.report.bars import Series, bar_chart, class_chart, dot_plot
from fedtail.report.chart import charts, esc, html_table, scroll
from fedtail.report.comparison import Comparison, Contender, short
from fedtail.report.federation import revealed
from fedtail.report.heatmap import heatmap
from fedtail.report.lines import line_chart
from fedtail.report.series import contender_line, mean_spread, palette, thirds
from fedtail.report.tables import footnote, headline, summary, to_html
from fedtail.runs.record import RunRecord
from fedtail.settings import flatten

CURVES = (
    ("test.macro_f1", "Macro F1 on the test set", "macro F1", 0.0, 1.0),
    ("test.defect_score", "Defect score on the test set", "defect score", 0.0, 1.0),
    ("test.tail", "Accuracy of the rarest third", "tail accuracy", 0.0, 1.0),
    ("train_loss", "Training loss", "loss", None, None),
    ("test.accuracy", "Accuracy on the test set", "accuracy", 0.0, 1.0),
    ("validation.macro_f1", "Macro F1 on the private validation splits", "macro F1", 0.0, 1.0),
    ("test.head", "Accuracy of the commonest third", "head accuracy", 0.0, 1.0),
)
MOST_PANELS = 8


def results(comparison: Comparison, metric: str = "macro_f1") -> str:
    """Summary, headline table and every single seed."""
    if not any(math.isfinite(one.mean(metric)) for one in comparison.contenders):
        metric = "accuracy"  # all that sites with reveal = "totals" tell
    table, colours = headline(comparison, metric), palette(comparison)
    dots = charts(
        dot_plot(
            title,
            [(one.label, colours[one.label], _by_seed(one, name)) for one in comparison.contenders],
            x_label=label,
            caption="A dot per seed; the bar and the number are the mean.",
        )
        for name, title, label in (
            (metric, f"Every seed: {METRICS[metric].words}", METRICS[metric].words),
            ("tail", "Every seed: accuracy of the rarest third", "tail accuracy"),
        )
    )
    if len(comparison.runs) == 1:
        dots = ""
    lead = f"<p class='lead'>{esc(summary(comparison, metric))}</p>{verdicts(comparison)}"
    return f"{lead}{to_html(table)}<p class='note'>{esc(footnote(table))}</p>{revealed(comparison)}{dots}"


def verdicts(comparison: Comparison) -> str:
    """What is wrong with runs that came to nothing, a line each."""
    lines = []
    for contender in comparison.contenders:
        for run in contender.runs:
            if found := run.result.get("verdict"):
                who = f"{contender.label}, seed {run.seed}: " if len(comparison.runs) > 1 else ""
                lines.append(f"{esc(who)}{esc(found['said'])}; try <code>{esc(found['try'])}</code>")
    return "".join(f"<p class='note warning'>{line}.</p>" for line in lines[:MOST_PANELS])


def races(comparison: Comparison) -> str:
    """What ``local.lr = "auto"`` tried, and what won."""
    rows = []
    for contender in comparison.contenders:
        for run in contender.runs:
            for record in run.history:
                for tried in record.get("race", []):
                    ((name, value),) = [(k, v) for k, v in tried.items() if k not in ("reward", "diverged")]
                    reward = "diverged" if tried.get("diverged") else f"{tried['reward']:.3f}"
                    kept = run.result.get("found", {}).get(name) == value
                    row = [contender.label, str(run.seed), str(record["round"] + 1), name, f"{value:g}", reward]
                    rows.append([*row, "yes" if kept else ""])
    if not rows:
        return ""
    metric = METRICS[str(comparison.runs[0].setting("run", "metric", "accuracy"))].words
    text = (
        f"<p>Every site trained at each of these values from the same model; the sites' private validation splits "
        f"compared the outcomes by {esc(metric)}, and the better half went on.</p>"
    )
    head = ["Method", "Seed", "Round", "Setting", "Value", "Validation", "Kept"]
    return text + scroll(html_table(head, rows), "Race")


def curves(comparison: Comparison) -> str:
    """Learning curves, mean and band over seeds."""
    colours = palette(comparison)
    seeds = max(len(one.runs) for one in comparison.contenders)
    caption = "Mean over seeds; the band is ± one standard deviation." if seeds > 1 else ""
    panels = []
    for name, title, label, floor, ceiling in CURVES:
        lines = [contender_line(one, name, colours[one.label]) for one in comparison.contenders]
        panels.append(line_chart(title, lines, y_label=label, floor=floor, ceiling=ceiling, caption=caption))
    return charts(panels)


def classes(comparison: Comparison) -> str:
    """Per-class accuracy by training frequency, and head / middle / tail."""
    colours = palette(comparison)
    first = next((r for r in comparison.runs if np.isfinite(r.per_class()).any()), None)
    if first is None:
        return ""
    counts = first.train_counts
    n_classes = first.per_class().size
    order = np.argsort(-counts, kind="stable") if counts is not None else np.arange(n_classes)
    names = [first.classes[c] for c in order]
    series: list[Series] = []
    groups: list[Series] = []
    for contender in comparison.contenders:
        stack = np.array([r.per_class() for r in contender.runs if r.per_class().size == n_classes])
        if not stack.size:
            continue
        mean, spread = mean_spread(stack[:, order])
        series.append((contender.label, colours[contender.label], mean, spread))
        groups.append((contender.label, colours[contender.label], *mean_spread(thirds(stack[:, order]))))
    sorted_counts = counts[order].tolist() if counts is not None else []
    bars = ""
    if n_classes >= 3 and counts is not None:
        size = max(1, n_classes // 3)
        bars = bar_chart(
            "Head, middle and tail",
            [f"head ({size})", f"middle ({n_classes - 2 * size})", f"tail ({size})"]
            if n_classes > 2 * size
            else ["head", "tail"],
            groups,
            y_label="accuracy",
            caption="Mean accuracy of the classes in each third by training frequency (number of classes).",
        )
    shots = _shots(comparison, colours)
    per_class = class_chart(
        "Accuracy of each class",
        names,
        sorted_counts,
        series,
        caption="Dots: mean over seeds, ± one standard deviation. Pale bars: training samples of the class."
        if sorted_counts
        else "",
    )
    return f"{per_class}<div class='charts'>{bars}{shots}</div>"


def confusion(comparison: Comparison) -> str:
    """Where each contender sends the samples of each class."""
    panels = []
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
        panels.append(
            heatmap(
                contender.label,
                share.round(3),
                names,
                names,
                row_label="true class",
                column_label="predicted class",
                shade=share,
            )
        )
    if not panels:
        return ""
    text = "<p>Where the samples of each true class go, as shares, over all seeds; classes by training frequency.</p>"
    return text + charts(panels, "small" if len(panels) > 2 else "")


def alignment(comparison: Comparison) -> str:
    """Do the clients pull in one direction?"""
    colours = palette(comparison)
    chart = line_chart(
        "Alignment of the clients' updates",
        [contender_line(one, "alignment", colours[one.label]) for one in comparison.contenders],
        y_label="mean cosine",
        ceiling=1.0,
    )
    if not chart:
        return ""
    text = "<p>Mean cosine between a client's update and the aggregate: 1 if all agree, 1/√K if they are unrelated.</p>"
    return text + charts([chart])


def timings(comparison: Comparison) -> str:
    """Time per round and in all, and on what."""
    rows = []
    for contender in comparison.contenders:
        each = [s for r in contender.runs for s in r.timings]
        hardware = sorted({_hardware(r) for r in contender.runs})
        total = float(np.mean([r.seconds for r in contender.runs]))
        per_round = f"{np.median(each):.3g} s" if each else "–"
        rounds = max(len(r.history) for r in contender.runs)
        rows.append([contender.label, str(rounds), per_round, _time(total), ", ".join(hardware)])
    return scroll(html_table(["Method", "Rounds", "Median round", "Whole run (mean)", "Hardware"], rows), "Timings")


def configuration(comparison: Comparison) -> str:
    """Settings shared by all runs, and where contenders differ."""
    flats = [flatten(one.runs[0].config) for one in comparison.contenders]
    unused = "engine." if all(r.is_real for r in comparison.runs) else "deploy."
    left_out = ("run.seed", "run.name", "run.folder")
    keys = list(dict.fromkeys(k for f in flats for k in f if k not in left_out and not k.startswith(unused)))
    same = [k for k in keys if all(f.get(k) == flats[0].get(k) for f in flats)]
    differ = [k for k in keys if k not in same]
    out = ""
    if differ:
        rows = [[k, *(short(f[k]) if k in f else "–" for f in flats)] for k in differ]
        out += scroll(
            html_table(["Differs", *(one.label for one in comparison.contenders)], rows), "Settings that differ"
        )
    rows = [[k, short(flats[0].get(k))] for k in same]
    seeds = ", ".join(str(s) for s in sorted({r.seed for r in comparison.runs}))
    rows.append(["run.seed", seeds])
    table = scroll(html_table(["Setting", "Value"], rows), "Settings shared by all")
    return out + f"<details><summary>Settings shared by all ({len(rows)})</summary>{table}</details>"


def _by_seed(contender: Contender, metric: str) -> dict[str, float]:
    return {f"seed {r.seed}": r.metric(metric) for r in contender.runs if math.isfinite(r.metric(metric))}


def _shots(comparison: Comparison, colours: dict[str, int]) -> str:
    names = [n for n in ("many", "medium", "few") if any(math.isfinite(one.mean(n)) for one in comparison.contenders)]
    if len(names) < 2:
        return ""
    series: list[Series] = [
        (
            one.label,
            colours[one.label],
            np.array([one.mean(n) for n in names]),
            np.array([one.spread(n) for n in names]),
        )
        for one in comparison.contenders
    ]
    caption = "Classes with at least 100, 21 to 99 and at most 20 training samples."
    return bar_chart("Many, medium and few shots", names, series, y_label="accuracy", caption=caption)


def _hardware(run: RunRecord) -> str:
    found = run.result.get("hardware", {})
    if not isinstance(found, dict) or not found:
        return str(found or "not recorded")
    engine = run.result.get("engine", {})
    parts = [str(found.get("gpu") or found.get("machine") or "CPU")]
    parts += [f"{found['cpus']} CPU cores"] if found.get("cpus") else []
    parts += [f"torch {found['torch']}"] if found.get("torch") else []
    if run.is_real:
        sites = f"{engine['engine']}, {len(run.clients.get('sites', []))} sites"
        return f"{sites}; the server: {', '.join(parts)}"
    parts += [f"{engine['path']} path"] if isinstance(engine, dict) and engine.get("path") else []
    return ", ".join(parts)


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
