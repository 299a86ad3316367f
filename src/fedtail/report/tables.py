"""The headline table: mean ± spread over seeds and a paired test, as HTML, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedtail.core.metrics import METRICS, metrics, signed
from fedtail.core.significance import Paired, holm, paired
from fedtail.report.blocks import Block, Cell, Text
from fedtail.report.blocks import Table as TableBlock
from fedtail.report.comparison import Comparison, Contender
from fedtail.report.facts import best_of
from fedtail.report.sections.yardsticks import yardstick_cells
from fedtail.runs.yardstick import TITLES
from fedtail.words import fixed, mean_spread, p_value

NOTHING = "Always the majority class"
CLEAR = 0.05
"""A difference with a smaller p is taken as one."""
LEAST_SEEDS = 6
"""Shared seeds below which no difference is marked: an exact sign-flip test could not give p below 0.05."""
MOST_COLUMNS = 5
"""Metrics of the page's headline table; all of them are folded away below it."""


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
    """Return the contender that a paired test over six shared seeds or more tells from every other (Holm-corrected,
    p < 0.05); None where there is none: the largest of some means that are equal but for luck deserves no mark."""
    scored = [one for one in contenders if math.isfinite(one.mean(metric))]
    if len(scored) < 2:
        return None
    best, *others = sorted(scored, key=lambda one: -signed(metric, one.mean(metric)))
    tests = [paired(best.values(metric), one.values(metric)) for one in others]
    if any(t is None or t.n < LEAST_SEEDS for t in tests):
        return None
    apart = [0.0 if math.isnan(t.p_t) else t.p_t for t in tests if t is not None]
    return best.label if all(p < CLEAR for p in holm(apart)) else None


def headline(comparison: Comparison, metric: str = "macro_f1") -> Table:
    """A row per contender; ``metric`` is the one that is tested against the baseline, and the first column."""
    two = len(comparison.runs[0].classes) == 2  # whose mean PR-AUC hides the rare one
    known = [m.name for m in metrics() if m.name == metric or (m.headline and not (two and m.name == "pr_auc"))]
    known = sorted(known, key=lambda name: name != metric)
    columns = tuple(c for c in known if any(math.isfinite(one.mean(c)) for one in comparison.contenders))
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
        {len(r.history) for r in one.runs if len(r.history) < r.rounds and not (r.folder / "rates.toml").is_file()}
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


def difference(row: Row) -> tuple[str, str, str]:
    """(difference, interval, p) as text."""
    v = row.versus
    if v is None:
        return "", "", ""
    interval = f"[{v.low:+.3f}, {v.high:+.3f}]" if math.isfinite(v.low) else ""
    return f"{v.difference:+.3f}", interval, p_value(row.p_holm)


def table_block(table: Table, colours: Mapping[str, int]) -> Block:
    """Return the table of the page: the tested metric and its test first, then what says most, and no more columns than
    a screen has room for. ``colours``: of the contenders, for the filter."""
    others = sorted(table.columns[1:], key=lambda c: -METRICS[c].priority)[: MOST_COLUMNS - 1]
    return _block(table, [c for c in table.columns if c in others or c == table.metric], colours, test=True)


def all_metrics(table: Table, colours: Mapping[str, int]) -> Block:
    """Return every metric that the runs have; nothing where the headline table has them all."""
    if len(table.columns) <= MOST_COLUMNS:
        return Text("")
    return _block(table, table.columns, colours, test=False)


