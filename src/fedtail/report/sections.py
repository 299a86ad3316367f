"""The parts of the page; each takes a comparison and returns HTML, or nothing where there is nothing to show."""

from __future__ import annotations

import math

import numpy as np

from fedtail.core.evidence import rarest
from fedtail.core.metrics import METRICS, signed
from fedtail.report.bars import dot_plot
from fedtail.report.chart import Cell, charts, esc, html_table, scroll, tiles
from fedtail.report.comparison import Comparison, Contender, short
from fedtail.report.federation import revealed
from fedtail.report.lines import line_chart
from fedtail.report.series import contender_line, palette
from fedtail.report.sites import worst_site
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
            caption="One dot per seed; the bar and the number show the mean.",
            runs=True,
        )
        for name, title, label in (
            (metric, f"Every seed: {METRICS[metric].words}", METRICS[metric].words),
            ("tail", "Every seed: accuracy of the rarest third", "tail accuracy"),
        )
    )
    if len(comparison.runs) == 1:
        dots = ""
    lead = f"{_tiles(comparison, metric)}<p class='lead'>{esc(summary(comparison, metric))}</p>{verdicts(comparison)}"
    note = f"<p class='note'>{esc(said)}</p>" if (said := footnote(table)) else ""
    return f"{lead}{to_html(table, colours)}{note}{revealed(comparison)}{dots}"


def _tiles(comparison: Comparison, metric: str) -> str:
    """The best contender in a few numbers, each beside what it is to be read against."""
    found = [one for one in comparison.contenders if math.isfinite(one.mean(metric))]
    if not found:
        return ""
    best = max(found, key=lambda one: signed(metric, one.mean(metric)))
    run, seeds = best.runs[0], f"mean of {len(best.runs)} seeds" if len(best.runs) > 1 else ""
    floor = (run.result.get("floor") or {}).get(metric)
    against = f"{floor:.3f} when always predicting the majority class" if floor is not None else seeds
    out = [(f"{best.mean(metric):.3f}", METRICS[metric].words, against)]
    if worst := worst_site(best):
        one, value = worst
        who = f"{one.name}, {one.samples:,} samples"
        note = f"{seeds}; in seed {run.seed}: {who}" if seeds else who
        out.append((f"{value:.3f}", "macro F1 at the worst site", note))
    if math.isfinite(best.mean("tail")):
        out.append((f"{best.mean('tail'):.3f}", "recall of the rarest third", _tail_note(run)))
    if math.isfinite(best.mean("calibration_error")):
        before = (run.result.get("before") or {}).get("calibration_error")
        note = f"{before:.3f} before calibration" if before is not None else "0 means perfectly calibrated"
        out.append((f"{best.mean('calibration_error'):.3f}", "calibration error", note))
    return tiles(out)


def _tail_note(run: RunRecord) -> str:
    support, counts = run.per_class("support"), run.train_counts
    if counts is None or support.size != counts.size:
        return "of the classes"
    return f"{int(support[rarest(counts)].sum()):,} test samples"


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
    """What ``auto`` tried for learning rate and resampling rate, what won, and what it chose from the sites' sizes."""
    colours, rows, runs, several = palette(comparison), [], [], len(comparison.runs) > 1
    metric = METRICS[str(comparison.runs[0].setting("run", "metric", "accuracy"))]
    for contender in comparison.contenders:
        for run in contender.runs:
            for record in run.history:
                for tried in record.get("race", []):
                    told = ("reward", "diverged", *metric.smooth)
                    ((name, value),) = [(k, v) for k, v in tried.items() if k not in told]
                    shown = [f"{tried[k]:.3f}" if k in tried else "" for k in ("reward", *metric.smooth)]
                    shown = ["diverged", *("" for _ in metric.smooth)] if tried.get("diverged") else shown
                    kept = run.result.get("found", {}).get(name) == value
                    row = [name, f"{value:g}", *shown, "kept" if kept else "", str(record["round"] + 1)]
                    rows.append([*([contender.label, str(run.seed)] if several else []), *row])
                    runs.append(colours[contender.label])
    followed = settled(comparison)
    if not rows:
        return followed
    smooth = [METRICS[name] for name in metric.smooth]
    words = " and ".join(one.words for one in smooth)
    by = f"{words} or, if sites do not reveal these, by {metric.words}" if smooth else metric.words
    text = (
        "<p>Every site trained with each of these values (each learning rate with its own model). The models were "
        f"compared on the sites' private validation splits by {esc(by)}, and the better ones continued.</p>"
    )
    shown = [metric.title, *(one.title for one in smooth)]
    head = [*(["Method", "Seed"] if several else []), "Setting", "Value", *shown, "", "Round"]
    return followed + text + scroll(html_table(head, rows, runs=runs, look="fit"), "Race")


def settled(comparison: Comparison) -> str:
    """What ``auto`` chose from the number and the size of the sites."""
    found = [run.result.get("found", {}) for run in comparison.runs]
    batches = sorted({int(one["batch_size"]) for one in found if "batch_size" in one})
    text = ""
    if batches:
        text += (
            f"<p>Batch size {' or '.join(map(str, batches))}, chosen from the training samples of the median site "
            "(<code>local.batch_size=auto</code>).</p>"
        )
    if any(one.get("server_optimizer", "none") != "none" for one in found):
        text += "<p>Many small sites: Adam at the server (<code>server.optimizer=auto</code>).</p>"
    return text


def curves(comparison: Comparison) -> str:
    """Learning curves, mean and band over seeds."""
    colours = palette(comparison)
    seeds = max(len(one.runs) for one in comparison.contenders)
    caption = "Mean over seeds; the band is ± one standard deviation." if seeds > 1 else ""
    panels = []
    for name, title, label, floor, ceiling in CURVES:
        lines = [contender_line(one, name, colours[one.label]) for one in comparison.contenders]
        panels.append(line_chart(title, lines, y_label=label, floor=floor, ceiling=ceiling, caption=caption, runs=True))
    return charts(panels)


def timings(comparison: Comparison) -> str:
    """Time per round and in all, and on what."""
    colours = palette(comparison)
    rows: list[list[str | Cell]] = []
    runs = []
    for contender in comparison.contenders:
        each = [s for r in contender.runs for s in r.timings]
        hardware = sorted({_hardware(r) for r in contender.runs})
        total = float(np.mean([r.seconds for r in contender.runs]))
        per_round = f"{np.median(each):.3g} s" if each else "–"
        rounds = max(len(r.history) for r in contender.runs)
        whole = Cell(_time(total), key=total)
        rows.append([contender.label, str(rounds), per_round, whole, ", ".join(hardware)])
        runs.append(colours[contender.label])
    head = ["Method", "Rounds", "Median round", "Whole run (mean)", "Hardware"]
    return scroll(html_table(head, rows, runs=runs), "Timings")


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
    return out + f"<details><summary>Settings shared by all runs ({len(rows)})</summary>{table}</details>"


def _by_seed(contender: Contender, metric: str) -> dict[str, float]:
    return {f"seed {r.seed}": r.metric(metric) for r in contender.runs if math.isfinite(r.metric(metric))}


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
