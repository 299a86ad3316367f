"""How a run goes, for Prometheus: ``http://127.0.0.1:<deploy.metrics_port>/metrics`` while the run goes on."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        """Count a round; called after every one."""
        self.last, self.done, self.seconds = record, state.round, seconds
        self.total_seconds += seconds
        self.refused.update(fault["client"] for fault in [*record["refused"], *record.get("faults", [])])
        self.bytes.update({way: record.get("traffic", {}).get(way, 0) for way in ("down", "up")})

    def collect(self) -> Iterator[Any]:
        """Prometheus' metrics, whenever it asks."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def family(kind: Any, name: str, meaning: str, values: Mapping[str, float], label: str = "") -> Any:
            found = kind(f"fedtail_{name}", meaning, labels=["run", *([label] if label else [])])
            for of, value in values.items():
                found.add_metric([self.run, *([of] if label else [])], value)
            return found

        gauges: dict[str, tuple[str, float]] = {
            "rounds_done": ("Completed rounds.", self.done),
            "rounds_planned": ("Total rounds of the run.", self.rounds),
            "round_seconds": ("Duration of the last round in seconds.", self.seconds),
            "start_timestamp_seconds": ("When this process started.", self.began),
        }
        if self.last:
            gauges["train_loss"] = ("Mean training loss of the last round.", self.last["train_loss"])
        if "privacy" in self.last:
            gauges["epsilon"] = ("Privacy spent so far.", self.last["privacy"]["epsilon"])
        for name, (meaning, value) in gauges.items():
            yield family(GaugeMetricFamily, name, meaning, {"": value})
        meaning = "Total duration of the rounds run by this process, in seconds."
        yield family(CounterMetricFamily, "seconds", meaning, {"": self.total_seconds})
        meaning, ways = "Bytes sent to (down) and received from (up) the sites.", ("down", "up")
        yield family(CounterMetricFamily, "bytes", meaning, {w: self.bytes[w] for w in ways}, "direction")
        refusals = {site: self.refused[k] for k, site in enumerate(self.sites)}
        yield family(CounterMetricFamily, "refusals", "Messages to a site without a usable reply.", refusals, "site")
        seen = {self.sites[k]: when for k, when in sorted(self.seen.items())}
        yield family(GaugeMetricFamily, "site_last_seen_timestamp_seconds", "When a site last answered.", seen, "site")
        if self.last:
            present = {site: float(k in self.last["clients"]) for k, site in enumerate(self.sites)}
            meaning = "Whether a site's update was in the last round."
            yield family(GaugeMetricFamily, "site_in_last_round", meaning, present, "site")


@contextmanager
def served(metrics: Metrics, port: int, host: str = "127.0.0.1") -> Iterator[None]:
    """Serve the metrics from a thread; port 0 serves nothing."""
    if not port:
        yield
        return
    if importlib.util.find_spec("prometheus_client") is None:
        raise FedtailError(f"deploy.metrics_port = {port} needs prometheus_client; pip install 'fedtail[metrics]'")
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    collector: Any = metrics  # all that a collector needs
    registry.register(collector)
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise FedtailError(f"deploy.metrics_port = {port}: {error.strerror or error}; choose another port") from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
