"""The parts of the page; each takes a problem and returns HTML, or nothing where there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from fedtail.core.metrics import path_variation
from fedtail.report.arms import Arm, Problem, settings, short
from fedtail.report.bars import Series, bar_chart, class_chart, dot_plot
from fedtail.report.chart import esc, html_table, number
from fedtail.report.heatmap import heatmap
from fedtail.report.lines import Line, line_chart
from fedtail.report.results import RunRecord
from fedtail.report.tables import METRIC_NAMES, footnote, headline, summary, to_html

CURVES = (
    ("test.macro_f1", "Macro F1 on the test set", "macro F1", 0.0, 1.0),
    ("test.tail", "Accuracy of the rarest third", "tail accuracy", 0.0, 1.0),
    ("train_loss", "Training loss", "loss", None, None),
    ("test.accuracy", "Accuracy on the test set", "accuracy", 0.0, 1.0),
    ("validation.macro_f1", "Macro F1 on the private validation splits", "macro F1", 0.0, 1.0),
    ("test.head", "Accuracy of the commonest third", "head accuracy", 0.0, 1.0),
)
MOST_PANELS = 8


def palette(problem: Problem) -> dict[str, int]:
    """Label -> colour: the baseline takes the neutral colour 0, the rest follow in order."""
    others = [a.label for i, a in enumerate(problem.arms) if i != problem.baseline]
    if len(problem.arms) == 1:
        return {problem.arms[0].label: 1}
    return {problem.reference.label: 0} | {label: i for i, label in enumerate(others, start=1)}


def results(problem: Problem, metric: str = "macro_f1") -> str:
    """Summary, headline table and every single seed."""
    table, colours = headline(problem, metric), palette(problem)
    dots = _charts(
        dot_plot(
            title,
            [(a.label, colours[a.label], _by_seed(a, name)) for a in problem.arms],
            x_label=label,
            caption="A dot per seed; the bar and the number are the mean.",
        )
        for name, title, label in (
            (metric, f"Every seed: {METRIC_NAMES[metric]}", METRIC_NAMES[metric]),
            ("tail", "Every seed: accuracy of the rarest third", "tail accuracy"),
        )
    )
    if len(problem.runs) == 1:
        dots = ""
    lead = f"<p class='lead'>{esc(summary(problem, metric))}</p>"
    return f"{lead}{to_html(table)}<p class='note'>{esc(footnote(table))}</p>{dots}"


def curves(problem: Problem) -> str:
    """Learning curves, mean and band over seeds."""
    colours = palette(problem)
    seeds = max(len(a.runs) for a in problem.arms)
    caption = "Mean over seeds; the band is ± one standard deviation." if seeds > 1 else ""
    charts = [
        line_chart(
            title, [_line(a, name, colours[a.label]) for a in problem.arms],
            y_label=label, floor=floor, ceiling=ceiling, caption=caption,
        )
        for name, title, label, floor, ceiling in CURVES
    ]  # fmt: skip
    return _charts(charts)


def classes(problem: Problem) -> str:
    """Per-class accuracy by training frequency, and head / middle / tail."""
    colours = palette(problem)
    first = next((r for r in problem.runs if r.per_class().size), None)
    if first is None:
        return ""
    counts = first.train_counts
    n_classes = first.per_class().size
    order = np.argsort(-counts, kind="stable") if counts is not None else np.arange(n_classes)
    names = [first.classes[c] for c in order]
    series: list[Series] = []
    groups: list[Series] = []
    for arm in problem.arms:
        stack = np.array([r.per_class() for r in arm.runs if r.per_class().size == n_classes])
        if not stack.size:
            continue
        mean, spread = _mean_spread(stack[:, order])
        series.append((arm.label, colours[arm.label], mean, spread))
        groups.append((arm.label, colours[arm.label], *_mean_spread(thirds(stack[:, order]))))
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
    shots = _shots(problem, colours)
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


def confusion(problem: Problem) -> str:
    """Where each arm sends the samples of each class."""
    panels = []
    for arm in problem.arms[:MOST_PANELS]:
        found = [r.confusion for r in arm.runs if r.confusion is not None]
        if not found:
            continue
        run = arm.runs[0]
        total = np.sum(found, axis=0)
        counts = run.train_counts
        order = np.argsort(-counts, kind="stable") if counts is not None else np.arange(len(total))
        share = total[np.ix_(order, order)] / np.maximum(total[order].sum(1, keepdims=True), 1)
        names = [run.classes[c] for c in order]
        panels.append(
            heatmap(
                arm.label,
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
    return text + _charts(panels, "small" if len(panels) > 2 else "")


def rates(problem: Problem) -> str:
    """Rate trajectories, path variation V_T and what the search did."""
    colours = palette(problem)
    rows, panels = [], []
    variation: list[Line] = []
    scaled: list[Line] = []
    for arm in problem.arms:
        paths = [(r, r.rate_path()) for r in arm.runs]
        if not paths[0][1].size:
            continue
        totals = [path_variation(p, r.weights) for r, p in paths if p.shape[1] == r.weights.size]
        moves = any(float(t[-1]) > 1e-12 for t in totals)
        rows.append(_rate_row(arm, paths, totals))
        if moves:
            panels.append(_trajectory(arm, *paths[0]))
            length = min(len(t) for t in totals)
            mean, spread = _mean_spread(np.array([t[:length] for t in totals]))
            spread, t = np.nan_to_num(spread), np.arange(1, length + 1)
            variation.append(Line(arm.label, colours[arm.label], t, mean, spread))
            scaled.append(Line(arm.label, colours[arm.label], t, mean / np.sqrt(t), spread / np.sqrt(t)))
    if not rows:
        return ""
    head = ["Method", "Search rounds", "V_T", "V_T / √T", "Final rates (first seed)"]
    text = (
        "<p>V<sub>T</sub> adds up how far the clients' resampling rates move, weighted by their share of the data; "
        "the convergence bound asks that it grows no faster than √T.</p>"
    )
    if not panels:
        text = "<p>The resampling rates were fixed, so they did not move.</p>"
    panels = panels[:MOST_PANELS]
    if variation:
        panels.append(line_chart("Path variation of the rates", variation, y_label="V_t", floor=0.0))
        panels.append(line_chart("Path variation over √t", scaled, y_label="V_t / √t", floor=0.0))
    return text + _scroll(html_table(head, rows), "Rates") + _charts([*panels, *_search(problem, colours)])


def alignment(problem: Problem) -> str:
    """Do the clients pull in one direction?"""
    colours = palette(problem)
    chart = line_chart(
        "Alignment of the clients' updates",
        [_line(a, "alignment", colours[a.label]) for a in problem.arms],
        y_label="mean cosine",
        ceiling=1.0,
    )
    if not chart:
        return ""
    text = "<p>Mean cosine between a client's update and the aggregate: 1 if all agree, 1/√K if they are unrelated.</p>"
    return text + _charts([chart])


def federation(problem: Problem) -> str:
    """Who holds what: the client-by-class label map."""
    run = problem.runs[0]
    table = run.label_map
    if table is None:
        return (
            "<p>Label histograms stay at the sites in a real federation, so there is no map of who holds what.</p>"
            + _scroll(_sizes(run), "Clients")
        )
    counts = run.train_counts if run.train_counts is not None else table.sum(0)
    order = np.argsort(-counts, kind="stable")
    sites = [str(s) for s in run.clients.get("sites") or range(len(table))]
    shown = table[:, order]
    notes = "".join(f"<li>{esc(n)}</li>" for n in run.clients.get("notes") or [])
    about = f"<ul class='note'>{notes}</ul>" if notes else ""
    return about + heatmap(
        "Training samples by client and class",
        shown,
        sites,
        [run.classes[c] for c in order],
        row_label="client",
        column_label="class, most training samples first",
        shade=np.sqrt(shown / max(shown.max(), 1)),
        unit="samples",
        caption=f"Seed {run.seed}, before resampling; darker is more, on a square-root scale.",
        wide=True,
    )


def troubles(problem: Problem) -> str:
    """Refused updates, runs cut short and other things a reader must know."""
    notes = [f"<li>{esc(n)}</li>" for n in problem.notes]
    rows = []
    for arm in problem.arms:
        for run in arm.runs:
            if not run.finished:
                done = f"{len(run.history)} of {run.rounds} rounds"
                notes.append(
                    f"<li>{esc(arm.label)}, seed {run.seed}: stopped after {done}; shown as far as it came.</li>"
                )
            for record in run.history:
                for r in record.get("refused", []):
                    reason = str(r.get("reason", ""))
                    rows.append([arm.label, str(run.seed), str(record["round"] + 1), str(r.get("client")), reason])
    text = f"<ul>{''.join(notes)}</ul>" if notes else ""
    if not rows:
        n = len(problem.runs)
        return text + f"<p>No client update was refused in {n} run{'s' if n != 1 else ''}.</p>"
    more = f"<p class='note'>The first 50 of {len(rows)} refusals.</p>" if len(rows) > 50 else ""
    table = html_table(["Method", "Seed", "Round", "Client", "Reason"], rows[:50])
    return text + f"<p>{_many(len(rows), 'client update')} refused.</p>" + _scroll(table, "Refused updates") + more


def timings(problem: Problem) -> str:
    """Time per round and in all, and on what."""
    rows = []
    for arm in problem.arms:
        each = [s for r in arm.runs for s in r.timings]
        hardware = sorted({_hardware(r) for r in arm.runs})
        total = float(np.mean([r.seconds for r in arm.runs]))
        per_round = f"{np.median(each):.3g} s" if each else "–"
        rows.append(
            [arm.label, str(max(len(r.history) for r in arm.runs)), per_round, _time(total), ", ".join(hardware)]
        )
    return _scroll(html_table(["Method", "Rounds", "Median round", "Whole run (mean)", "Hardware"], rows), "Timings")


def configuration(problem: Problem) -> str:
    """Settings shared by all runs, and where arms differ."""
    flats = [settings(a.runs[0]) for a in problem.arms]
    keys = list(dict.fromkeys(k for f in flats for k in f if k not in ("run.seed", "run.name", "run.folder")))
    same = [k for k in keys if all(f.get(k) == flats[0].get(k) for f in flats)]
    differ = [k for k in keys if k not in same]
    out = ""
    if differ:
        rows = [[k, *(short(f[k]) if k in f else "–" for f in flats)] for k in differ]
        out += _scroll(html_table(["Differs", *(a.label for a in problem.arms)], rows), "Settings that differ")
    rows = [[k, short(flats[0].get(k))] for k in same]
    seeds = ", ".join(str(s) for s in sorted({r.seed for r in problem.runs}))
    rows.append(["run.seed", seeds])
    table = _scroll(html_table(["Setting", "Value"], rows), "Settings shared by all")
    return out + f"<details><summary>Settings shared by all ({len(rows)})</summary>{table}</details>"


def _line(arm: Arm, name: str, c: int) -> Line:
    t, mean, spread = arm.band(name)
    return Line(arm.label, c, t + 1, mean, spread)


def _by_seed(arm: Arm, metric: str) -> dict[str, float]:
    return {f"seed {r.seed}": r.metric(metric) for r in arm.runs if math.isfinite(r.metric(metric))}


def _charts(charts: Iterable[str], size: str = "") -> str:
    found = "".join(charts)
    return f"<div class='charts {size}'>{found}</div>" if found else ""


def _scroll(table: str, name: str) -> str:
    return f"<div class='scroll' tabindex='0' role='region' aria-label='{esc(name)}'>{table}</div>"


def _many(n: int, what: str) -> str:
    return f"{n} {what} was" if n == 1 else f"{n} {what}s were"


def _nanmean(values: np.ndarray) -> np.ndarray:
    """Mean over classes without test samples left out; NaN if there are none."""
    seen = np.isfinite(values)
    total = np.where(seen, values, 0.0).sum(axis=1)
    return np.where(seen.any(axis=1), total / np.maximum(seen.sum(axis=1), 1), np.nan)


def _mean_spread(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Column means and standard deviations of (seeds, n); NaN where undefined."""
    seen = np.isfinite(table)
    n = seen.sum(axis=0)
    mean = np.where(n > 0, np.where(seen, table, 0.0).sum(axis=0) / np.maximum(n, 1), np.nan)
    square = np.where(seen, (table - mean) ** 2, 0.0).sum(axis=0) / np.maximum(n - 1, 1)
    return mean, np.where(n > 1, np.sqrt(square), np.nan)


