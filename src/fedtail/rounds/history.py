"""History on disk: one JSON object per round, small for any number of clients.

A list over all clients (``rates``, what else is ``searched``) is written when it changes; a round without it has that
of the round before. So a million clients at settled rates cost their list once, not once a round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedtail.errors import FedtailError

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
            raise FedtailError(f"{where}, line {number}: {error}; the file is damaged, put a whole one back") from None
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
