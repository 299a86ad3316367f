"""Trees across sites on real tables, against scikit-learn's on pooled rows with the same columns and decision step.

python benchmarks/trees.py compare --fit '[{}]' --keep FILE    defaults on the tables that judge
python benchmarks/trees.py compare --tables choose --grid '[{"rounds": 20, "lr": 0.3}, {"lr": 0.1}]'
python benchmarks/trees.py means FILE...                   the tables of what was kept
python benchmarks/trees.py speed                           CPU time against scikit-learn, same trees, leaves and bins
python benchmarks/trees.py peers --tables taxi,remote --flower PYTHON     XGBoost on Flower and NVFlare, same sites

``peers`` runs where .[nvflare] and xgboost are installed (peers/requirements-nvflare-xgboost.txt), with Flower's
environment beside it; in a network of its own its bytes are those of all processes: unshare -rn sh -c 'ip link set lo
up; ...'.

Tables are those of ``tables.py aside DIR`` (FEDTAIL_DATA=DIR). Sites are the table's own, or ten by Dirichlet(0.5).
Every contender sees the site where the table names it, and answers by the power of class shares, from -1 to 1, that has
the best macro F1 on the sites' validation splits together.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from sklearn.metrics import average_precision_score, f1_score

from choices import MORE
from fedtail.boosting import splits
from fedtail.boosting.bins import Column, columns_of, read_columns
from fedtail.boosting.grower import Site, best_round, boost
from fedtail.boosting.model import TreesModule, with_site
from fedtail.boosting.predictor import Plan
from fedtail.data import Federation, partition
from fedtail.data.sources import data_root
from fedtail.methods.trees import Trees
from fedtail.runs.build import build_federation
from fedtail.runs.config import changed, load_config
from fedtail.runs.execution import run
from fedtail.runs.saved import load_model
from fedtail.settings import Settings
from table_models import ASIDE, CHOOSE, as_table

POWERS = np.array(sorted(np.arange(-10, 11, 2) / 10, key=abs))
OPTIONS: dict[str, Any] = {"rounds": 200, "patience": 20}
CONSTANTS = {name: value for name, value in vars(splits).items() if name.isupper()}
LARGEST = ("chemistry", "degrees", "origins")
"""Tables that take too long to judge by."""
SCIKIT = (0.0, 0.5, 1.0)
"""Powers of inverse class share that scikit-learn's rows are weighted by."""


def table(name: str, seed: int) -> tuple[tuple[Column, ...], list[tuple[np.ndarray, np.ndarray]], int]:
    """Columns, and values and classes of training, validation and test rows."""
    pooled = as_table(name, seed, None)
    fed = partition(pooled, clients=10, alpha=0.5, seed=seed) if pooled.sites is None else partition(pooled)
    site = np.full(len(fed.pool), -1.0, dtype=np.float32)
    for k, (train, held) in enumerate(zip(fed.train, fed.validation, strict=True)):
        site[np.concatenate([train, held])] = k
    tested = fed.test_clients if fed.test_clients.size else np.full(len(fed.test), -1)
    x, x_test = np.c_[fed.pool.x.numpy(), site], np.c_[fed.test.x.numpy(), tested.astype(np.float32)]
    columns = columns_of(fed.preprocessing, x.shape[1] - 1, fed.n_clients)
    columns = columns if pooled.sites is not None else columns[:-1]
    values, y = read_columns(x, columns), fed.pool.y.numpy()
    splits = [(values[:, rows], y[rows]) for rows in (np.concatenate(fed.train), np.concatenate(fed.validation))]
    return columns, [*splits, (read_columns(x_test, columns), fed.test.y.numpy())], fed.n_classes


