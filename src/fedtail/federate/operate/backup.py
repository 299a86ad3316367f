"""``fedtail deploy backup | restore``: a deployment as one file, and a deployment from it, wherever it is put.

The file holds private keys: it is readable by its owner only, and belongs where such things are kept.
"""

from __future__ import annotations

import io
import os
import sqlite3
import tarfile
import tempfile
from pathlib import Path

from fedtail.errors import FedtailError, writing
from fedtail.federate.deployment import Deployment, load_deployment
from fedtail.federate.operate.create import write_server
from fedtail.runs.config import changed, load_config

LEFT_OUT = (".log", ".log.1", ".pid", ".lock", ".sock", ".partial", ".db-wal", ".db-shm", ".db-journal")
"""Ends of names of what only a running process needs."""
FOLDERS_LEFT_OUT = ("flwr", "nginx-body", "nginx-proxy", "nginx-unused")


def backup(deployment: Deployment, file: Path, *, with_runs: bool = True) -> int:
    """Write everything that cannot be made again into a ``.tar.gz``; returns how many files. Safe while a run goes on:
    checkpoints appear whole, and Flower's database is copied by SQLite."""
    if file.exists():
        raise FedtailError(f"{str(file)!r} already exists; choose another name")
    files = [p for p in sorted(deployment.folder.rglob("*")) if p.is_file() and not p.is_symlink()]
    count = 0
    with writing(file):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with writing(file), os.fdopen(descriptor, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
            for path in files:
                name = path.relative_to(deployment.folder)
                if _is_left_out(name, with_runs):
                    continue
                try:
                    data = _database(path) if path.suffix == ".db" else path.read_bytes()
                except FileNotFoundError:  # an older checkpoint that a run has just dropped
                    continue
                about = tarfile.TarInfo(str(name))
                about.size, about.mode, about.mtime = len(data), path.stat().st_mode & 0o777, int(path.stat().st_mtime)
                archive.addfile(about, io.BytesIO(data))
                count += 1
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    return count


def restore(file: Path, folder: Path) -> Deployment:
    """The deployment in a backup, in a folder that is new; what names the old place is written anew."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FedtailError(f"{str(folder)!r} already exists and is not empty; choose another folder")
    if not file.is_file():
        raise FedtailError(f"backup {str(file)!r} does not exist")
    try:
        with tarfile.open(file, "r:gz") as archive:
            if "deployment.toml" not in archive.getnames():
                raise FedtailError(f"{str(file)!r} is not a backup of a deployment: it has no deployment.toml")
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o700)
                archive.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise FedtailError(f"{str(file)!r} cannot be read as a backup: {error}") from None
    deployment = load_deployment(folder)
    for key in (*folder.rglob("*.key"), *folder.rglob("superlink.db")):
        key.chmod(0o600)
    for path in (deployment.server, deployment.flwr_home, deployment.runs, *map(deployment.site, deployment.sites)):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    for site in deployment.sites:
        (deployment.site(site) / "flwr").mkdir(exist_ok=True)
    for config in (deployment.config, deployment.server / "run.toml"):
        if config.is_file():
            moved = changed(load_config(config), {"run.folder": str(deployment.runs)})
            config.write_text(moved.to_toml())
    write_server(deployment)
    return deployment


def _is_left_out(name: Path, with_runs: bool) -> bool:
    if name.parts[0] == "app" or (name.parts[0] == "runs" and not with_runs):
        return True
    inside = name.parts[:-1]
    return name.name.endswith(LEFT_OUT) or (name.parts[0] != "runs" and any(f in inside for f in FOLDERS_LEFT_OUT))


def _database(path: Path) -> bytes:
    """A database as it is at one moment, also while it is written."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        source, target = sqlite3.connect(f"file:{path}?mode=ro", uri=True), sqlite3.connect(copy)
        try:
            source.backup(target)
        except sqlite3.DatabaseError as error:
            raise FedtailError(f"{str(path)!r} cannot be copied: {error}") from None
        finally:
            source.close()
            target.close()
        return copy.read_bytes()
