"""A run's page while the run goes on: served on loopback, and fetched again by the browser when a round is done."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedtail.errors import FedtailError
from fedtail.report.blocks import template
from fedtail.report.comparison import comparisons
from fedtail.report.page import render
from fedtail.runs.record import load_run


class Watch:
    """Serves the page of one run folder on 127.0.0.1; ``with Watch() as watch: watch.folder = ...``."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> Watch:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def state(self) -> str:
        """Return what changes whenever the page does: the rounds done."""
        rounds = 0
        if self.folder is not None:
            with contextlib.suppress(OSError), (self.folder / "history.jsonl").open("rb") as lines:
                rounds = sum(1 for _ in lines)
        return f"round {rounds}"

    def page(self) -> str:
        """Return the page as the run is now."""
        state = self.state()
        with contextlib.suppress(FedtailError):  # not a round yet, or a file that is being written
            if self.folder is not None and (run := load_run(self.folder)).history:
                run = replace(run, result=run.result or {"going_on": True})  # which is not cut short
                return render(comparisons([run]), self.folder.name, live=state)
        return template("waiting.html", live=state)


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, watch: Watch, *args: Any) -> None:
        self._watch = watch
        super().__init__(*args)

    def do_GET(self) -> None:
        # a page elsewhere that has its name resolve to this machine is not answered
        if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
            self.send_error(403)
            return
        if self.path not in ("/", "/state"):
            self.send_error(404)
            return
        body = (self._watch.page() if self.path == "/" else self._watch.state()).encode()
        self.send_response(200)
        self.send_header("Content-Type", f"text/{'html' if self.path == '/' else 'plain'}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Say nothing: the terminal is the run's."""