def measures(p_held: np.ndarray, held: np.ndarray, p: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Test metrics of probabilities (N, C), after the decision that validation chose."""
    from sklearn.metrics import average_precision_score, f1_score

    n = p.shape[1]
    share = np.maximum(np.bincount(held, minlength=n), 0.5) / len(held)

    def f1(p: np.ndarray, y: np.ndarray, power: float) -> float:
        return float(f1_score(y, (p * share**-power).argmax(1), average="macro", labels=np.arange(n), zero_division=0))

    chosen = float(max(POWERS, key=lambda power: round(f1(p_held, held, power), 9)))
    counts = np.bincount(y, minlength=n)
    rare = [c for c in np.argsort(counts, kind="stable")[: max(1, n // 3)] if counts[c]]
    answers = (p * share**-chosen).argmax(1)
    return {
        "macro_f1": f1(p, y, chosen),
        "tail_recall": float(np.mean([(answers[y == c] == c).mean() for c in rare])),
        "tail_pr_auc": float(np.mean([average_precision_score(y == c, p[:, c]) for c in rare])),
        "log_loss": float(-np.log(np.maximum(p[np.arange(len(y)), y], 1e-12)).mean()),
        "power": chosen,
    }


def trees(name: str, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    for constant, value in CONSTANTS.items():
        setattr(splits, constant, options.get(constant, value))
    options = {**OPTIONS, **{key: value for key, value in options.items() if not key.isupper()}}
    last = options.pop("select", "best") == "last"
    columns, (train, held, test), n_classes = table(name, seed)
    sent: list[int] = []
    began = time.process_time()
    ask = Site(train, held).answer
    rounds, patience = options.pop("rounds"), options.pop("patience")
    plan = Plan(columns, n_classes, rounds, Trees(**options), seed, patience)
    forest = boost(plan, lambda question: (sent.append(question.size), ask(question))[1])
    cpu = time.process_time() - began
    forest = forest if last else forest.first(best_round(forest))

    def p(x: np.ndarray) -> np.ndarray:
        z = forest.logits(forest.scores(forest.start.bins.of(x)))
        e = np.exp(z - z.max(1, keepdims=True))
        return np.asarray(e / e.sum(1, keepdims=True))

    found = measures(p(held[0]), held[1], p(test[0]), test[1])
    sizes = [n for n in sent if n]
    return {**found, "cpu": cpu, "rounds": forest.rounds, "exchanges": len(sizes), "mb": 8e-6 * sum(sizes)}


def scikit(name: str, seed: int, power: float) -> dict[str, Any]:
    from sklearn.ensemble import HistGradientBoostingClassifier

    columns, (train, held, test), n_classes = table(name, seed)
    share = np.maximum(np.bincount(train[1], minlength=n_classes), 0.5) / len(train[1])
    weight = share**-power / (share * share**-power).sum()
    levels = [i for i, c in enumerate(columns) if 0 < c.levels <= 255]
    model = HistGradientBoostingClassifier(categorical_features=levels or None, early_stopping=False, random_state=seed)
    began = time.process_time()
    model.fit(train[0].T, train[1], sample_weight=weight[train[1]])
    cpu = time.process_time() - began

    def p(x: np.ndarray) -> np.ndarray:
        raw = np.zeros((x.shape[1], n_classes))
        raw[:, model.classes_] = model.predict_proba(x.T)
        raw /= weight
        return np.asarray(raw / raw.sum(1, keepdims=True))

    return {**measures(p(held[0]), held[1], p(test[0]), test[1]), "cpu": cpu, "rounds": 100}


def fitted(name: str, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """``fedtail.fit`` of the table as a new table of the user's own, with defaults for what ``options`` do not say."""
    from fedtail import fit
    from fedtail.methods import METHODS

    if isinstance(method := options.get("method"), dict):
        options = {**options, "method": METHODS.build(method["name"], **method["options"])}
    pooled = as_table(name, seed, None)
    fed = partition(pooled, clients=10, alpha=0.5, seed=seed) if pooled.sites is None else partition(pooled)
    began = time.process_time()
    result = fit(replace(fed, own="table"), seed=seed, diagnostics=(), workers=1, **options)
    counts, scores = np.bincount(fed.test.y.numpy(), minlength=fed.n_classes), result.curves["test"]["pr"]
    rare = [c for c in np.argsort(counts, kind="stable")[: max(1, fed.n_classes // 3)] if counts[c]]
    areas = [np.trapezoid(p["precision"], p["recall"]) for c in rare if (p := scores.get(str(fed.classes[c])))]
    return {
        "macro_f1": result.test["macro_f1"],
        "tail_recall": float(np.mean([result.test["per_class_accuracy"][c] for c in rare])),
        "tail_pr_auc": float(np.mean(np.abs(areas))) if areas else float("nan"),
        "log_loss": float("nan"),
        "worst_site": result.test.get("worst_site"),
        "cpu": time.process_time() - began,
        "rounds": result.summary["selected_round"],
    }


MEASURED = {"scikit": scikit, "trees": trees, "fit": fitted}


def peers(names: list[str], flower: str, rounds: int) -> None:
    """Trees of fedtail and of XGBoost over the same sites: training, validation and test rows are the same, and so is
    the decision step. The peers' options are those of their own documentation."""
    print("| table | sites | contender | macro F1 | at .5 | PR-AUC | seconds | MB |\n" + "|---" * 8 + "|")
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            path = {"data.name": "table", "data.path": str(data_root() / "aside" / f"{name}.csv")}
            flags = {**path, "data.label": ASIDE[name].label, "data.site": ASIDE[name].site, "run.folder": scratch}
            told = [f"run.rounds={rounds}", "deploy.trust=blind", "method.name=trees", "method.site=false"]
            settings = load_config(None, told, flags, suggest=True)
            fed = build_federation(settings)
            assert fed.n_classes == 2, "Flower's bagging is for two classes"
            write_sites(fed, folder / "sites.npz")
            own = {"simulator": in_the_simulator, "NVFlare": over_nvflare}
            runs = {
                f"fedtail, {where}": partial(go, changed(settings, {"run.name": where})) for where, go in own.items()
            }
            for title, python in {"Flower, bagging": flower, "NVFlare, histograms": sys.executable}.items():
                script = Path(__file__).parent / "peers" / f"run_{title.split(',')[0].lower()}_xgboost.py"
                runs[title] = partial(by_script, [python, str(script), str(folder / "sites.npz"), str(rounds)], folder)
            held, test = (np.concatenate([fed.pool.y.numpy()[r] for r in fed.validation]), fed.test.y.numpy())
            for title, go in runs.items():
                before = loopback()
                p_held, p_test, seconds, sent = go()
                found = measures(p_held, held, p_test, test)
                plain = f1_score(test, p_test.argmax(1), average="macro")
                area = average_precision_score(test == (rare := np.bincount(test).argmin()), p_test[:, rare])
                mb = (loopback() - before if sent is None else sent) / 1e6
                cells = f"{found['macro_f1']:.3f} | {plain:.3f} | {area:.3f} | {seconds:.0f} | {mb:.1f}"
                print(f"| {name} | {fed.n_clients} | {title} | {cells} |", flush=True)


Judged = tuple[np.ndarray, np.ndarray, float, float | None]
"""Probabilities of validation and test rows, seconds, and bytes; None: what went over loopback meanwhile."""


def in_the_simulator(settings: Settings) -> Judged:
    began = time.perf_counter()
    folder = run(settings).folder
    assert folder is not None
    return *probabilities(folder, settings), time.perf_counter() - began, 0.0


def over_nvflare(settings: Settings) -> Judged:
    from fedtail.federate.nvflare.app import rehearse
    from fedtail.federate.operate.create import create_deployment

    n = build_federation(settings).n_clients
    settings = changed(settings, {"data.clients": n, "data.seed": settings.data_seed})
    deployment = create_deployment(
        Path(settings.run.folder) / "fed", tuple(f"site-{k + 1}" for k in range(n)), settings
    )
    began = time.perf_counter()
    folder = Path(rehearse(deployment)["folder"])
    return *probabilities(folder, settings), time.perf_counter() - began, None


def by_script(command: list[str], folder: Path) -> Judged:
    """What a peer's script finds, in its own environment."""
    done = subprocess.run([*command, str(folder / "p.npz")], capture_output=True, text=True, cwd=folder)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    found, p = json.loads(lines[-1].removeprefix("RESULT ")), np.load(folder / "p.npz")
    held, test = (np.stack([1 - p[part], p[part]], 1) for part in ("held", "test"))
    return held, test, found["seconds"], found.get("bytes")


def probabilities(folder: Path, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """A run's probabilities of validation and test rows, before its decision step."""
    fed, model = build_federation(settings), load_model(folder)
    held = np.concatenate(fed.validation)
    sites = [np.repeat(np.arange(fed.n_clients), [len(r) for r in fed.validation]), fed.test_clients]
    assert isinstance(model.module, TreesModule)
    rows, columns = (fed.pool.x[torch.from_numpy(held)], fed.test.x), model.module.shape.columns
    p_held, p_test = (model.probabilities(with_site(x, columns, s)) for x, s in zip(rows, sites, strict=True))
    return p_held, p_test


def write_sites(fed: Federation, path: Path) -> None:
    """What a peer's script reads: rows with the site as a column, classes, sites and parts (0 training, 1 validation,
    2 test), and which columns are categories."""
    parts = [np.concatenate(rows) for rows in (fed.train, fed.validation)]
    at = np.zeros(len(fed.pool), dtype=np.int64)
    for k, rows in enumerate(zip(fed.train, fed.validation, strict=True)):
        at[np.concatenate(rows)] = k
    columns = columns_of(fed.preprocessing, fed.pool.x.shape[1], fed.n_clients)
    sites = [at[parts[0]], at[parts[1]], fed.test_clients]
    raw = [fed.pool.x.numpy()[parts[0]], fed.pool.x.numpy()[parts[1]], fed.test.x.numpy()]
    values = read_columns(np.c_[np.concatenate(raw), np.concatenate(sites).astype(np.float32)], columns).T
    classes = [fed.pool.y.numpy()[parts[0]], fed.pool.y.numpy()[parts[1]], fed.test.y.numpy()]
    np.savez(
        path, x=values, y=np.concatenate(classes), site=np.concatenate(sites),
        part=np.repeat(np.arange(3), [len(y) for y in classes]),
        types=np.array(["c" if column.levels else "q" for column in columns]),
    )  # fmt: skip


def loopback() -> int:
    """Bytes that have gone over this network's loopback."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[1])


def one(job: tuple[str, int, str, Any]) -> dict[str, Any]:
    name, seed, kind, more = job
    warnings.simplefilter("ignore")
    title = f"scikit {more}" if kind == "scikit" else f"{kind} {json.dumps(more)}"
    try:
        found = MEASURED[kind](name, seed, more)
        return {"data": name, "seed": seed, "contender": title, **found}
    except Exception as error:
        return {"data": name, "seed": seed, "contender": title, "error": repr(error)}


def compare(
    names: list[str],
    seeds: list[int],
    grid: list[dict[str, Any]],
    fits: list[dict[str, Any]],
    pooled: bool,
    jobs: int,
    keep: Path,
) -> None:
    work: list[tuple[str, int, str, Any]] = []
    for name in names:
        for seed in seeds:
            work += [(name, seed, "scikit", power) for power in SCIKIT if pooled]
            work += [(name, seed, "trees", options) for options in grid]
            work += [(name, seed, "fit", options) for options in fits]
    with mp.get_context("spawn").Pool(jobs) as pool, keep.open("a") as file:
        for row in pool.imap_unordered(one, work):
            file.write(json.dumps(row) + "\n")
            file.flush()
            if "error" in row:
                print(row, flush=True)
    print(means([keep]))


def means(paths: list[Path]) -> str:
    """Macro F1 of every table, of the best pooled one as it is and of the others against it; then means over tables."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        for row in map(json.loads, path.read_text().splitlines()):
            if "error" not in row:
                found[row["data"]][row["contender"]].append(row)
    titles = sorted({t for each in found.values() for t in each})
    ours = [t for t in titles if not t.startswith("scikit")]
    lines = ["| table | best pooled | " + " | ".join(ours) + " |", "|---" * (len(ours) + 2) + "|"]
    gaps: dict[str, list[float]] = defaultdict(list)

    def mean(name: str, title: str, key: str) -> float:
        rows = found[name].get(title, [])
        return float(np.mean([r[key] for r in rows])) if rows else float("nan")

    for name in found:
        best = max(
            (mean(name, t, "macro_f1") for t in titles if t.startswith("scikit") and t in found[name]), default=np.nan
        )
        for t in ours:
            gaps[t].append(mean(name, t, "macro_f1") - best)
        lines.append(f"| {name} | {best:.3f} | " + " | ".join(f"{gaps[t][-1]:+.3f}" for t in ours) + " |")
    lines += [
        "",
        "| contender | macro F1 | against best pooled | lowest | tail recall | tail PR-AUC | log loss | CPU s |",
        "|---" * 8 + "|",
    ]
    for t in titles:
        values = [
            np.nanmean([mean(n, t, k) for n in found])
            for k in ("macro_f1", "tail_recall", "tail_pr_auc", "log_loss", "cpu")
        ]
        gap = (f"{np.nanmean(gaps[t]):+.3f}", f"{np.nanmin(gaps[t]):+.3f}") if t in gaps else ("", "")
        shown = [f"{values[0]:.4f}", *gap, *(f"{v:.3f}" for v in values[1:])]
        lines.append(f"| {t} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def speed() -> None:
    """Five shapes of generated tables; the two take turns, and the least of three times counts."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    rng = np.random.default_rng(0)
    print("| rows | columns | classes | rounds | trees: CPU s | scikit-learn: CPU s | ratio |\n" + "|---" * 7 + "|")
    for n, f, c, rounds in (
        (100_000, 30, 2, 20),
        (100_000, 50, 8, 5),
        (20_000, 20, 8, 10),
        (3_000, 40, 5, 10),
        (1_000, 10, 2, 20),
    ):
        x = rng.normal(size=(n, f)).astype(np.float32)
        y = (np.tanh(x[:, :8] @ rng.normal(size=(8, c))) * 2 + rng.gumbel(size=(n, c))).argmax(1)
        plan = Plan(tuple(Column(f"{i}", i) for i in range(f)), c, rounds, Trees(depth=6, column_share=1.0))
        values, none = read_columns(x, plan.columns), (np.zeros((f, 0), np.float32), np.zeros(0, np.int64))
        times: list[list[float]] = [[], []]
        for _ in range(3):
            began = time.process_time()
            boost(plan, Site((values, y), none).answer)
            times[0].append(time.process_time() - began)
            model = HistGradientBoostingClassifier(
                max_iter=rounds, max_depth=6, max_bins=128, l2_regularization=1.0, early_stopping=False
            )
            began = time.process_time()
            model.fit(x, y)
            times[1].append(time.process_time() - began)
        own, other = min(times[0]), min(times[1])
        print(f"| {n:,} | {f} | {c} | {rounds} | {own:.2f} | {other:.2f} | {own / other:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["compare", "means", "speed", "peers"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--tables", default="judge", help="choose, judge, or names")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--grid",
        default="[{}]",
        help="options of trees, rounds, patience, CONSTANTS of splits and select=last, as a list of JSON objects",
    )
    parser.add_argument("--fit", default="[]", help="keywords of fedtail.fit, as a list of JSON objects")
    parser.add_argument("--no-pooled", action="store_true")
    parser.add_argument("--flower", default=sys.executable, help="peers: Python with Flower's simulation and xgboost")
    parser.add_argument("--rounds", type=int, default=100, help="peers: of trees")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, default=Path("trees.jsonl"))
    given = parser.parse_args()
    if given.what == "means":
        print(means(given.files))
    elif given.what == "speed":
        speed()
    elif given.what == "peers":
        peers(given.tables.split(","), given.flower, given.rounds)
    else:
        judges = [name for name in ASIDE if name not in (*CHOOSE, *MORE, *LARGEST)]
        names = {"choose": [*CHOOSE, *MORE], "judge": judges}.get(given.tables, given.tables.split(","))
        seeds = [int(s) for s in given.seeds.split(",")]
        compare(
            names, seeds, json.loads(given.grid), json.loads(given.fit), not given.no_pooled, given.jobs, given.keep
        )


if __name__ == "__main__":
    main()
