"""The headline table: mean ± spread over seeds and a paired test, as HTML, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedtail.core.metrics import METRICS, metrics, signed
from fedtail.core.significance import Paired, holm, paired
from fedtail.report.chart import Cell, html_table, scroll
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.yardsticks import yardstick_cells
from fedtail.runs.yardstick import TITLES

NOTHING = "Always the majority class"
CLEAR = 0.05
"""A difference with a smaller p is taken as one."""


def tested() -> list[str]:
    """Metrics that contenders may be ranked and tested by; false alarms alone are won by a model that finds nothing."""
    others = [m for m in metrics() if m.headline and (m.higher_is_better or m.needs != "background")]
    return [m.name for m in metrics() if m in others or m.needs == "scores"]


@dataclass(frozen=True)
class Row:
    """One contender: (mean, spread) per column, and how it compares with the baseline."""

    label: str
    seeds: int
    cells: tuple[tuple[float, float], ...]
    versus: Paired | None
    """None for the baseline itself, or where no seed is shared."""
    p_holm: float
    note: str = ""
    """Why the row is not quite like the others: cut short, another number of rounds."""

    @property
    def shown(self) -> str:
        """The label with the note."""
        return f"{self.label} ({self.note})" if self.note else self.label


@dataclass(frozen=True)
class Table:
    """The headline table of a comparison."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    baseline: str
    metric: str
    floor: dict[str, float]
    """Always answering the most frequent class; empty if not recorded."""
    yardsticks: tuple[Row, ...] = ()
    """What the contenders are measured against, and are not ranked with."""
    winners: tuple[str | None, ...] = ()
    """Per column the row that is better than all others; None where a test cannot tell."""

    def marked(self, row: Row, column: int) -> bool:
        """Whether a cell is set in bold."""
        return bool(self.winners) and self.winners[column] == row.label


def winner(contenders: Sequence[Contender], metric: str) -> str | None:
    """The contender that a paired test tells from every other (Holm-corrected, p < 0.05); None where there is none:
    the largest of some means that are equal but for luck deserves no mark."""
    scored = [one for one in contenders if math.isfinite(one.mean(metric))]
    if len(scored) < 2:
        return None
    best, *others = sorted(scored, key=lambda one: -signed(metric, one.mean(metric)))
    tests = [paired(best.values(metric), one.values(metric)) for one in others]
    apart = [math.nan if t is None else 0.0 if math.isnan(t.p_t) and t.n > 1 else t.p_t for t in tests]
    return best.label if all(p < CLEAR for p in holm(apart)) else None


def headline(comparison: Comparison, metric: str = "macro_f1") -> Table:
    """A row per contender; ``metric`` is the one that is tested against the baseline, and the first column."""
    shown = sorted((m.name for m in metrics() if m.headline or m.name == metric), key=lambda name: name != metric)
    columns = tuple(c for c in shown if any(math.isfinite(one.mean(c)) for one in comparison.contenders))
    base = comparison.reference
    tests = [None if one is base else paired(one.values(metric), base.values(metric)) for one in comparison.contenders]
    adjusted = holm([t.p_t if t else math.nan for t in tests])
    rows = tuple(
        Row(
            label=one.label,
            seeds=len(one.runs),
            cells=tuple((one.mean(c), one.spread(c)) for c in columns),
            versus=test,
            p_holm=p,
            note=length_note(one, comparison),
        )
        for one, test, p in zip(comparison.contenders, tests, adjusted, strict=True)
    )
    floor: dict[str, float] = next(
        (r.result["floor"] for r in comparison.runs if isinstance(r.result.get("floor"), dict)), {}
    )
    measured = tuple(
        Row(
            label=f"yardstick: {TITLES[kind]}",
            seeds=sum(y.kind == kind for y in comparison.yardsticks),
            cells=cells,
            versus=None,
            p_holm=math.nan,
        )
        for kind, cells in yardstick_cells(comparison.yardsticks, columns).items()
    )
    return Table(
        title=comparison.title,
        columns=columns,
        rows=rows,
        baseline=base.label,
        metric=metric,
        floor=floor,
        yardsticks=measured,
        winners=tuple(winner(comparison.contenders, c) for c in columns),
    )


def length_note(one: Contender, comparison: Comparison) -> str:
    """What is unusual about a contender's length: a run that was cut short, that stopped by ``run.patience``, or that
    was asked for another number of rounds than the others were."""
    short = [r for r in one.runs if not r.finished]
    if short:
        done = ", ".join(sorted({f"{len(r.history)} of {r.rounds}" for r in short}))
        return f"incomplete: {done} rounds"
    stopped = sorted(
        {len(r.history) for r in one.runs if len(r.history) < r.rounds and not r.setting("run", "search_only")}
    )
    if stopped:
        return f"stopped after {', '.join(map(str, stopped))} rounds"
    if len({r.rounds for r in comparison.runs}) > 1:
        return f"{', '.join(map(str, sorted({r.rounds for r in one.runs})))} rounds"
    return ""


