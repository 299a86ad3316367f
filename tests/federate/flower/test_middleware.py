"""A SuperLink whose requests pass idle middlewares by answers as it would with all of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from flwr.superlink import main as superlink
from flwr.superlink.routers.control import middlewares as control
from starlette.middleware.base import BaseHTTPMiddleware

from fedtail.federate.flower import middleware


@pytest.fixture
def lightened() -> Iterator[None]:
    middleware.lighten_superlink()
    yield
    for kind in BaseHTTPMiddleware.__subclasses__():
        if "__call__" in vars(kind):
            del kind.__call__


def ask(app: Any, path: str, **headers: str) -> tuple[int, bytes]:
    """Status and body of one request without a body."""
    said: list[dict[str, Any]] = []

    async def talk() -> None:
        questions = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> dict[str, Any]:
            found = next(questions, None)
            return found if found is not None else await asyncio.sleep(60, {"type": "http.disconnect"})

        async def send(message: dict[str, Any]) -> None:
            said.append(message)

        given = [(b"content-type", b"application/protobuf"), *((k.encode(), v.encode()) for k, v in headers.items())]
        await app(
            {
                "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
                "query_string": b"", "root_path": "", "scheme": "https", "headers": given, "state": {},
                "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
            },
            receive,
            send,
        )  # fmt: skip

    asyncio.run(talk())
    body = b"".join(m.get("body", b"") for m in said[1:])
    return said[0]["status"], re.sub(rb"\d{4}-\d\d-\d\dT[\d:.+]+", b"now", body)


PATHS = ("/v1/runtime/acquire-task", "/v1/runtime/push-messages", "/v1/fleet/pull-messages", "/v1/fleet/nothing",
         "/v1/control/list-nodes", "/v1/control/list-runs", "/health", "/nowhere")  # fmt: skip


def test_answers_are_those_of_the_whole_superlink(lightened: None, monkeypatch: pytest.MonkeyPatch) -> None:
    light = superlink.create_app()
    found = {path: ask(light, path) for path in PATHS}
    entered: list[str] = []
    whole = control.ControlAuthenticationMiddleware.dispatch

    async def dispatch(self: Any, request: Any, call_next: Any) -> Any:
        entered.append(request.url.path)
        return await whole(self, request, call_next)

    monkeypatch.setattr(control.ControlAuthenticationMiddleware, "dispatch", dispatch)
    for path in PATHS:
        ask(superlink.create_app(), path)
    assert entered == [p for p in PATHS if not p.startswith(middleware.MESSAGES)], "what is not passed by"
    for kind in BaseHTTPMiddleware.__subclasses__():
        if "__call__" in vars(kind):
            del kind.__call__
    assert found == {path: ask(superlink.create_app(), path) for path in PATHS}
    assert found["/v1/fleet/pull-messages"][0] == 401, "a stranger is refused all the same"
