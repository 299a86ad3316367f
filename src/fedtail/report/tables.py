"""The headline table: mean ± spread over seeds and a paired test, as HTML, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedtail.core.metrics import METRICS, metrics, signed
from fedtail.core.significance import Paired, holm, paired
from fedtail.report.chart import esc
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.yardsticks import yardstick_cells
from fedtail.runs.yardstick import TITLES


def tested() -> list[str]:
    """Metrics that contenders may be ranked and tested by."""
    return [m.name for m in metrics() if m.headline or m.needs == "scores"]


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

    def best(self, column: int) -> float:
        """The best mean of a column: the highest, of false alarms the lowest."""
        choose = max if METRICS[self.columns[column]].higher_is_better else min
        return choose((r.cells[column][0] for r in self.rows if math.isfinite(r.cells[column][0])), default=math.nan)


def headline(comparison: Comparison, metric: str = "macro_f1") -> Table:
    """A row per contender; ``metric`` is the one that is tested against the baseline."""
    shown = [m.name for m in metrics() if m.headline or m.name == metric]
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
    )


def length_note(one: Contender, comparison: Comparison) -> str:
    """What is unusual about a contender's length: a run that was cut short, that stopped by ``run.patience``, or that
    was asked for another number of rounds than the others were."""
    short = [r for r in one.runs if not r.finished]
    if short:
        done = ", ".join(sorted({f"{len(r.history)} of {r.rounds}" for r in short}))
        return f"cut short: {done} rounds"
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
        return "One seed is shared, so nothing can be said about significance; run at least three."
    n = sizes[0]
    several = ", Holm-corrected" if sum(r.versus is not None for r in table.rows) > 1 else ""
    weak = ""
    if n < 6:
        weak = (
            f" With {n} seeds an exact sign-flip test cannot go below {2 / 2**n:.3g} and the t-test leans on "
            "normality: read p as a hint."
        )
    return (
        f"± is the standard deviation over seeds. Difference in {name} against {table.baseline}, paired over {n} "
        f"shared seeds, with its 95 % interval; p from a two-sided paired t-test{several}.{weak}"
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


def to_html(table: Table) -> str:
    """The table of the page; the best mean of each column is marked."""
    many = len(table.rows) > 1
    head = ["Method", "Seeds", *(METRICS[c].title for c in table.columns)]
    head += [f"Δ {METRICS[table.metric].title}", "p"] if many else []
    body = []
    for row in table.rows:
        cells = [f'<th scope="row">{esc(row.shown)}</th><td>{row.seeds}</td>']
        for i, (mean, spread) in enumerate(row.cells):
            mark = " class='best'" if many and math.isfinite(mean) and mean == table.best(i) else ""
            tail = f" <small>± {spread:.3f}</small>" if math.isfinite(spread) else ""
            cells.append(f"<td{mark}>{number_3(mean)}{tail}</td>")
        if many:
            delta, interval, p = difference(row)
            shown = f"{delta} <small>{interval}</small>" if row.versus else "baseline"
            cells.append(f"<td>{shown}</td><td>{p or '–'}</td>")
        body.append("<tr>" + "".join(cells) + "</tr>")
    if table.floor:
        cells = [f"<td>{number_3(_floor(table, c))}</td>" for c in table.columns]
        blank = "<td></td><td></td>" if many else ""
        first = '<th scope="row">Always the majority class</th><td></td>'
        body.append(f'<tr class="floor">{first}{"".join(cells)}{blank}</tr>')
    for row in table.yardsticks:
        first = f'<th scope="row">{esc(row.label)}</th><td>{row.seeds}</td>'
        cells = [f"<td>{number_3(mean)}</td>" for mean, _ in row.cells]
        body.append(f'<tr class="floor">{first}{"".join(cells)}{"<td></td><td></td>" if many else ""}</tr>')
    top = "".join(f'<th scope="col">{esc(h)}</th>' for h in head)
    return (
        "<div class='scroll' tabindex='0' role='region' aria-label='Headline table'><table class='headline'>"
        f"<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


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
        rows.append(["Always the majority class", "", *floor, *(["", "", ""] if many else [])])
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
    """booktabs tables; the best mean of each column is bold."""
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
                bold = many and math.isfinite(cell[0]) and cell[0] == table.best(i)
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
    return f" On the rarest third of the classes its accuracy is {a:.3f}, against {b:.3f}."


def _csv(value: float) -> str:
    return f"{value:.6f}" if math.isfinite(value) else ""


def _tex(text: str) -> str:
    special = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "±": r"$\pm$", "·": r"$\cdot$", "Δ": r"$\Delta$"}
    return "".join(special.get(c, c) for c in text)
