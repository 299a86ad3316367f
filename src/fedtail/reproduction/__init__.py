"""The paper's tables and figures from finished grids, with our numbers beside the paper's."""

from fedtail.reproduction.figures import draw
from fedtail.reproduction.tables import Entry, GridResult, collect, to_csv, to_markdown

__all__ = ["Entry", "GridResult", "collect", "draw", "to_csv", "to_markdown"]
