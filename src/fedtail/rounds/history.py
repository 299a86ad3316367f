"""History on disk: one JSON object per round, small for any number of clients.

A list over all clients (``rates``, what else is ``searched``) is written when it changes; a round without it has that
of the round before. So a million clients at settled rates cost their list once, not once a round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedtail.errors import FedtailError

INFLUENCE = ("norm", "cosine", "claimed", "weight", "share", "distance")
"""What a round's record says of each client's part in the model."""
SENT = ("too-large", "malformed", "unexpected", "out-of-range", "changed", "update")
"""Codes of refusals that are for what a site sent, rather than for its silence or its policy."""
OVER_CLIENTS = ("rates", "searched")
"""Keys of a record that hold one value per registered client."""


def plain(value: Any) -> Any:
    """JSON has no NaN: undefined values become null, at any depth."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(v) for v in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


def history_line(record: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> str:
    """A round's line, given the record of the round before it."""
    kept = {k: v for k, v in record.items() if k not in OVER_CLIENTS or before is None or before.get(k) != v}
    return json.dumps(plain(kept)) + "\n"


def history_text(records: list[dict[str, Any]]) -> str:
    """The whole file."""
    return "".join(history_line(record, records[i - 1] if i else None) for i, record in enumerate(records))


def parse_history(text: str, where: str) -> list[dict[str, Any]]:
    """The records of complete rounds; a half-written last line is dropped. Rounds of equal lists share one."""
    lines = [line for line in text.splitlines() if line.strip()]
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "round" not in record:
                raise ValueError("not a record of a round")
        except ValueError as error:
            if number == len(lines):  # a run killed while it wrote its last line
                break
            raise FedtailError(
                f"{where}, line {number}: {error}; the file is damaged; restore an intact copy"
            ) from None
        before = records[-1] if records else {}
        records.append({**{k: before[k] for k in OVER_CLIENTS if k in before}, **record})
    return records


def parse_timings(text: str, where: str) -> list[float]:
    """Seconds of each round, from the lines ``round,seconds`` below a header; a half-written last line is dropped."""
    lines, out = text.splitlines()[1:], []
    for number, line in enumerate(lines, start=2):
        try:
            out.append(float(line.partition(",")[2]))
        except ValueError:
            if number <= len(lines):
                raise FedtailError(f"{where}, line {number}: {line!r} is not a round and its seconds") from None
    return out


def influence_of(history: Sequence[dict[str, Any]], n_clients: int) -> dict[str, Any]:
    """Return the means of the rounds' ``influence``, along the clients, and who of them is an outlier: flagged in half
    of its rounds, or refused for what it sent in a third of all, and in three at least. Empty where nothing was
    recorded."""
    records = [r for r in history if "influence" in r]
    if not records:
        return {}
    sums = {name: np.zeros(n_clients) for name in INFLUENCE}
    rounds, flagged, refused, bad = (np.zeros(n_clients, dtype=np.int64) for _ in range(4))
    for record in records:
        influence, there = record["influence"], record["clients"]
        rounds[there] += 1
        flagged[influence["flagged"]] += 1
        for name, total in sums.items():
            total[there] += [v or 0.0 for v in influence.get(name) or np.zeros(len(there))]
    for record in history:
        for fault in record.get("refused", []):
            refused[fault["client"]] += 1
            bad[fault["client"]] += fault.get("code") in SENT
    far = (flagged >= 3) & (2 * flagged >= rounds)
    means = {name: [float(f"{v:.4g}") for v in total / np.maximum(rounds, 1)] for name, total in sums.items()}
    return {
        "clients": list(range(n_clients)),
        "rounds": rounds.tolist(),
        **means,
        "flagged": flagged.tolist(),
        "refused": refused.tolist(),
        "outliers": np.flatnonzero(far | ((bad >= 3) & (3 * bad >= len(history)))).tolist(),
    }
