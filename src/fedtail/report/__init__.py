"""Reports from run folders: one HTML page, tables and figures for papers. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from fedtail.report.page import write_report
from fedtail.runs.record import RunRecord, load_run, load_runs


def write_run_report(folder: Path) -> Path:
    """``report.html`` of one run, in its folder."""
    return write_report([load_run(folder)], folder / "report.html", folder.name)


__all__ = ["RunRecord", "load_run", "load_runs", "write_report", "write_run_report"]
