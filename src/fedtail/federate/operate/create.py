"""``fedtail deploy init``: write a deployment folder."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from fedtail.errors import FedtailError, writing
from fedtail.federate.deployment import Deployment, check_port, check_site_names, split_address
from fedtail.federate.operate import templates
from fedtail.federate.operate.certificates import make_ca, make_server_certificate, make_site_key
from fedtail.federate.operate.commands import serve_command, shell_line, systemd_line, systemd_path
from fedtail.settings import Data, Settings
from fedtail.version import VERSION

INSTALLED = Path("/opt/fedtail")
"""Where a site's operator is told to put the folder and the virtual environment."""


def create_deployment(
    folder: Path,
    sites: tuple[str, ...],
    config: Settings,
    *,
    public: str = "",
    port: int = 9092,
    rehearsal: bool = True,
) -> Deployment:
    """Write keys, certificates, configuration, units, proxy and instructions. An existing folder is never touched.

    Args:
        public: ``host:port`` sites connect to (the proxy); by default the SuperLink itself, on loopback.
        rehearsal: sites play the clients of the config's data set instead of bringing data.
    """
    check_site_names(sites)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FedtailError(f"{str(folder)!r} already exists and is not empty; choose another folder")
    if rehearsal and config.data.clients != len(sites):
        raise FedtailError(
            f"data.clients = {config.data.clients} but there are {len(sites)} sites; make them equal for a rehearsal"
        )
    address = public or f"127.0.0.1:{check_port('--port', port)}"
    host, _ = split_address("--public", address)
    home = folder.resolve()
    deployment = Deployment(folder=home, name=home.name, sites=sites, port=port, public=address)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    for path in (deployment.server, deployment.flwr_home, deployment.runs):
        path.mkdir(mode=0o700)
    deployment.save()
    if not rehearsal:
        config = config.model_copy(update={"data": Data(name="sites", clients=len(sites))})
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(deployment.runs)})})
    deployment.config.write_text(config.to_toml())
    make_ca(deployment.server, deployment.name)
    make_server_certificate(deployment.server, list(dict.fromkeys([host, "127.0.0.1", "localhost"])))
    for client, name in enumerate(sites):
        write_site(deployment, name, client if rehearsal else None)
    write_rosters(deployment)
    write_server(deployment)
    return deployment


def move_port(deployment: Deployment, port: int) -> Deployment:
    """The same deployment on another port: what names the old one is written anew. Keys and runs stay."""
    old, new = f"127.0.0.1:{deployment.port}", f"127.0.0.1:{check_port('--port', port)}"
    moved = replace(deployment, port=port, public=new if deployment.public == old else deployment.public)
    moved.save()
    for name in moved.sites:
        site = moved.site(name) / "site.toml"
        site.write_text(site.read_text().replace(f'server = "{deployment.public}"', f'server = "{moved.public}"'))
        _write_unit(moved, name)
    write_server(moved)
    return moved


def write_site(deployment: Deployment, name: str, client: int | None = None) -> None:
    """All that one site needs. client: which client of the config's data set it plays, in a rehearsal."""
    folder = deployment.site(name)
    folder.mkdir(parents=True, mode=0o700)
    (folder / "flwr").mkdir()
    make_site_key(folder, name)
    shutil.copy(deployment.server / "ca.crt", folder / "ca.crt")
    data = templates.TABLE_DATA
    if client is not None:
        data = templates.SLICE_DATA.format(client=client, config="../../config.toml")
    text = templates.SITE_TOML.format(name=name, data=data, server=deployment.public)
    (folder / "site.toml").write_text(text)
    _write_unit(deployment, name)


def write_rosters(deployment: Deployment) -> None:
    """``sites.pub`` in every site's folder: whose keys may be behind masked sums. What a site does not have on its own
    list, no server can add."""
    files = [deployment.site(name) / "site.pub" for name in deployment.sites]
    listed = "".join(file.read_text() for file in files if file.is_file())
    for name in deployment.sites:
        if deployment.site(name).is_dir():
            (deployment.site(name) / "sites.pub").write_text(listed)


def _write_unit(deployment: Deployment, name: str) -> None:
    """How a site is started, and the words for its operator."""
    folder = deployment.site(name)
    (folder / "fedtail-site.service").write_text(site_unit(name, INSTALLED))
    (folder / "README.md").write_text(
        templates.SITE_README.format(
            name=name,
            deployment=deployment.name,
            version=VERSION,
            command=shell_line(site_command("run", name, INSTALLED)),
            health=shell_line(site_command("health", name, INSTALLED)),
            public=deployment.public,
        )
    )


def site_command(action: str, name: str, root: Path) -> list[str]:
    """``fedtail site run`` and so on, for a site whose folder is in ``root``, beside the virtual environment."""
    return [str(root / "venv" / "bin" / "fedtail"), "site", action, str(root / name)]


def site_unit(name: str, root: Path) -> str:
    """The systemd unit of such a site."""
    home, venv = root / name, root / "venv"
    return templates.SUPERNODE_UNIT.format(
        name=name,
        home=str(home).replace("%", "%%"),
        venv=venv,
        command=systemd_line(site_command("run", name, root)),
        writable=systemd_path(home),
    )


def superlink_unit(deployment: Deployment, programs: Path) -> str:
    """The systemd unit of the server."""
    return templates.SUPERLINK_UNIT.format(
        name=deployment.name,
        server=str(deployment.server).replace("%", "%%"),
        command=systemd_line(serve_command(programs, deployment)),
        writable=systemd_path(deployment.folder),
    )


def write_server(deployment: Deployment) -> None:
    """Unit, proxy and instructions of the server, for the place where its folder is."""
    unit = superlink_unit(deployment, Path(sys.executable).parent)
    (deployment.server / "fedtail-superlink.service").write_text(unit)
    listen = str(deployment.proxy_port)
    (deployment.server / "nginx.conf").write_text(
        templates.NGINX.format(host=deployment.host, port=deployment.port, listen=listen, server=deployment.server)
    )
    (deployment.folder / "README.md").write_text(
        templates.SERVER_README.format(
            name=deployment.name,
            server=shlex.quote(str(deployment.server)),
            folder=shlex.quote(str(deployment.folder)),
            listen=f"port {listen}",
            port=deployment.port,
        )
    )
