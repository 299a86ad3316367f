"""The parts of the page with the outcome: in short, headline table, every seed, curves, time and settings."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from fedtail.core.metrics import METRICS, metrics
from fedtail.report.blocks import Block, Cell, Charts, Fold, Table, Text, Tiles, first_of, say, table_of
from fedtail.report.comparison import Comparison, common_keys, keys_of
from fedtail.report.facts import in_short, outcome, provenance
from fedtail.report.pictures import curve, every_seed
from fedtail.report.tables import MOST_COLUMNS, footnote, headline, summary
from fedtail.runs.record import RunRecord
from fedtail.settings import flatten
from fedtail.words import NONE, duration, fixed, setting

MOST_CURVES = 5
REVEALED = "The sites revealed only totals, as they could up to version 0.2: there is accuracy but nothing per class."


def results(comparison: Comparison, metric: str) -> list[Block]:
    """In short, the headline table and every single seed."""
    # accuracy is all that some runs of version 0.2 have
    metric = metric if comparison.scored(metric) else "accuracy"
    table = headline(comparison, metric)
    totals = any(run.is_real and run.result and not run.per_class().size for run in comparison.runs)
    more = table.block(test=False, colours=comparison.colours) if len(table.columns) > MOST_COLUMNS else Text("")
    return [
        Text(in_short(comparison, metric), "short"),
        Tiles(outcome(comparison, metric)),
        Text(summary(comparison, metric), "lead"),
        *verdicts(comparison),
        table.block(table.most_telling(), colours=comparison.colours),
        Text(footnote(table), "note"),
        Text(REVEALED if totals else "", "note"),
        Fold("All metrics", [more]),
        Charts([every_seed(comparison, name) for name in (metric, "tail")] if len(comparison.runs) > 1 else []),
    ]


def verdicts(comparison: Comparison) -> list[Text]:
    """What is wrong with runs that came to nothing, a line each."""
    lines = [
        Text(Markup("{}{}; try <code>{}</code>.").format(who, wrong["said"], wrong["try"]), "note warning")
        for one, run in comparison.each
        for who in [f"{one.label}, seed {comparison.seed(run)}: " if len(comparison.runs) > 1 else ""]
        if (wrong := run.result.get("verdict"))
    ]
    shown, note = first_of(lines, "run", "result.json")
    return [*shown, note]


def races(comparison: Comparison, metric: str) -> list[Block]:
    """What ``auto`` tried for learning rate and resampling rate, what won, and what it chose from the sites' sizes."""
    several = len(comparison.runs) > 1
    chosen_by = METRICS[str(comparison.runs[0].setting("run", "metric", "accuracy"))]
    judged = {"reward": chosen_by, **{name: METRICS[name] for name in chosen_by.smooth}}
    lines = []
    for one, run in comparison.each:
        for t, tried in ((record["round"], tried) for record in run.history for tried in record.get("race", [])):
            ((name, value),) = [(k, v) for k, v in tried.items() if k not in (*judged, "diverged")]
            line = {"Method": one.label, "Seed": comparison.seed(run)} if several else {}
            line |= {"Setting": name, "Value": f"{value:g}"}
            line |= {m.title: fixed(tried[key]) if key in tried else "" for key, m in judged.items()}
            line |= {chosen_by.title: "diverged"} if tried.get("diverged") else {}
            kept = "kept" if run.result.get("found", {}).get(name) == value else ""
            lines.append({**line, "": kept, "Round": str(t + 1)})
    found = [run.result.get("found", {}) for run in comparison.runs]
    smooth = [METRICS[name].words for name in chosen_by.smooth]
    text = say("raced", smooth=smooth, words=chosen_by.words) if lines else ""
    return [Text(say("settled", found=found)), Text(text), table_of(lines, "Race", "fit", comparison.filtered)]


def curves(comparison: Comparison, metric: str) -> list[Block]:
    """Learning curves, mean and band over seeds."""
    known = sorted((m for m in metrics() if m.headline), key=lambda m: -m.priority)
    seen = [m for m in known if any(run.curve(f"test.{m.name}")[0].size for run in comparison.runs)]
    shown, note = first_of(seen, "chart", "history.jsonl", MOST_CURVES)
    charts = [
        curve(comparison, f"test.{m.name}", f"{m.words[:1].upper()}{m.words[1:]} on the test set", m.title, floor=0.0,
              ceiling=1.0)
        for m in shown
    ]  # fmt: skip
    split = "Macro F1 on the private validation splits"
    charts.insert(1, curve(comparison, "train_loss", "Training loss", "loss", floor=0.0))
    charts.append(curve(comparison, "validation.macro_f1", split, "macro F1", floor=0.0, ceiling=1.0))
    return [Charts(charts), note]


def timings(comparison: Comparison, metric: str) -> list[Block]:
    """Time per round and in all, and on what."""
    lines: list[dict[str, str | Cell]] = []
    for one in comparison.contenders:
        each = [s for r in one.runs for s in r.timings]
        total = float(np.mean([r.seconds for r in one.runs]))
        hardware = ", ".join(sorted({_hardware(r) for r in one.runs}))
        line = {"Method": one.label, "Rounds": str(max(len(r.history) for r in one.runs))}
        line |= {"Median round": f"{np.median(each):.3g} s" if each else NONE}
        lines.append({**line, "Whole run (mean)": Cell(duration(total), key=total), "Hardware": hardware})
    return [table_of(lines, "Timings", colours=comparison.filtered)]


def configuration(comparison: Comparison, metric: str) -> list[Block]:
    """How to get the same again: date, version, command, commit, data and settings."""
    flats = [flatten(one.runs[0].config) for one in comparison.contenders]
    unused = "engine." if all(r.is_real for r in comparison.runs) else "deploy."
    left_out, same = ("run.seed", "run.name", "run.folder"), common_keys(flats)
    keys = [k for k in keys_of(flats) if k not in left_out and not k.startswith(unused)]
    differ = [[k, *(setting(f[k]) if k in f else NONE for f in flats)] for k in keys if k not in same]
    rows = [[k, setting(flats[0][k])] for k in keys if k in same]
    rows.append(["run.seed", ", ".join(str(s) for s in sorted({r.seed for r in comparison.runs}))])
    made = [pair for run in comparison.runs for pair in provenance(run)]
    origin = [[what, "; ".join(dict.fromkeys(v for w, v in made if w == what))] for what in dict(made)]
    same_for_all = Table(rows, ["Setting", "Value"], "Settings shared by all")
    return [
        Table(origin, ["Made by", ""], "How the runs were made", "fit"),
        Table(differ, ["Setting", *(one.label for one in comparison.contenders)], "Settings that differ"),
        Fold(f"Settings shared by all runs ({len(rows)})", [same_for_all]),
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
