"""One method through the suite: a race for its settings on each set, then every seed, then a submission folder."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedtail.core.random import generator
from fedtail.errors import FedtailError, writing
from fedtail.files import write_atomically
from fedtail.methods import METHODS
from fedtail.registry import is_own
from fedtail.rounds.history import plain
from fedtail.runs.config import check_config
from fedtail.study.cells import Cell, Outcome
from fedtail_experiments.bench.suite import Set, Suite, measured
from fedtail_experiments.paper.grid import layered, slug
from fedtail_experiments.paper.search import Trial, race_trials, search_space

Run = Callable[[str, Sequence[Cell]], list[Outcome]]
"""(What for, cells) -> what became of them."""
FILE = "submission.json"
CLOSE = 0.02
"""How far macro F1 may be off on another machine, whose sums round differently."""


@dataclass(frozen=True)
class Row:
    """One finished run: a set and a seed."""

    set: str
    seed: int
    digest: str
    """Of the model's weights."""
    values: dict[str, float]
    """By ``suite.MEASURES``."""


@dataclass
class Submission:
    """What a method did on the suite: all that ``submission.json`` holds."""

    method: str
    title: str
    version: int
    """Of the suite."""
    source: str = ""
    """File of the method beside the submission, where it is the user's own."""
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per set: the settings that its race found."""
    trials: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    hardware: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per set: the machine that it ran on."""

    @property
    def sets(self) -> set[str]:
        """The sets that it has been run on."""
        return {row.set for row in self.rows}

    def values(self, measure: str) -> dict[tuple[str, int], float]:
        """(set, seed) -> what was measured."""
        return {(row.set, row.seed): row.values[measure] for row in self.rows}


def bench_method(
    suite: Suite, method: str, sets: Sequence[Set], seeds: int, out: Path, run: Run, device: str | None = None
) -> Submission:
    """Tune and run one method, and write its submission folder under ``out``, anew after every set."""
    built = METHODS.build(method)
    folder = out / "submissions" / slug(built.name if not is_own(method) else method.rpartition(":")[2])
    done = Submission(method=method, title=built.title, version=suite.version)
    file = Path(method.rpartition(":")[0]) if is_own(method) else Path()
    if file.suffix == ".py":
        done.source = file.name
    if (folder / FILE).is_file() and identity(before := read_submission(folder)) != identity(done):
        raise FedtailError(
            f"{folder} holds what {before.method!r} did, and {method!r} would take its place; give the class another "
            "name, or --out another folder"
        )
    take_over(done, folder, file)
    for one in suite.taken(sets, method):
        base = {**suite.settings(one, method), **({"engine.device": device} if device else {})}
        found = tune(suite, one, base, method, run)
        best = max((t for t in found if t.rounds == found[-1].rounds), key=lambda t: t.score)
        if not math.isfinite(best.score):
            raise FedtailError(f"{built.title} failed in every trial on {one.name}; try: {shown(one, method)}")
        cells = [final_cell(base, one, method, best.settings, seed) for seed in range(seeds)]
        outcomes = run(f"{built.title} on {one.name}", cells)
        for outcome in outcomes:
            if outcome.error is not None:
                raise FedtailError(f"{outcome.cell.label} failed: {outcome.error}")
        done.chosen[one.name] = best.settings
        done.trials[one.name] = [asdict(t) for t in found]
        done.rows = [row for row in done.rows if row.set != one.name] + [row_of(one, outcome) for outcome in outcomes]
        last = outcomes[-1].folder / "result.json"
        done.hardware[one.name] = json.loads(last.read_text(encoding="utf-8")).get("hardware", {})
        write_submission(folder, done, file)
    return done


def identity(done: Submission) -> tuple[str, str]:
    """What tells methods apart: the name, of the user's own that of the class, and of their file."""
    return done.method.rpartition(":")[2], done.source or done.method.rpartition(":")[0]


def take_over(done: Submission, folder: Path, file: Path) -> bool:
    """Add what the submission in ``folder`` says of sets that ``done`` has not: the suite may be run set by set.

    ``file``: the method's own. False, and nothing, if that one is of another version of suite or file."""
    if not (folder / FILE).is_file():
        return True
    before = read_submission(folder)
    changed = before.source == done.source != "" and file.read_bytes() != (folder / before.source).read_bytes()
    if before.version != done.version or identity(before) != identity(done) or changed:
        return False
    there = set(done.chosen)
    for name in ("chosen", "trials", "hardware"):
        setattr(done, name, {**getattr(before, name), **getattr(done, name)})
    done.rows = [row for row in before.rows if row.set not in there] + done.rows
    return True


def gather(folders: Sequence[Path], out: Path) -> list[Submission]:
    """Join submissions that were run in other folders, on other machines say, with those in ``out``, set by set."""
    gathered = []
    for path in [p for folder in folders for p in sorted((folder / "submissions").glob(f"*/{FILE}"))]:
        done, into = read_submission(path), out / "submissions" / path.parent.name
        if not take_over(done, into, path.parent / done.source):
            raise FedtailError(
                f"{path.parent} and {into} are of two versions of the suite or of the method; give --out another folder"
            )
        write_submission(into, done, path.parent / done.source)
        gathered.append(done)
    if not gathered:
        raise FedtailError(f"no submissions in {', '.join(map(str, folders))}; name folders that `fedtail bench` wrote")
    return gathered