def footnote(table: Table) -> str:
    """Which test, over how many seeds, and what it can and cannot show. Plain text."""
    sizes = sorted({r.versus.n for r in table.rows if r.versus})
    name = METRICS[table.metric].words
    if not sizes:
        return "± is the standard deviation over seeds." if max(r.seeds for r in table.rows) > 1 else ""
    if sizes[0] < 2:
        return "Only one seed is shared, so significance cannot be tested; run at least three."
    n = sizes[0]
    several = ", Holm-corrected" if sum(r.versus is not None for r in table.rows) > 1 else ""
    bold = " Bold: significantly better than every other method." if any(table.winners) else ""
    weak = ""
    if n < 6:
        weak = (
            f" With {n} seeds, an exact sign-flip test cannot give p below {2 / 2**n:.3g}, and the t-test "
            "relies on normality: treat p as a hint."
        )
    return (
        f"± is the standard deviation over seeds. Difference in {name} from {table.baseline}, paired over {n} "
        f"shared seeds, with its 95 % interval; p from a two-sided paired t-test{several}.{bold}{weak}"
    )


def mean_spread(cell: tuple[float, float], joint: str = " ± ") -> str:
    """``0.857 ± 0.012``; without spread where there is one seed."""
    mean, spread = cell
    return f"{mean:.3f}{joint}{spread:.3f}" if math.isfinite(spread) else f"{mean:.3f}" if math.isfinite(mean) else "–"


def difference(row: Row) -> tuple[str, str, str]:
    """(difference, interval, p) as text."""
    v = row.versus
    if v is None:
        return "", "", ""
    interval = f"[{v.low:+.3f}, {v.high:+.3f}]" if math.isfinite(v.low) else ""
    return f"{v.difference:+.3f}", interval, p_value(row.p_holm)


def p_value(p: float) -> str:
    return "" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def to_html(table: Table, colours: Mapping[str, int] | None = None) -> str:
    """The table of the page: the tested metric and its test first. ``colours``: of the contenders, for the filter."""
    many = len(table.rows) > 1
    seeds = max(r.seeds for r in table.rows) > 1
    if not table.columns:
        return ""
    first, *others = table.columns
    head = ["Method", *(["Seeds"] if seeds else []), METRICS[first].title]
    head += [f"Δ {METRICS[table.metric].title}", "p"] if many else []
    head += [METRICS[c].title for c in others]
    blank = ["", ""] if many else []
    rest: list[list[str | Cell]] = []
    if table.floor:
        floor = [number_3(_floor(table, c)) for c in table.columns]
        rest.append([NOTHING, *([""] if seeds else []), floor[0], *blank, *floor[1:]])
    for row in table.yardsticks:
        values = [number_3(mean) for mean, _ in row.cells]
        rest.append([row.label, *([str(row.seeds)] if seeds else []), values[0], *blank, *values[1:]])
    rows = [_html_row(table, row, seeds) for row in table.rows]
    runs = [(colours or {}).get(row.label) for row in table.rows]
    return scroll(html_table(head, rows, runs=runs, rest=rest, look="headline"), "Headline table")


def _html_row(table: Table, row: Row, seeds: bool) -> list[str | Cell]:
    cells = [
        Cell(
            number_3(mean),
            small=f"± {spread:.3f}" if math.isfinite(spread) else "",
            look="best" if table.marked(row, i) else "",
        )
        for i, (mean, spread) in enumerate(row.cells)
    ]
    out: list[str | Cell] = [Cell(row.label, small=row.note), *([str(row.seeds)] if seeds else []), cells[0]]
    if len(table.rows) > 1:
        delta, interval, p = difference(row)
        out += [Cell(delta, small=interval) if row.versus else "baseline", p or "–"]
    return [*out, *cells[1:]]


def _floor(table: Table, column: str) -> float:
    value = table.floor.get(column)
    return math.nan if value is None else float(value)


