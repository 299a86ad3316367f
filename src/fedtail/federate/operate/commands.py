"""The commands that start Flower's programs, and the environment they start in."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment
from fedtail.federate.flower import supernode

PROGRAMS = Path(sys.executable).parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1.0",
}
"""No telemetry, no update check, nothing installed at run time, and prompt starts."""


def superlink_command(deployment: Deployment) -> list[str]:
    """Return the command of Flower's server: TLS, authenticated sites, state in a database, on loopback."""
    server = deployment.server
    return [
        str(PROGRAMS / "flower-superlink"),
        "--ssl-ca-certfile", str(server / "ca.crt"),
        "--ssl-certfile", str(server / "server.crt"),
        "--ssl-keyfile", str(server / "server.key"),
        "--enable-supernode-auth",
        "--host", deployment.host,
        "--port", str(deployment.port),
        "--database", str(server / "superlink.db"),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip


def supernode_command(site: Path, superlink: str, port: int = 9094) -> list[str]:
    """Return the command of Flower's client at a site; ``port`` is on loopback, for its own processes."""
    return [
        sys.executable, "-P", str(supernode.__file__),
        "--superlink", superlink,
        "--root-certificates", str(site / "ca.crt"),
        "--auth-supernode-private-key", str(site / "site.key"),
        "--port", str(port),
        "--node-config", node_config(site / "site.toml"),
    ]  # fmt: skip


def node_config(site_file: Path) -> str:
    """Return a site's node config, by which the light app finds its file: TOML that Flower reads unescaped."""
    path = str(site_file)
    quote = next((q for q in "'\"" if q not in path), "")
    if not quote or (quote == '"' and "\\" in path):
        raise FedtailError(f"{path!r}: Flower does not accept paths with both kinds of quotes; rename the folder")
    return f"site={quote}{path}{quote}"


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment that Flower's programs start in."""
    path = os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", "/usr/bin:/bin")])
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path, "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    """Return a port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
