"""A table or figure of the paper, from what was asked for to the files that show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedtail.runs.config import changed, parse_overrides
from fedtail.study.cells import Cell, Outcome, finished
from fedtail_experiments.paper.declared import grid_names
from fedtail_experiments.paper.figures import KINDS, draw, save_figure
from fedtail_experiments.paper.grid import Grid, Place, slug, with_overrides
from fedtail_experiments.paper.records import FOLDER, recorder
from fedtail_experiments.paper.tables import GridResult, collect, to_csv, to_markdown


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A grid at one scale, over some seeds, with some settings changed."""

    grid: Grid
    scale: str
    seeds: int
    first_seed: int = 0
    tuned: bool = False
    overrides: Sequence[str] = ()
    """``section.key=value``, for the cells that have the setting."""
    device: str | None = None
    data_dir: str | None = None

    def cells(self, only: Sequence[str] = ()) -> dict[Place, Cell]:
        """The cells to run, or those of them that ``only`` names."""
        declared = self.grid.cells(self.scale, self._seeds, only, self.tuned)
        where = {"engine.device": self.device, "data.dir": self.data_dir}
        moved = {key: value for key, value in where.items() if value is not None}
        return {
            place: Cell(cell.label, changed(cell.config, moved))
            for place, cell in with_overrides(declared, parse_overrides(self.overrides))
        }

    @property
    def _seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    def recorder(self, cells: Mapping[Place, Cell], out: Path) -> Callable[[Outcome], None] | None:
        """What writes the line of each finished cell into the record; None where a stand-in replaced the data, and for
        grids of a user's own, of which no page tells."""
        if self.scale == "smoke" or self.grid.name not in grid_names():
            return None
        recipes = dict(self.grid.cells(self.scale, self._seeds))
        own = {place: recipes[place].config for place in cells}
        return recorder(out / FOLDER, self.grid.name, cells, own, parse_overrides(self.overrides))

    def collect(self, outcomes: Mapping[Place, Outcome]) -> GridResult:
        """What the runs gave; beside the paper's numbers, unless a stand-in replaced the paper's data."""
        said = f"{self.grid.title}, with {' '.join(self.overrides)}" if self.overrides else self.grid.title
        return collect(replace(self.grid, title=said), outcomes, with_paper=self.scale != "smoke")

    def write(self, outcomes: Mapping[Place, Outcome], out: Path) -> list[Path]:
        """Write table and figure, together with what earlier calls finished of the same grid."""
        earlier = {} if self.overrides else self._earlier(outcomes, out / "cells")
        folder = out / self.grid.name / "-".join([self.scale, *map(slug, self.overrides)])
        return write_result(self.collect({**outcomes, **earlier}), folder)

    def _earlier(self, outcomes: Mapping[Place, Outcome], base: Path) -> dict[Place, Outcome]:
        rest = {place: cell for place, cell in self.cells().items() if place not in outcomes}
        return {
            place: Outcome(cell, cell.folder(base), cached=True)
            for place, cell in rest.items()
            if finished(cell.folder(base))
        }


def write_result(result: GridResult, folder: Path) -> list[Path]:
    """The table as Markdown and CSV, and the figure if the grid is one."""
    folder.mkdir(parents=True, exist_ok=True)
    table, data = folder / "table.md", folder / "table.csv"
    table.write_text(to_markdown(result), encoding="utf-8")
    data.write_text(to_csv(result), encoding="utf-8")
    figures = save_figure(folder, lambda: draw(result)) if result.grid.kind in KINDS else []
    return [table, data, *figures]
