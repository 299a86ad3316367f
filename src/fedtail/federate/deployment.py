"""The deployment folder: one place for names and paths, so that every command finds the same files.

deployment.toml     names, addresses, sites
config.toml         the run: method, rates, model, rounds (an ordinary fedtail config)
app/                the Flower app bundle
server/             CA, server key, SuperLink's database and log, proxy configuration, systemd units
sites/<name>/       all that one site needs; hand over this folder and nothing else
runs/               run folders

Nothing in it names the folder itself but ``server/fedtail-superlink.service`` and the instructions, so it can be moved.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedtail.errors import FedtailError

FORMAT = 1
FORBIDDEN = set('"`$%\\')
HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")


@dataclass(frozen=True)
class Deployment:
    """A deployment folder and what ``deployment.toml`` says."""

    folder: Path
    name: str
    sites: tuple[str, ...]
    host: str = "127.0.0.1"
    """Address the SuperLink listens on; keep it on loopback and put the proxy in front."""
    port: int = 9092
    public: str = "127.0.0.1:9092"
    """Address sites connect to: the proxy's, or the SuperLink's own in a rehearsal."""

    @property
    def proxy_port(self) -> int:
        """Where the generated proxy listens: the public port, or the next one where that is the SuperLink's own."""
        outer = int(self.public.rpartition(":")[2])
        return outer if outer != self.port else self.port + 1

    @property
    def config(self) -> Path:
        return self.folder / "config.toml"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def server(self) -> Path:
        return self.folder / "server"

    @property
    def flwr_home(self) -> Path:
        """Flower's own settings (which SuperLink, which certificate), apart from the user's."""
        return self.server / "flwr"

    @property
    def shown(self) -> str:
        """The folder as one would type it here."""
        here = Path.cwd()
        return str(self.folder.relative_to(here) if self.folder.is_relative_to(here) else self.folder)

    def site(self, name: str) -> Path:
        return self.folder / "sites" / name

    def check(self) -> Deployment:
        """Return the same deployment if its names can stand in paths, units, certificates and proxy configuration."""
        for path in (self.folder, Path(self.name)):
            if not str(path).isprintable() or FORBIDDEN & set(str(path)):
                raise FedtailError(f"folder {str(path)!r} has quotes, '$', '%', a backslash or a line break; rename it")
        check_site_names(self.sites)
        check_port("server.port", self.port)
        split_address("server.public", self.public)
        split_address("server.host", f"{self.host}:{self.port}")
        return self

    def save(self) -> None:
        about: dict[str, Any] = {
            "format": FORMAT,
            "name": self.name,
            "sites": list(self.sites),
            "server": {"host": self.host, "port": self.port, "public": self.public},
        }
        (self.folder / "deployment.toml").write_text(tomli_w.dumps(about))


def load_deployment(folder: str | Path) -> Deployment:
    """Return the deployment in a folder; one clear line if there is none."""
    path = Path(folder).resolve()
    file = path / "deployment.toml"
    if not file.is_file():
        if (path / "site.toml").is_file():
            raise FedtailError(f"{str(path)!r} is a site's folder, for `fedtail site`; name the server's folder")
        raise FedtailError(
            f"{str(path)!r} is not a deployment folder, with deployment.toml; name the server's folder, or create one "
            f"with `fedtail deploy init {folder}`"
        )
    try:
        about = tomllib.loads(file.read_text())
        server = about["server"]
        if about["format"] != FORMAT:
            raise FedtailError(f"{str(file)!r} has format {about['format']!r}, this version reads {FORMAT}")
        return Deployment(
            folder=path,
            name=about["name"],
            sites=tuple(about["sites"]),
            host=server["host"],
            port=int(server["port"]),
            public=server["public"],
        ).check()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FedtailError(f"{str(file)!r} cannot be read: {type(error).__name__} {error}") from None


def split_address(key: str, address: str) -> tuple[str, int]:
    """Return (host, port) of ``host:port``; one clear line for anything else. ``key``: where it came from."""
    host, _, port = address.rpartition(":")
    if not HOST.fullmatch(host) or not re.fullmatch("[0-9]{1,5}", port):
        raise FedtailError(f"{key} {address!r} is not of the form host:port")
    return host, check_port(key, int(port))


def check_port(key: str, port: int) -> int:
    """Return a port that a program can listen on."""
    if not 1 <= port <= 65535:
        raise FedtailError(f"{key}: port {port} is outside 1..65535")
    return port


def check_site_names(names: tuple[str, ...]) -> None:
    """Raise unless names can be folder names and appear in certificates and logs."""
    if not names:
        raise FedtailError("a deployment needs at least one site, e.g. --sites north,south")
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
            raise FedtailError(f"site name {name!r} is not allowed; use letters, digits, '.', '_' and '-'")
    if len(set(names)) < len(names):
        raise FedtailError(f"site names must be unique, got {', '.join(names)}")