def number_3(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"


def _plain(table: Table) -> tuple[list[str], list[list[str]]]:
    many = len(table.rows) > 1
    head = ["Method", "Seeds", *(METRICS[c].title for c in table.columns)]
    head += [f"Δ {METRICS[table.metric].title}", "95 % interval", "p"] if many else []
    rows = [
        [r.shown, str(r.seeds), *(mean_spread(c) for c in r.cells), *(difference(r) if many else ())]
        for r in table.rows
    ]
    if table.floor:
        floor = [number_3(_floor(table, c)) for c in table.columns]
        rows.append([NOTHING, "", *floor, *(["", "", ""] if many else [])])
    for r in table.yardsticks:
        rows.append([r.label, str(r.seeds), *(mean_spread(c) for c in r.cells), *(["", "", ""] if many else [])])
    return head, rows


def to_markdown(tables: Sequence[Table]) -> str:
    """GitHub-flavoured tables, one per comparison."""
    parts = []
    for table in tables:
        head, rows = _plain(table)
        lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
        lines += ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows]
        parts.append(f"### {table.title}\n\n" + "\n".join(lines) + f"\n\n{footnote(table)}\n")
    return "\n".join(parts)


def to_latex(tables: Sequence[Table]) -> str:
    """booktabs tables; in bold what is better than all others of its column."""
    parts = []
    for table in tables:
        many = len(table.rows) > 1
        head = ["Method", *(METRICS[c].title for c in table.columns)]
        head += [rf"$\Delta$ {METRICS[table.metric].title}", "$p$"] if many else []
        lines = []
        for row in table.rows:
            cells = [_tex(row.shown)]
            for i, cell in enumerate(row.cells):
                text = mean_spread(cell, r" \pm ").replace("–", r"\text{--}")
                bold = table.marked(row, i)
                cells.append(rf"$\mathbf{{{text}}}$" if bold else f"${text}$")
            if many:
                delta, _, p = difference(row)
                cells += [f"${delta}$" if delta else "--", f"${p}$" if p else "--"]
            lines.append(" & ".join(cells) + r" \\")
        parts.append(
            "\\begin{table}\n  \\centering\n"
            f"  \\caption{{{_tex(table.title)}. {_tex(footnote(table))}}}\n"
            f"  \\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}\n    \\toprule\n"
            f"    {' & '.join(head)} \\\\\n    \\midrule\n"
            + "".join(f"    {line}\n" for line in lines)
            + "    \\bottomrule\n  \\end{tabular}\n\\end{table}\n"
        )
    return "% needs \\usepackage{amsmath,booktabs}\n" + "\n".join(parts)


def to_csv(compared: Sequence[Comparison]) -> str:
    """One line per run, every scalar test metric: for whoever wants to compute for themselves."""
    names = [m.name for m in metrics()]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["problem", "method", "seed", "rounds", *names, "seconds", "folder"])
    for comparison in compared:
        for contender in comparison.contenders:
            for run in contender.runs:
                values = [_csv(run.metric(m)) for m in names]
                tail = [f"{run.seconds:.3f}", run.folder.name]
                writer.writerow([comparison.title, contender.label, run.seed, len(run.history), *values, *tail])
    return out.getvalue()


def summary(comparison: Comparison, metric: str = "macro_f1") -> str:
    """What the table says, in a sentence or two of plain text."""
    scored = [one for one in comparison.contenders if math.isfinite(one.mean(metric))]
    if not scored:
        return "No run was scored on test samples."
    best = max(scored, key=lambda one: signed(metric, one.mean(metric)))
    name = METRICS[metric].words
    seeds = len(best.runs)
    text = f"{best.label} reaches {name} {mean_spread((best.mean(metric), best.spread(metric)))}"
    text += f" over {seeds} seeds" if seeds > 1 else " in one run"
    base = comparison.reference
    if best is base:
        others = [a for a in scored if a is not base]
        return text + (", the best of the compared methods." if others else ".")
    test = paired(best.values(metric), base.values(metric))
    if test is None:
        return text + "."
    high = METRICS[metric].higher_is_better
    text += f", {abs(test.difference):.3f} {'above' if high else 'below'} {base.label}"
    if test.n > 1:
        clear = test.low > 0 if high else test.high < 0
        text += (
            f" (95 % interval {test.low:+.3f} to {test.high:+.3f}{'' if clear else ', which includes no difference'})"
        )
    text += "."
    return text + _tail_sentence(best, base)


def _tail_sentence(best: Contender, base: Contender) -> str:
    a, b = best.mean("tail"), base.mean("tail")
    if not (math.isfinite(a) and math.isfinite(b)):
        return ""
    return f" On the rarest third of the classes, its accuracy is {a:.3f}, compared with {b:.3f}."


def _csv(value: float) -> str:
    return f"{value:.6f}" if math.isfinite(value) else ""


def _tex(text: str) -> str:
    special = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "±": r"$\pm$", "·": r"$\cdot$", "Δ": r"$\Delta$"}
    return "".join(special.get(c, c) for c in text)
