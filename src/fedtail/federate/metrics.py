"""How a run goes, for Prometheus: ``http://127.0.0.1:<deploy.metrics_port>/metrics`` while the run goes on."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fedtail.errors import FedtailError
from fedtail.rounds.state import State


class Metrics:
    """Numbers of one run, since its process began. ``seen``: client -> when it last answered, kept up by the engine."""

    def __init__(self, run: str, sites: Sequence[str], rounds: int, seen: Mapping[int, float]) -> None:
        self.run, self.sites, self.rounds, self.seen = run, list(sites), rounds, seen
        self.began = time.time()
        self.last: dict[str, Any] = {}
        self.done, self.seconds, self.total_seconds = 0, 0.0, 0.0
        self.refused: Counter[int] = Counter()
        self.bytes: Counter[str] = Counter()

    def round(self, state: State, record: dict[str, Any], seconds: float) -> None:
        """Called after every round."""
        self.last, self.done, self.seconds = record, state.round, seconds
        self.total_seconds += seconds
        self.refused.update(fault["client"] for fault in [*record["refused"], *record.get("faults", [])])
        self.bytes.update({way: record.get("traffic", {}).get(way, 0) for way in ("down", "up")})

    def text(self) -> str:
        """Prometheus' exposition format."""
        lines: list[str] = []

        def say(name: str, kind: str, meaning: str, values: Mapping[str, float]) -> None:
            lines.append(f"# HELP fedtail_{name} {meaning}\n# TYPE fedtail_{name} {kind}")
            lines.extend(
                f"fedtail_{name}{{{_labels(labels, self.run)}}} {value:.17g}" for labels, value in values.items()
            )

        def by_site(values: Mapping[int, float]) -> dict[str, float]:
            return {f'site="{_escaped(self.sites[k])}"': v for k, v in sorted(values.items())}

        say("rounds_done", "gauge", "Completed rounds.", {"": self.done})
        say("rounds_planned", "gauge", "Total rounds of the run.", {"": self.rounds})
        say("round_seconds", "gauge", "Duration of the last round in seconds.", {"": self.seconds})
        say(
            "seconds_total",
            "counter",
            "Total duration of the rounds run by this process, in seconds.",
            {"": self.total_seconds},
        )
        say(
            "bytes_total",
            "counter",
            "Bytes sent to (down) and received from (up) the sites.",
            {f'direction="{way}"': self.bytes[way] for way in ("down", "up")},
        )
        say(
            "refusals_total",
            "counter",
            "Messages to a site without a usable reply.",
            by_site({k: self.refused[k] for k in range(len(self.sites))}),
        )
        say("site_last_seen_timestamp_seconds", "gauge", "When a site last answered.", by_site(dict(self.seen)))
        if self.last:
            present = set(self.last["clients"])
            say(
                "site_in_last_round",
                "gauge",
                "Whether a site's update was in the last round.",
                by_site({k: float(k in present) for k in range(len(self.sites))}),
            )
            say("train_loss", "gauge", "Mean training loss of the last round.", {"": self.last["train_loss"]})
        if "privacy" in self.last:
            say("epsilon", "gauge", "Privacy spent so far.", {"": self.last["privacy"]["epsilon"]})
        say("start_timestamp_seconds", "gauge", "When this process started.", {"": self.began})
        return "\n".join(lines) + "\n"


@contextmanager
def served(metrics: Metrics, port: int, host: str = "127.0.0.1") -> Iterator[None]:
    """Serve the metrics from a thread; port 0 serves nothing."""
    if not port:
        yield
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, known = metrics.text().encode(), self.path.partition("?")[0] in ("/", "/metrics")
            self.send_response(200 if known else 404)
            self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("content-length", str(len(body) if known else 0))
            self.end_headers()
            if known:
                self.wfile.write(body)

        def log_message(self, format: str, *values: Any) -> None:
            """Not a line per scrape."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise FedtailError(f"deploy.metrics_port = {port}: {error.strerror or error}; choose another port") from None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _labels(own: str, run: str) -> str:
    return ",".join(filter(None, [f'run="{_escaped(run)}"', own]))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
