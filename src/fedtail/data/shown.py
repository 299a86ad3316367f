"""Small tables of what a variable holds: as text, and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line per row, the first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def html_table(said: str, rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """The same for a notebook; the first row is the head."""
    head, *body = rows
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    more = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<p>{escape(said)}</p><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>{more}"
