"""The parts of the page with the outcome: in short, headline table, every seed, curves, time and settings."""

from __future__ import annotations

import math

import numpy as np
from markupsafe import Markup

from fedtail.core.evidence import rarest
from fedtail.core.metrics import METRICS, metrics
from fedtail.report.blocks import Block, Cell, Charts, Fold, Table, Text, Tiles
from fedtail.report.comparison import Comparison
from fedtail.report.facts import area_with_interval, best_of, found_and_missed, in_short, number_in, provenance, telling
from fedtail.report.pictures import class_order, curve, every_seed, palette
from fedtail.report.probabilities import calibrated
from fedtail.report.tables import all_metrics, footnote, headline, summary, table_block
from fedtail.runs.record import RunRecord
from fedtail.settings import flatten
from fedtail.words import duration, fixed, plural, setting

MOST_PANELS = 8
MOST_CURVES = 5
MOST_TILES = 4
REVEALED = "The sites revealed only totals, as they could up to version 0.2: there is accuracy but nothing per class."


def shown_metric(comparison: Comparison, metric: str) -> str:
    """Return the tested metric, or accuracy, which is all that some runs of version 0.2 have."""
    return metric if best_of(comparison, metric) is not None else "accuracy"


def results(comparison: Comparison, metric: str) -> list[Block]:
    """In short, the headline table and every single seed."""
    metric = shown_metric(comparison, metric)
    table, colours = headline(comparison, metric), palette(comparison)
    totals = any(run.is_real and run.result and not run.per_class().size for run in comparison.runs)
    dots = [every_seed(comparison, name) for name in (metric, "tail")] if len(comparison.runs) > 1 else []
    return [
        Text(in_short(comparison, metric), "short"),
        _tiles(comparison, metric),
        Text(summary(comparison, metric), "lead"),
        *verdicts(comparison),
        table_block(table, colours),
        Text(footnote(table), "note"),
        Text(REVEALED if totals else "", "note"),
        Fold("All metrics", [all_metrics(table, colours)]),
        Charts(dots),
    ]


def _tiles(comparison: Comparison, metric: str) -> Tiles:
    """The best contender in a few numbers, each beside what it is to be read against."""
    best = best_of(comparison, metric)
    if best is None:
        return Tiles([])
    run, seeds = best.runs[0], f"mean of {len(best.runs)} seeds" if len(best.runs) > 1 else ""
    tiles = [
        (
            f"{one.found:,} of {one.support:,}",
            f"cases of {one.name} found",
            plural(one.false_alarms, "false alarm") + (f"; seed {run.seed}" if seeds else ""),
        )
        for one in found_and_missed(run)
    ]
    floor = number_in(run.result.get("floor"), metric)
    against = f"{floor:.3f} when always predicting the majority class" if math.isfinite(floor) else seeds
    tiles.append((fixed(best.mean(metric)), METRICS[metric].words, against))
    each = [sites for r in best.runs if len(sites := telling(r)) > 1]
    if each:
        worst = each[0][0]
        who = f"{worst.name}, {worst.samples:,} samples"
        value = float(np.mean([sites[0].value() for sites in each]))
        tiles.append(
            (fixed(value), "macro F1 at the worst site", f"{seeds}; in seed {run.seed}: {who}" if seeds else who)
        )
    if len(run.classes) == 2 and math.isfinite(best.mean("rare_pr_auc")):
        interval = "" if seeds else f"95 % interval {area_with_interval(run, int(class_order(run)[0]))[1]}"
        tiles.append((fixed(best.mean("rare_pr_auc")), "PR-AUC of the rarer class", seeds or interval))
    elif math.isfinite(best.mean("tail")):
        tiles.append((fixed(best.mean("tail")), "recall of the rarest third", _tail_note(run)))
    if math.isfinite(best.mean("calibration_error")):
        before = number_in(run.result.get("before"), "calibration_error") if calibrated(run) else math.nan
        note = f"{before:.3f} before calibration" if math.isfinite(before) else "0: probabilities mean what they say"
        tiles.append((fixed(best.mean("calibration_error")), "calibration error", note))
    return Tiles(tiles[:MOST_TILES])


def _tail_note(run: RunRecord) -> str:
    support, counts = run.per_class("support"), run.train_counts
    if counts is None or support.size != counts.size:
        return "of the classes"
    return f"{int(support[rarest(counts)].sum()):,} test samples"


def verdicts(comparison: Comparison) -> list[Text]:
    """What is wrong with runs that came to nothing, a line each."""
    lines = []
    for contender in comparison.contenders:
        for run in contender.runs:
            if wrong := run.result.get("verdict"):
                who = f"{contender.label}, seed {run.seed}: " if len(comparison.runs) > 1 else ""
                lines.append(Markup("{}{}; try <code>{}</code>.").format(who, wrong["said"], wrong["try"]))
    return [Text(line, "note warning") for line in lines[:MOST_PANELS]]