def _block(table: Table, columns: Sequence[str], colours: Mapping[str, int], test: bool) -> TableBlock:
    if not columns:
        return TableBlock(["Method"], [])
    test = test and len(table.rows) > 1
    seeds = max(r.seeds for r in table.rows) > 1
    first, *others = columns
    at = [table.columns.index(c) for c in columns]
    head = ["Method", *(["Seeds"] if seeds else []), METRICS[first].title]
    head += [*([f"Δ {METRICS[first].title}", "p"] if test else []), *(METRICS[c].title for c in others)]
    blank = ["", ""] if test else []
    rest: list[list[str | Cell]] = []
    if table.floor:
        floor = [fixed(table.floor.get(c)) for c in columns]
        rest.append([NOTHING, *([""] if seeds else []), floor[0], *blank, *floor[1:]])
    for row in table.yardsticks:
        values = [_cell(row.cells[i]) for i in at]
        rest.append([row.label, *([str(row.seeds)] if seeds else []), values[0], *blank, *values[1:]])
    rows: list[list[str | Cell]] = []
    for row in table.rows:
        cells = [_cell(row.cells[i], "best" if table.marked(row, i) else "") for i in at]
        out: list[str | Cell] = [Cell(row.label, small=row.note), *([str(row.seeds)] if seeds else []), cells[0]]
        if test:
            delta, interval, p = difference(row)
            out += [Cell(delta, small=interval) if row.versus else "baseline", p or "–"]
        rows.append([*out, *cells[1:]])
    runs = [colours.get(row.label) for row in table.rows]
    return TableBlock(head, rows, "Headline table", runs=runs, rest=rest, look="headline")


def _cell(values: tuple[float, float], look: str = "") -> Cell:
    mean, spread = values
    return Cell(fixed(mean), small=f"± {spread:.3f}" if math.isfinite(spread) else "", look=look)


def to_markdown(tables: Sequence[Table]) -> str:
    """Return GitHub-flavoured tables, one per comparison."""

    def line(cells: Sequence[str | Cell]) -> str:
        texts = (c if isinstance(c, str) else f"{c.text} {c.small}".strip() for c in cells)
        return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

    parts = []
    for table in tables:
        block = _block(table, table.columns, {}, test=True)
        lines = [line(block.head), "|---|" + "---:|" * (len(block.head) - 1), *map(line, [*block.rows, *block.rest])]
        parts.append("\n".join([f"### {table.title}\n", *lines, f"\n{footnote(table)}\n"]))
    return "\n".join(parts)


def to_latex(tables: Sequence[Table]) -> str:
    """Return booktabs tables; in bold what is significantly better than all others of its column."""
    parts = []
    for table in tables:
        block = _block(table, table.columns, {}, test=True)
        kept = [i for i, head in enumerate(block.head) if head != "Seeds"]
        head = ["$p$" if block.head[i] == "p" else block.head[i].replace("Δ", r"$\Delta$") for i in kept]
        lines = [
            " & ".join(_tex_cell(row[i]) if i else _tex(table.rows[r].shown) for i in kept) + r" \\"
            for r, row in enumerate(block.rows)
        ]
        parts.append(
            "\\begin{table}\n  \\centering\n"
            f"  \\caption{{{_tex(table.title)}. {_tex(footnote(table))}}}\n"
            f"  \\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}\n    \\toprule\n"
            f"    {' & '.join(head)} \\\\\n    \\midrule\n"
            + "".join(f"    {line}\n" for line in lines)
            + "    \\bottomrule\n  \\end{tabular}\n\\end{table}\n"
        )
    return "% needs \\usepackage{amsmath,booktabs}\n" + "\n".join(parts)


def _tex_cell(cell: str | Cell) -> str:
    """Return a number as a formula, in bold where it is marked."""
    if isinstance(cell, str):
        return f"${cell}$" if cell[:1] in "<+-0123456789" else cell.replace("–", "--")
    text = f"{cell.text} {cell.small}".strip() if cell.small.startswith("±") else cell.text
    text = text.replace("±", r"\pm").replace("–", r"\text{--}")
    return rf"$\mathbf{{{text}}}$" if cell.look == "best" else f"${text}$"


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
    best = best_of(comparison, metric)
    if best is None:
        return "No run was scored on test samples."
    name = METRICS[metric].words
    seeds = len(best.runs)
    text = f"{best.label} reaches {name} {mean_spread(best.mean(metric), best.spread(metric))}"
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
        text += f" (95 % interval {test.low:+.3f} to {test.high:+.3f}{'' if clear else ', which includes zero'})"
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