def thirds(values: np.ndarray) -> np.ndarray:
    """(seeds, C) per-class values, most frequent class first -> (seeds, 3) head, middle and tail means.

    Thirds as the head and tail metrics count them; two columns where nothing is left for the middle.
    """
    n = values.shape[1]
    size = max(1, n // 3)
    parts = [values[:, :size], values[:, size : n - size], values[:, n - size :]]
    return np.stack([_nanmean(p) for p in parts if p.shape[1]], axis=1)


def _shots(problem: Problem, colours: dict[str, int]) -> str:
    names = [n for n in ("many", "medium", "few") if any(math.isfinite(a.mean(n)) for a in problem.arms)]
    if len(names) < 2:
        return ""
    series: list[Series] = [
        (a.label, colours[a.label], np.array([a.mean(n) for n in names]), np.array([a.spread(n) for n in names]))
        for a in problem.arms
    ]
    return bar_chart(
        "Many, medium and few shots", names, series, y_label="accuracy",
        caption="Classes with at least 100, 21 to 99 and at most 20 training samples.",
    )  # fmt: skip


def _rate_row(arm: Arm, paths: list[tuple[RunRecord, np.ndarray]], totals: list[np.ndarray]) -> list[str]:
    last = [float(t[-1]) for t in totals] or [math.nan]
    scaled = [float(t[-1]) / math.sqrt(len(t)) for t in totals] or [math.nan]
    final = paths[0][1][-1]
    if np.ptp(final) < 1e-12:
        shown = f"{final[0]:.3f} at all {final.size} clients"
    else:
        shown = ", ".join(f"{v:.3f}" for v in final[:12]) + (" …" if final.size > 12 else "")
    searched = sorted({r.search_rounds() for r, _ in paths})
    rounds = str(searched[0]) if len(searched) == 1 else f"{searched[0]} to {searched[-1]}"
    return [arm.label, rounds, number(float(np.mean(last))), number(float(np.mean(scaled))), shown]


def _trajectory(arm: Arm, run: RunRecord, path: np.ndarray) -> str:
    n_clients = path.shape[1]
    sites = [str(s) for s in run.clients.get("sites") or range(n_clients)]
    x = np.arange(1, len(path) + 1)
    shown = range(n_clients) if n_clients <= 8 else np.linspace(0, n_clients - 1, 8).round().astype(int)
    lines = [Line(sites[k], i, x, path[:, k]) for i, k in enumerate(shown)]
    end = run.search_rounds()
    some = f", {len(lines)} of {n_clients} clients" if n_clients > 8 else ""
    return line_chart(
        f"Rates of {arm.label}",
        lines,
        y_label="resampling rate",
        steps=True,
        mark=float(end) if 0 < end < len(path) else None,
        mark_label="search ends",
        caption=f"Seed {run.seed}{some}.",
    )


def _search(problem: Problem, colours: dict[str, int]) -> list[str]:
    """A chart per number that the search reports, where it changes."""
    names: dict[str, None] = {}
    for run in problem.runs:
        for record in run.history[-1:]:
            for key, value in record.get("search", {}).items():
                if isinstance(value, int | float) and not isinstance(value, bool) and key != "rounds":
                    names[key] = None
    rewards = [_line(a, "reward", colours[a.label]) for a in problem.arms if a.band("reward")[0].size]
    charts = [line_chart("Search: validation metric of the chosen candidate", rewards, y_label="pooled validation")]
    for key in list(names)[:MOST_PANELS]:
        lines = [_line(a, f"search.{key}", colours[a.label]) for a in problem.arms]
        lines = [li for li in lines if li.y.size]
        if lines and any(np.ptp(li.y[np.isfinite(li.y)]) > 0 for li in lines if np.isfinite(li.y).any()):
            charts.append(line_chart(f"Search: {key.replace('_', ' ')}", lines, y_label=key.replace("_", " ")))
    return charts


def _sizes(run: RunRecord) -> str:
    sites = run.clients.get("sites") or range(len(run.clients.get("sizes") or []))
    rows = [[str(s), f"{n:,}"] for s, n in zip(sites, run.clients.get("sizes") or [], strict=False)]
    return html_table(["Client", "Training samples"], rows)


def _hardware(run: RunRecord) -> str:
    found = run.result.get("hardware", {})
    if not isinstance(found, dict) or not found:
        return str(found or "not recorded")
    engine = run.result.get("engine", {})
    parts = [str(found.get("gpu") or found.get("machine") or "CPU")]
    parts += [f"{found['cpus']} CPU cores"] if found.get("cpus") else []
    parts += [f"torch {found['torch']}"] if found.get("torch") else []
    parts += [f"{engine['path']} path"] if isinstance(engine, dict) and engine.get("path") else []
    return ", ".join(parts)


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
