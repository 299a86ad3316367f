"""Many runs: grids of cells, each an ordinary run in a content-addressed folder."""

from fedtail.experiments.cells import Cell, Outcome, run_cells

__all__ = ["Cell", "Outcome", "run_cells"]
