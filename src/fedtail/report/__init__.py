"""Reports from run folders: one HTML page, a model card, tables and figures for papers. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from fedtail.report.page import write_card, write_report
from fedtail.runs.record import RunRecord, load_run, load_runs


def write_run_report(folder: Path) -> Path:
    """Write ``report.html`` and ``model-card.md`` of one run into its folder; return the page."""
    run = load_run(folder)
    write_card(run)
    return write_report([run], folder / "report.html", folder.name)


__all__ = ["RunRecord", "load_run", "load_runs", "write_card", "write_report", "write_run_report"]