def races(comparison: Comparison, metric: str) -> list[Block]:
    """What ``auto`` tried for learning rate and resampling rate, what won, and what it chose from the sites' sizes."""
    colours, rows, runs, several = palette(comparison), [], [], len(comparison.runs) > 1
    chosen_by = METRICS[str(comparison.runs[0].setting("run", "metric", "accuracy"))]
    for contender in comparison.contenders:
        for run in contender.runs:
            for record in run.history:
                for tried in record.get("race", []):
                    others = ("reward", "diverged", *chosen_by.smooth)
                    ((name, value),) = [(k, v) for k, v in tried.items() if k not in others]
                    shown = [fixed(tried[k]) if k in tried else "" for k in ("reward", *chosen_by.smooth)]
                    shown = ["diverged", *("" for _ in chosen_by.smooth)] if tried.get("diverged") else shown
                    kept = run.result.get("found", {}).get(name) == value
                    row = [name, f"{value:g}", *shown, "kept" if kept else "", str(record["round"] + 1)]
                    rows.append([*([contender.label, str(run.seed)] if several else []), *row])
                    runs.append(colours[contender.label])
    blocks = settled(comparison)
    if not rows:
        return blocks
    smooth = [METRICS[name] for name in chosen_by.smooth]
    words = " and ".join(one.words for one in smooth)
    by = f"{words} or, if sites do not reveal these, by {chosen_by.words}" if smooth else chosen_by.words
    text = (
        "Every site trained with each of these values (each learning rate with its own model). The models were "
        f"compared on the sites' private validation splits by {by}, and the better ones continued."
    )
    titles = [chosen_by.title, *(one.title for one in smooth)]
    head = [*(["Method", "Seed"] if several else []), "Setting", "Value", *titles, "", "Round"]
    return [*blocks, Text(text), Table(head, rows, "Race", runs=runs, look="fit")]


def settled(comparison: Comparison) -> list[Block]:
    """What ``auto`` chose from the number and the size of the sites."""
    chosen = [run.result.get("found", {}) for run in comparison.runs]
    batches = sorted({int(one["batch_size"]) for one in chosen if "batch_size" in one})
    blocks: list[Block] = []
    if batches:
        text = (
            "Batch size {}, chosen from the training samples of the median site (<code>local.batch_size=auto</code>)."
        )
        blocks.append(Text(Markup(text).format(" or ".join(map(str, batches)))))
    if any(one.get("server_optimizer", "none") != "none" for one in chosen):
        blocks.append(Text(Markup("Many small sites: Adam at the server (<code>server.optimizer=auto</code>).")))
    return blocks


def curves(comparison: Comparison, metric: str) -> list[Block]:
    """Learning curves, mean and band over seeds."""
    known = sorted((m for m in metrics() if m.headline), key=lambda m: -m.priority)
    seen = [m for m in known if any(run.curve(f"test.{m.name}")[0].size for run in comparison.runs)]
    charts = [
        curve(comparison, f"test.{m.name}", f"{m.words[:1].upper()}{m.words[1:]} on the test set", m.title, floor=0.0,
              ceiling=1.0)
        for m in seen[:MOST_CURVES]
    ]  # fmt: skip
    split = "Macro F1 on the private validation splits"
    charts.insert(1, curve(comparison, "train_loss", "Training loss", "loss", floor=0.0))
    charts.append(curve(comparison, "validation.macro_f1", split, "macro F1", floor=0.0, ceiling=1.0))
    return [Charts(charts)]


def timings(comparison: Comparison, metric: str) -> list[Block]:
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
        rows.append([contender.label, str(rounds), per_round, Cell(duration(total), key=total), ", ".join(hardware)])
        runs.append(colours[contender.label])
    return [Table(["Method", "Rounds", "Median round", "Whole run (mean)", "Hardware"], rows, "Timings", runs=runs)]


def configuration(comparison: Comparison, metric: str) -> list[Block]:
    """How to get the same again: date, version, command, commit, data and settings."""
    flats = [flatten(one.runs[0].config) for one in comparison.contenders]
    unused = "engine." if all(r.is_real for r in comparison.runs) else "deploy."
    left_out = ("run.seed", "run.name", "run.folder")
    keys = list(dict.fromkeys(k for f in flats for k in f if k not in left_out and not k.startswith(unused)))
    same = [k for k in keys if all(f.get(k) == flats[0].get(k) for f in flats)]
    differ = [[k, *(setting(f[k]) if k in f else "–" for f in flats)] for k in keys if k not in same]
    rows = [[k, setting(flats[0].get(k))] for k in same]
    rows.append(["run.seed", ", ".join(str(s) for s in sorted({r.seed for r in comparison.runs}))])
    shared = Table(["Setting", "Value"], rows, "Settings shared by all")
    made: dict[str, list[str]] = {}
    for run in comparison.runs:
        for title, value in provenance(run):
            made.setdefault(title, []).append(value)
    origin = [[title, "; ".join(dict.fromkeys(values))] for title, values in made.items()]
    return [
        Table(["Made by", ""], origin, "How the runs were made", look="fit"),
        Table(["Setting", *(one.label for one in comparison.contenders)], differ, "Settings that differ"),
        Fold(f"Settings shared by all runs ({len(rows)})", [shared]),
    ]


def _hardware(run: RunRecord) -> str:
    machine = run.result.get("hardware", {})
    if not isinstance(machine, dict) or not machine:
        return str(machine or "not recorded")
    engine = run.result.get("engine", {})
    parts = [str(machine.get("gpu") or machine.get("machine") or "CPU")]
    parts += [f"{machine['cpus']} CPU cores"] if machine.get("cpus") else []
    parts += [f"torch {machine['torch']}"] if machine.get("torch") else []
    if run.is_real:
        return f"{engine['engine']}, {len(run.clients.get('sites', []))} sites; the server: {', '.join(parts)}"
    parts += [f"{engine['path']} path"] if isinstance(engine, dict) and engine.get("path") else []
    return ", ".join(parts)
