"""What finished cells gave, one line each, in a file per grid small enough to be committed: RESULTS.md has its tables
from them.

A line is a run, or a mean over runs that are not at hand any more (``seeds`` above 1, with ``spread``): figures that
were published before there were records are kept that way, with their source.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from fedtail.errors import FedtailError, writing
from fedtail.runs.config import result_keys
from fedtail.settings import Settings
from fedtail.study.cells import Cell, Outcome
from fedtail.version import VERSION
from fedtail_experiments.paper.grid import Place

FOLDER = "records"
DIGITS = 5
LEFT_OUT = ("run.seed",)
TWICE = ("micro_f1",)
"""Metrics that another one is equal to: with one class to a sample, accuracy."""

CHOSEN_BY = ("accuracy", "macro_f1", "balanced_loss")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line: where the cell stands, what its settings were, what came of it."""

    grid: str
    block: str
    column: str
    row: str
    metrics: dict[str, float]
    """On the test set."""
    seed: int | None = None
    """None for a mean over seeds."""
    seeds: int = 1
    spread: dict[str, float] = field(default_factory=dict)
    """Standard deviation of a mean's metrics over its seeds."""
    floor: dict[str, float] = field(default_factory=dict)
    """The same metrics of always answering the most frequent class."""
    validation: dict[str, float] = field(default_factory=dict)
    """By what settings may be chosen (``CHOSEN_BY``), of the final model on the validation samples of all clients."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from the grid's recipe for this place."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Those of them that were asked for on the command line: such a run is not the grid's own cell."""
    digest: str = ""
    seconds: float = math.nan
    hardware: str = ""
    commit: str = ""
    source: str = ""
    """Where a figure was taken from that no run folder stands behind."""

    @property
    def place(self) -> tuple[str, str, str, str]:
        return self.grid, self.block, self.column, self.row

    def line(self) -> str:
        """JSON without what is empty."""
        kept = {k: v for k, v in asdict(self).items() if v not in (None, "", {}) and v == v}
        if self.seeds == 1:
            del kept["seeds"]
        return json.dumps(kept, ensure_ascii=False, separators=(",", ":"))


def read_records(folder: Path) -> list[Record]:
    """All lines of all grids; none if there is no such folder."""
    known, out = {f.name for f in fields(Record)}, []
    for path in sorted(folder.glob("*.jsonl")):
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                try:
                    out.append(Record(**{k: v for k, v in json.loads(line).items() if k in known}))
                except (ValueError, TypeError, AttributeError) as error:
                    raise FedtailError(f"{path}, line {n}, is not a record: {error}") from None
    return out


def recorder(
    folder: Path,
    grid: str,
    places: Mapping[Place, Cell],
    recipes: Mapping[Place, Settings],
    overrides: Mapping[str, Any],
) -> Callable[[Outcome], None]:
    """A function that appends the line of a cell that has finished, unless it is there already."""
    there = {(r.place, r.digest) for r in read_records(folder)}
    owners: dict[str, list[Place]] = {}
    for place, cell in places.items():
        owners.setdefault(cell.digest, []).append(place)

    def note(outcome: Outcome) -> None:
        if outcome.error is not None:
            return
        for place in owners[outcome.cell.digest]:
            record = record_of(grid, place, outcome, recipes[place], overrides)
            if (record.place, record.digest) not in there:
                there.add((record.place, record.digest))
                append(folder, [record])

    return note


def append(folder: Path, records: Iterable[Record]) -> None:
    """Add each record's line at the end of its grid's file."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for record in records:
            with (folder / f"{record.grid}.jsonl").open("a", encoding="utf-8") as file:
                file.write(record.line() + "\n")


def record_of(
    grid: str, place: Place, outcome: Outcome, recipe: Settings, overrides: Mapping[str, Any] | None = None
) -> Record:
    """The line of a finished cell."""
    result = json.loads((outcome.folder / "result.json").read_text(encoding="utf-8"))
    machine = result.get("hardware", {})
    own = outcome.cell.config
    return Record(
        grid=grid,
        block=place.block,
        column=place.column,
        row=place.row,
        seed=place.seed,
        metrics=numbers(result["test"]),
        floor=numbers(result.get("floor", {})),
        validation={k: v for k, v in numbers(result.get("validation") or {}).items() if k in CHOSEN_BY},
        changed=difference(own, recipe),
        overrides=dict(overrides or {}),
        digest=outcome.cell.digest,
        seconds=round(float(result["seconds"]), 1),
        hardware=machine["gpu"] if own.engine.device != "cpu" and "gpu" in machine else machine.get("machine", ""),
        commit=commit(),
    )


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The single numbers among a run's metrics, rounded."""
    told = {k: v for k, v in metrics.items() if k not in TWICE and isinstance(v, float) and math.isfinite(v)}
    return {k: round(v, DIGITS) for k, v in told.items()}


def difference(config: Settings, recipe: Settings) -> dict[str, Any]:
    """Settings of a config that its recipe does not have, as dotted keys."""
    one, two = result_keys(config), result_keys(recipe)
    return {k: v for k, v in one.items() if k not in LEFT_OUT and two.get(k, ...) != v}


@cache
def commit() -> str:
    """The commit of the code in use, or the version where it is not a checkout."""
    here = Path(__file__).parent
    try:
        asked = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return VERSION
    return asked.stdout.strip() if asked.returncode == 0 else VERSION
