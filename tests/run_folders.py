"""Run folders with made-up but well-formed numbers: a report is made from folders, so it is tested on folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from fedtail.core.decisions import Decision
from fedtail.core.metrics import majority_floor, summarize
from fedtail.core.scores import Scores
from fedtail.methods import METHODS
from fedtail.rates import RATES
from fedtail.rounds.history import plain
from fedtail.runs.split_scores import reliable, thinned, tradeoff_of

Writer = Callable[..., Path]


def write_run(
    folder: Path,
    *,
    method: str = "fedavg",
    seed: int = 0,
    level: float = 0.8,
    n_rounds: int = 12,
    asked: int | None = None,
    n_clients: int = 4,
    n_classes: int = 6,
    rates: str = "uniform",
    refused: dict[int, str] | None = None,
    label_map: bool = True,
    confusion: bool = True,
    background: int | None = None,
    scored: bool = False,
    outlier: int | None = None,
    more: dict[str, dict[str, Any]] | None = None,
) -> Path:
    """Write a run whose accuracy climbs to about ``level`` and is lower for rarer classes.

    ``scored``: with what probabilities tell, sites and a decision; ``outlier``: a client that pulls away from the rest.
    """
    rng = np.random.default_rng([seed, len(method)])
    counts = (200 * 0.6 ** np.arange(n_classes)).astype(int)
    held = np.full(n_classes, 40)
    history = []
    table = np.zeros((n_classes, n_classes), dtype=int)
    for t in range(n_rounds):
        share = level * (t + 1) / n_rounds * np.linspace(1.1, 0.7, n_classes) + rng.normal(0, 0.01, n_classes)
        hits = np.clip(np.rint(share * held), 0, held).astype(int)
        table = np.diag(hits)
        table[np.arange(n_classes), np.arange(n_classes) - 1] += held - hits
        moving = rates != "uniform" and t < n_rounds // 2
        history.append(
            {
                "round": t,
                "lr": 0.1,
                "clients": list(range(n_clients)),
                "train_loss": 2.0 / (t + 1) + rng.random() * 0.01,
                "rates": [0.4 + 0.05 * k + (0.2 / 2**t if rates != "uniform" else 0) for k in range(n_clients)],
                "searching": moving,
                "refused": [{"client": 1, "reason": refused[t]}] if refused and t in refused else [],
                **({"race": [{"lr": 0.3, "reward": 0.4}, {"lr": 0.1, "reward": 0.5}]} if t == 0 else {}),
                **({"search": {"nodes": 1 + 32 * t, "depth": min(t, 5)}} if rates != "uniform" else {}),
                "alignment": 0.5 + 0.01 * t,
                **({"influence": _influence(n_clients, outlier)} if outlier is not None else {}),
                **({"sites": _spread(n_clients, t / n_rounds)} if scored else {}),
                "test": summarize(table, counts, background),
                "validation": summarize(table, counts, background),
            }
        )
    config: dict[str, Any] = {
        "data": {"name": "blobs", "clients": n_clients, "partition": "dirichlet", "alpha": 0.5, "seed": 0},
        "model": {"name": "mlp"},
        "method": {"name": method},
        "rates": {"name": rates, **({"rate": 0.6} if rates == "uniform" else {})},
        "local": {"epochs": 1, "lr": 0.1},
        "engine": {"name": "simulator"},
        "run": {"name": folder.name, "rounds": asked or n_rounds, "seed": seed},
    }
    for section, values in (more or {}).items():
        config[section] |= values
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    (folder / "history.jsonl").write_text("".join(json.dumps(r) + "\n" for r in history))
    (folder / "timings.csv").write_text("round,seconds\n" + "".join(f"{t},0.25\n" for t in range(n_rounds)))
    per_client = rng.multinomial(1, [1 / n_clients] * n_clients, size=int(counts.sum()))
    owner = per_client.argmax(1)
    y = np.repeat(np.arange(n_classes), counts)
    lm = np.array([np.bincount(y[owner == k], minlength=n_classes) for k in range(n_clients)])
    clients = {
        "sites": [f"site {k}" for k in range(n_clients)],
        "sizes": lm.sum(1).tolist(),
        "classes": [f"class {c}" for c in range(n_classes)],
        "label_map": lm.tolist() if label_map else None,
        "train_counts": counts.tolist() if label_map else None,
    }
    (folder / "clients.json").write_text(json.dumps(clients))
    if asked is None:
        test = summarize(table, counts, background) | ({"confusion": table.tolist()} if confusion else {})
        known = method in METHODS
        titles = {"method": METHODS[method].title if known else method, "rates": RATES[rates].title}
        result = {
            "titles": titles,
            "test": test,
            "floor": majority_floor(held, 0),
            "hardware": {"cpus": 2},
            "seconds": 0.25 * n_rounds,
            **(_told(clients, counts, level, seed) if scored else {}),
        }
        if scored:
            result["test"] = result["test"] | result["told"]
        (folder / "result.json").write_text(json.dumps(plain(result)))
    return folder


def _influence(n_clients: int, outlier: int) -> dict[str, Any]:
    away = [1.0 + 5.0 * (k == outlier) for k in range(n_clients)]
    return {
        "norm": away,
        "cosine": [0.4 - 0.9 * (k == outlier) for k in range(n_clients)],
        "weight": [1 / n_clients] * n_clients,
        "claimed": [1 / n_clients] * n_clients,
        "share": [v / sum(away) for v in away],
        "distance": away,
        "flagged": [outlier],
    }


def _spread(n_clients: int, mean: float) -> dict[str, Any]:
    return {"metric": "macro_f1", "client": 1, "worst": mean / 2, "mean": mean, "spread": 0.1, "n": n_clients}


def _told(clients: dict[str, Any], counts: np.ndarray, level: float, seed: int) -> dict[str, Any]:
    """What ``result.json`` says of probabilities: drawn here, counted as runs count them."""
    rng, names, n = np.random.default_rng(seed), clients["classes"], len(counts)

    def drawn(size: int, sure: float) -> Scores:
        y = rng.choice(n, size, p=counts / counts.sum())
        z = rng.normal(size=(size, n)) + 3 * level * np.eye(n)[y]
        p = np.exp(sure * z)
        return Scores.of(p / p.sum(1, keepdims=True), y)

    before, after = drawn(600, 3.0), drawn(600, 1.3)
    rare = int(np.flatnonzero(after.bins[:, 1].any(-1))[-1])
    sites = []
    for k, site in enumerate(clients["sites"]):
        found = {name: drawn(12 + 20 * k, sure) for name, sure in (("argmax", 3.0), ("decided", 1.3))}
        plain, decided = (summarize(s.confusion, counts, None, s) for s in found.values())
        sites.append({"site": site, "validation": decided, "before": {"validation": plain}})
    scores = {k: v for k, v in summarize(after.confusion, counts, None, after).items() if "auc" in k or k in SCORES}
    return {
        "told": scores,
        "before": summarize(before.confusion, counts, None, before),
        "decision": {"temperature": 2.3, "find": names[-1], "threshold": 0.05},
        "sites": sites,
        "curves": {
            "test": {
                "pr": {name: thinned(after.bins[c]) for c, name in enumerate(names) if after.bins[c, 1].any()},
                "reliability": reliable(after),
                "reliability_before": reliable(before),
            }
        },
        "tradeoff": tradeoff_of(after, Decision().with_threshold(rare, 0.05, n), names),
    }


SCORES = ("log_loss", "brier", "calibration_error", "per_class_precision", "per_class_support")


@pytest.fixture
def run_folder(tmp_path: Path) -> Writer:
    """``run_folder("name", method=..., seed=...)`` writes a run and returns its folder."""
    return lambda name, **options: write_run(tmp_path / name, **options)


@pytest.fixture
def comparison(run_folder: Writer) -> list[Path]:
    """FedAvg and FedCGNM + FedHOO, three seeds each."""
    return [
        run_folder(f"{method}-{seed}", method=method, rates=rates, seed=seed, level=level)
        for method, rates, level in (("fedavg", "uniform", 0.7), ("fedcgnm", "fedhoo", 0.85))
        for seed in range(3)
    ]
