"""Reports from run folders: one HTML page, tables and figures for papers. Needs no torch."""

from __future__ import annotations

from fedtail.report.page import write_report
from fedtail.runs.record import RunRecord, load_run, load_runs

__all__ = ["RunRecord", "load_run", "load_runs", "write_report"]
