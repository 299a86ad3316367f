"""``fedtail deploy init``: write a deployment folder."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from fedtail.errors import FedtailError, writing
from fedtail.federate.agreed import write_document
from fedtail.federate.deployment import Deployment, check_port, check_site_names, split_address
from fedtail.federate.operate.certificates import make_ca, make_server_certificate, make_site_key
from fedtail.files import write_atomically
from fedtail.runs.config import changed, load_config
from fedtail.settings import DataSettings, Settings
from fedtail.version import VERSION

INSTALLED = Path("/opt/fedtail")
"""Where a site's operator is told to put the folder and the virtual environment."""
SCHEMA = "schema.toml"
"""In the deployment's folder: what all sites' tables have in common, where sites sign it (``fedtail data schema``)."""
LAST_CONFIG = "run.toml"
"""In ``server/``: the config of the last run."""


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
        rehearsal: sites play the clients of the config's data set instead of bringing data, and their keys are made
            here; a server that need not be trusted has never seen those of others.
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
    deployment = Deployment(folder=home, name=home.name, sites=sites, port=port, public=address).check()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    for path in (deployment.server, deployment.flwr_home, deployment.runs):
        path.mkdir(mode=0o700)
    deployment.save()
    if not rehearsal:
        declared = {"schema": SCHEMA} if config.data.name == "table" and config.deploy.trust != "server" else {}
        config = config.model_copy(update={"data": DataSettings(name="sites", clients=len(sites), **declared)})
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": deployment.runs.name})})
    deployment.config.write_text(config.to_toml())
    make_ca(deployment.server, deployment.name)
    make_server_certificate(deployment.server, list(dict.fromkeys([host, "127.0.0.1", "localhost"])))
    for client, name in enumerate(sites):
        write_site(deployment, name, client if rehearsal else None)
    write_rosters(deployment)
    write_server(deployment)
    return deployment


def write_site(deployment: Deployment, name: str, client: int | None = None) -> None:
    """Write all that one site needs. client: which client of the config's data set it plays, in a rehearsal."""
    folder = deployment.site(name)
    (folder / "flwr").mkdir(parents=True)
    folder.chmod(0o700)
    if client is not None:
        make_site_key(folder, name)
    shutil.copy(deployment.server / "ca.crt", folder / "ca.crt")
    data = filled("data-table.toml") if client is None else filled("data-slice.toml", client=client)
    words = {"deployment": deployment.name, "server": deployment.public, "data": data.strip(), "version": VERSION}
    for file in ("site.toml", "fedtail-site.service", "site-README.md"):
        path = folder / file.removeprefix("site-")
        path.write_text(filled(file, name=name, root=INSTALLED, **words))


def write_rosters(deployment: Deployment) -> None:
    """Write ``sites.pub``, the list of all sites' keys, into every site's folder. Sites compare it with one another."""
    folders = [deployment.site(name) for name in deployment.sites]
    text = "".join((f / "site.pub").read_text() for f in folders if (f / "site.pub").is_file())
    for folder in folders:
        if folder.is_dir():
            (folder / "sites.pub").write_text(text)


def write_server(deployment: Deployment) -> None:
    """Write unit, proxy and instructions of the server, for the place where its folder is."""
    programs, owner = Path(sys.executable).parent, str(deployment.folder.stat().st_uid)
    with contextlib.suppress(KeyError):  # a number without a name, as in containers
        owner = deployment.folder.owner()
    words = {"name": deployment.name, "folder": deployment.folder, "programs": programs, "user": owner}
    words |= {"host": deployment.host, "port": str(deployment.port), "listen": str(deployment.proxy_port)}
    for file in ("fedtail-superlink.service", "nginx.conf"):
        (deployment.server / file).write_text(filled(file, **words))
    (deployment.folder / "README.md").write_text(filled("server-README.md", **words))


def trusting_least(config: Settings, names: Sequence[str]) -> tuple[Settings, str]:
    """Return the config under ``deploy.trust = "blind"``; or as it is, and why it needs a server that is trusted."""
    blind = changed(config, {"deploy.trust": "blind"})
    try:
        write_document(blind, {}, names, "")
    except FedtailError as error:
        return config, str(error)
    return blind, ""


def last_config(deployment: Deployment, overrides: Sequence[str] = ()) -> Settings:
    """The config of the last run, which remembers its overrides; its files are where the folder is now."""
    path, theirs = deployment.server / LAST_CONFIG, load_config(deployment.config)
    if not path.is_file():
        return load_config(deployment.config, overrides)
    here = {"data.schema": theirs.data.options.get("schema")}
    if not Path(load_config(path).run.folder).is_dir():  # moved since
        here["run.folder"] = theirs.run.folder
    return load_config(path, overrides, here)


def write_config(deployment: Deployment, config: Settings | None = None, file: str = LAST_CONFIG) -> Path:
    """Write the config of a run, with paths as this machine finds them; by default the deployment's own config."""
    theirs = load_config(deployment.config)
    config = config or theirs
    if config.data != theirs.data:  # overrides of it would reach the server only
        raise FedtailError(f"data.* is set at the sites; change it in {deployment.shown}/config.toml, not for one run")
    if config.data.name != "sites" and config.data_seed != theirs.data_seed:
        config = config.model_copy(update={"data": config.data.model_copy(update={"seed": theirs.data_seed})})
    here = {"run.folder": str(deployment.folder / config.run.folder)}
    if "schema" in config.data.options:
        here["data.schema"] = str(deployment.folder / config.data.options["schema"])
    path = deployment.server / file
    write_atomically(path, changed(config, here).to_toml())
    return path


def filled(file: str, /, **words: object) -> str:
    """Return a text of ``files/`` with its ``@words@`` replaced."""
    text = (files(__package__) / "files" / file).read_text()
    for word, value in words.items():
        text = text.replace(f"@{word}@", str(value))
    return text
