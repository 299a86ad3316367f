"""``audit.jsonl``: what a site was asked and what became of it, one line per message, for the site's own eyes."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtail.federate.protocol.faults import clean
from fedtail.federate.protocol.limits import WireError, open_json
from fedtail.federate.protocol.wire import META, size_of

FILE_BYTES, FILES = 10_000_000, 5


class Audit:
    """The log in a site's folder, of which the last files are kept; nothing without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / "audit.jsonl"

    def enter(
        self, phase: str, asked: Mapping[str, bytes], reply: Mapping[str, bytes], seconds: float, words: str = ""
    ) -> None:
        """Note one message and its answer: numbers of bytes, never what was in them. On a full disk the line goes to
        standard error, and the answer leaves all the same. words: of an error, which the reply does not have."""
        if self.path is None:
            return
        question, answer = _meta(asked), _meta(reply)
        error = answer.get("error")
        task, job = _section(question, "task"), _section(question, "job")
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "run": job.get("run") or question.get("agreement"),
            "round": task.get("round"),
            "exchange": question.get("number"),
            "phase": phase,
            "verdict": "answered" if error is None else "refused",
            **({} if error is None else {"code": str(error), "reason": clean(words or error, 1000)}),
            "bytes_in": size_of(asked),
            "bytes_out": size_of(reply),
            "seconds": round(seconds, 3),
        }
        with contextlib.suppress(OSError):  # a full disk keeps no site from answering
            self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self.path is not None
        if self.path.is_file() and self.path.stat().st_size > FILE_BYTES:
            for i in range(FILES - 1, 0, -1):
                older = self.path.with_name(f"{self.path.name}.{i}")
                if older.is_file():
                    older.replace(self.path.with_name(f"{self.path.name}.{i + 1}"))
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        try:
            with self.path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{self.path} cannot be written ({error.strerror}): {json.dumps(line)}\n")


def _meta(parts: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        return open_json(parts[META])
    except (KeyError, WireError):
        return {}


def _section(meta: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = meta.get(name)
    return found if isinstance(found, dict) else {}
