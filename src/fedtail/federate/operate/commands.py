"""The commands that start Flower's programs; the same for a rehearsal and for systemd."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment
from fedtail.federate.flower import superlink, supernode

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1.0",
}
"""No telemetry, no update check, nothing installed at run time, and prompt starts."""


def superlink_command(python: str | Path, deployment: Deployment) -> list[str]:
    """Flower's server: TLS, authenticated sites, state in a database, on loopback."""
    server = deployment.server
    return [
        str(python), "-P", str(superlink.__file__),
        "--ssl-ca-certfile", str(server / "ca.crt"),
        "--ssl-certfile", str(server / "server.crt"),
        "--ssl-keyfile", str(server / "server.key"),
        "--enable-supernode-auth",
        "--host", deployment.host,
        "--port", str(deployment.port),
        "--database", str(server / "superlink.db"),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip


def serve_command(programs: str | Path, deployment: Deployment) -> list[str]:
    """The same as a unit or a container starts it."""
    return [str(Path(programs) / "fedtail"), "deploy", "serve", str(deployment.folder)]


def site_service_command(python: str | Path, site: Path, address: str) -> list[str]:
    """A site's service in a rehearsal."""
    return [str(python), "-m", "fedtail", "site", "run", str(site), "--server", address]


def supernode_command(python: str | Path, site: Path, superlink: str, port: int = 9094) -> list[str]:
    """Flower's client at a site."""
    return [str(python), "-P", str(supernode.__file__), *supernode_arguments(site, superlink, port)]


def supernode_arguments(site: Path, superlink: str, port: int) -> list[str]:
    """What it needs to know; ``port`` is on loopback, for its own processes."""
    return [
        "--superlink", superlink,
        "--root-certificates", str(site / "ca.crt"),
        "--auth-supernode-private-key", str(site / "site.key"),
        "--port", str(port),
        "--node-config", node_config(site / "site.toml"),
    ]  # fmt: skip


def node_config(site_file: Path) -> str:
    """How Flower hands the path to the light app: a key and a TOML string, which Flower reads without escapes."""
    path = str(site_file)
    quote = next((q for q in "'\"" if q not in path), "")
    if not quote or (quote == '"' and "\\" in path):
        raise FedtailError(f"{path!r}: Flower does not accept paths with both kinds of quotes; rename the folder")
    return f"site={quote}{path}{quote}"


def shell_line(command: Sequence[str]) -> str:
    """The command as one types it."""
    return shlex.join(command)


def systemd_line(command: Sequence[str]) -> str:
    """The command as ``ExecStart=`` takes it: words in double quotes where needed, ``%`` and ``$`` doubled."""
    return " ".join(_systemd_word(word).replace("$", "$$") for word in command)


def systemd_path(path: str | Path) -> str:
    """One path of a list such as ``ReadWritePaths=``."""
    return _systemd_word(str(path))


def _systemd_word(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    plain = escaped == word and not any(c in word for c in " \t';") and word
    return word if plain else f'"{escaped}"'


def flower_environment(home: Path, programs: str | Path) -> dict[str, str]:
    """The environment Flower's programs start in."""
    path = os.pathsep.join([str(programs), os.environ.get("PATH", "/usr/bin:/bin")])
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path, "OMP_NUM_THREADS": "1"}