def tune(suite: Suite, one: Set, base: Mapping[str, Any], method: str, run: Run) -> list[Trial]:
    """The race for a method's settings on one set."""
    name = f"bench-{one.name}"
    field = trials_of(suite, one, method)
    return race_trials(name, base, method, field, suite.tuning_seeds, lambda cells: run(f"tune {one.name}", cells))


def trials_of(suite: Suite, one: Set, method: str) -> list[dict[str, Any]]:
    """The suite's share of a method's grid, drawn without repetition.

    Draws go through what all methods share in the same order, whole rounds of it before a value comes again, so that
    a method with settings of its own tries no other learning rates."""
    mine: list[dict[str, Any]] = [{}]
    if method in suite.apart:
        common = points(suite.apart[method].grid)
    else:
        common, mine = points(suite.grid), points(suite.own.get(method) or search_space(method).own)
    generator(0, f"bench/{one.name}").shuffle(common)
    n = math.ceil(suite.share * len(common) * len(mine))
    rng = generator(0, f"bench/{one.name}/{method.rpartition(':')[2]}")
    orders = [rng.permutation(len(mine)) for _ in common]  # each shared point meets each of the own ones once
    at = [divmod(i, len(common)) for i in range(n)]
    return [{**common[place], **mine[int(orders[place][time])]} for time, place in at]


def points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of a grid's values."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def final_cell(base: Mapping[str, Any], one: Set, method: str, chosen: Mapping[str, Any], seed: int) -> Cell:
    """A run that counts."""
    config = check_config(layered([base, {"method.name": method}, chosen, {"run.seed": seed}]))
    return Cell(slug(f"bench-{one.name}-{METHODS[method].__name__.lower()}-s{seed}"), config)


def row_of(one: Set, outcome: Outcome) -> Row:
    """What counts of a finished run."""
    result = json.loads((outcome.folder / "result.json").read_text(encoding="utf-8"))
    about = json.loads((outcome.folder / "clients.json").read_text(encoding="utf-8"))
    weights = (outcome.folder / "model.safetensors").read_bytes()
    values = measured(result, about["train_counts"], len(weights))
    if outcome.cell.config.method.name not in [*METHODS] and not is_own(outcome.cell.config.method.name):
        values["megabytes"] = math.nan  # trees send sums, no models
    digest = hashlib.sha256(weights).hexdigest()[:16]
    return Row(set=one.name, seed=int(result["seed"]), digest=digest, values=values)


def shown(one: Set, method: str) -> str:
    """A command that shows what goes wrong."""
    return f"fedtail run --dataset {one.settings['data.name']} --method {method}"


def write_submission(folder: Path, done: Submission, file: Path) -> None:
    """``file``: the method's own, which goes beside what it did."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if done.source and file != folder / done.source:
            shutil.copyfile(file, folder / done.source)
        write_atomically(folder / FILE, json.dumps(plain(asdict(done)), indent=1))


def read_submission(folder: Path) -> Submission:
    """A submission from its folder; one line for what is not one."""
    path = folder if folder.name == FILE else folder / FILE
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row(**{**row, "values": {k: nan(v) for k, v in row["values"].items()}}) for row in told.pop("rows")]
        return Submission(**told, rows=rows)
    except FileNotFoundError:
        raise FedtailError(f"{folder} is not a submission: it has no {FILE}; `fedtail bench` writes one") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FedtailError(f"{path} is not a submission: {type(error).__name__} {error}") from None


def nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


@dataclass(frozen=True)
class Checked:
    """One row computed anew."""

    row: Row
    again: Row

    @property
    def verdict(self) -> str:
        """``same bits``, ``agrees`` (another machine rounds otherwise) or ``differs``."""
        if self.row.digest == self.again.digest:
            return "same bits" if self._off() < 1e-9 else "differs"
        return "agrees" if self._off() <= CLOSE else "differs"

    def _off(self) -> float:
        return abs(self.row.values["macro_f1"] - self.again.values["macro_f1"])


def verify(suite: Suite, folder: Path, run: Run, sample: int | None = None, device: str | None = None) -> list[Checked]:
    """Compute a submission's rows anew, all or the first ``sample`` of each set, with the settings it says it found,
    which must be of those that the suite has every method try."""
    given = read_submission(folder)
    if given.version != suite.version:
        raise FedtailError(
            f"{folder} was made with version {given.version} of the suite, but this is version {suite.version}"
        )
    method = given.method
    if given.source:
        method = f"{folder / given.source}:{given.method.rpartition(':')[2]}"
    known, checked = {s.name: s for s in suite.sets}, []
    for name, chosen in given.chosen.items():
        if name not in known:
            raise FedtailError(f"{folder}: the suite has no data set {name!r}")
        one, rows = known[name], [row for row in given.rows if row.set == name][:sample]
        if chosen not in trials_of(suite, one, method):
            raise FedtailError(f"{folder}: what it says of {name} is no point of the method's grid: {chosen}")
        base = {**suite.settings(one, method), **({"engine.device": device} if device else {})}
        cells = [final_cell(base, one, method, chosen, row.seed) for row in rows]
        for row, outcome in zip(rows, run(f"verify {name}", cells), strict=True):
            if outcome.error is not None:
                raise FedtailError(f"{outcome.cell.label} failed: {outcome.error}")
            checked.append(Checked(row, row_of(one, outcome)))
    return checked
