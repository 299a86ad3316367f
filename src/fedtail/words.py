"""Numbers, counts and durations as people read them: the one place where values become text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

NONE = "–"
"""A value that is not defined."""


def fixed(value: Any, digits: int = 3) -> str:
    """Return a number with a fixed number of decimals, or a dash where there is none: ``0.857``."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) and math.isfinite(value) else NONE


def number(value: float, digits: int = 3) -> str:
    """Return a number in the shortest form that tells it: ``12``, ``0.857``, ``1.2e-05``."""
    if not math.isfinite(value):
        return NONE
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value)}"
    return f"{value:.{digits}f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def mean_spread(mean: float, spread: float = math.nan, joint: str = " ± ") -> str:
    """Return ``0.857 ± 0.012``, without the spread where there is none."""
    return fixed(mean) + (f"{joint}{spread:.3f}" if math.isfinite(mean) and math.isfinite(spread) else "")


def signed(value: float, digits: int = 3) -> str:
    """Return a difference with its sign: ``+0.012``."""
    return f"{value:+.{digits}f}" if math.isfinite(value) else NONE


def percent(share: float) -> str:
    """Return a share in percent: ``52 %``, ``0.15 %``, ``less than 0.1 %``."""
    return "less than 0.1 %" if 0 < share < 0.001 else f"{100 * share:.3g} %"


def plural(count: float, one: str, many: str = "") -> str:
    """Return a count with its noun: ``1 site``, ``1,200 sites``, ``2 classes`` (``many`` where it is not one + s)."""
    whole = f"{int(count):,}" if count == int(count) else f"{count:g}"
    return f"{whole} {one if count == 1 else many or one + 's'}"


def times(count: int) -> str:
    """Return how often something happened: ``once``, ``3 times``."""
    return "once" if count == 1 else f"{count:,} times"


def duration(seconds: float) -> str:
    """Return a time span, rounded as far as a reader needs it: ``0.4 s``, ``40 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{round(seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def size(n_bytes: float) -> str:
    """Return a number of bytes: ``1.2 MB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.3g} {unit}"
    return f"{n_bytes:.0f} bytes"


def listing(items: Iterable[Any], most: int = 8) -> str:
    """Return names in a row, the first few of many: ``a, b and 3 more``."""
    names = [str(item) for item in items]
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def setting(value: Any) -> str:
    """Return a setting's value as a config file would have it."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(setting(v) for v in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def shortened(text: str, most: int) -> str:
    """Return a text of at most some length, its end replaced by an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def p_value(p: float) -> str:
    """Return a p-value: ``0.012``, ``< 0.001``; empty where there is none."""
    return "" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line per row, the first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def html_table(said: str, rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """A sentence, a table and notes for a notebook; the first row is the head."""
    head, *body = rows
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    more = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<p>{escape(said)}</p><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>{more}"
