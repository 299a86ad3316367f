"""Flower's HTTP servers without the middlewares that have nothing to do with a request.

In flwr 1.41 a request to the SuperLink passes nine of starlette's ``BaseHTTPMiddleware``, each of which starts a task
and copies the answer through a stream; a message makes some sixteen requests. Six of the nine look at the path, or at a
plugin that is not there, and hand the request on. Here it passes them by.
Imported by scripts that must start quickly: the standard library and Flower only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

Scope = dict[str, Any]
MESSAGES = ("/v1/fleet/", "/v1/runtime/")
"""The APIs of sites and apps; of what is under ``/v1/control/``, nothing is passed by."""


def pass_by(middleware: Any, idle: Callable[[Scope], bool]) -> None:
    """Hand a request on at once where ``idle`` says that the middleware would do nothing else with it.

    ``idle`` goes by ``scope["path"]``, by which the handler is chosen too.
    """
    whole = middleware.__call__

    async def call(self: Any, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and idle(scope):
            await self.app(scope, receive, send)
        else:
            await whole(self, scope, receive, send)

    middleware.__call__ = call


def is_for_messages(scope: Scope) -> bool:
    return bool(scope["path"].startswith(MESSAGES))


def is_for_apps(scope: Scope) -> bool:
    return bool(scope["path"].startswith("/v1/runtime/"))


def is_not_logged(scope: Scope) -> bool:
    """Whether no plugin logs what sites ask for."""
    return is_for_messages(scope) and getattr(scope["app"].state, "fleet_event_log_plugin", None) is None


def is_not_traced(scope: Scope) -> bool:
    return is_for_messages(scope) and os.getenv("FLWR_TRACING_ENABLED") != "1"


def lighten_supernode() -> None:
    """For the SuperNode's API, which its own processes use."""
    from flwr.supercore.routers.runtime.tracing import RuntimeTracingMiddleware

    pass_by(RuntimeTracingMiddleware, is_not_traced)


def lighten_superlink() -> None:
    """For the SuperLink's, which has those of the SuperNode too."""
    from flwr.superlink.routers.control import middlewares as control
    from flwr.superlink.routers.fleet.middlewares import FleetEventLogMiddleware
    from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware

    lighten_supernode()
    for middleware in (
        control.ControlSensitiveResponseMiddleware,
        control.ControlAuthenticationMiddleware,
        control.ControlLicenseMiddleware,
        control.ControlEventLogMiddleware,
    ):
        pass_by(middleware, is_for_messages)
    pass_by(NodeAuthMiddleware, is_for_apps)
    pass_by(FleetEventLogMiddleware, is_not_logged)
