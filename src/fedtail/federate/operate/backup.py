"""``fedtail deploy backup | restore``: a deployment as one ``.tar.gz``, and a deployment from it, wherever it is put.

The file holds private keys: it is readable by its owner only, and belongs where such things are kept. A site's data,
ledger and secret are the site's own and have no place in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import tarfile
import tempfile
from pathlib import Path

from fedtail.errors import FedtailError, writing
from fedtail.federate.deployment import Deployment, load_deployment
from fedtail.federate.operate.create import write_server
from fedtail.runs.config import changed, load_config

KEPT = re.compile(
    r"deployment\.toml|config\.toml|server/((ca|server)\.(key|crt)|superlink\.db|run\.(toml|json|id))"
    r"|sites/[\w-][\w.-]*/(site\.(toml|key|pub)|sites\.pub|ca\.crt|fedtail-site\.service|README\.md)"
    r"|runs/(?!.*\.(partial|lock)$)\w[^/]*(/[\w.][^/]*)*"
)
"""Files of a deployment that cannot be made again; a backup holds no others."""
MOST_TIMES, MOST_BYTES = 100, 1 << 24
"""A backup may unpack to so many times its size, and so many bytes more."""


def backup(deployment: Deployment, file: Path, *, with_runs: bool = True) -> int:
    """Write all that cannot be made again; returns how many files. Safe while a run goes on: checkpoints appear whole,
    and SQLite copies Flower's database."""
    if file.exists():
        raise FedtailError(f"{str(file)!r} already exists; choose another name")
    names = [str(p.relative_to(deployment.folder)) for p in sorted(deployment.folder.rglob("*")) if p.is_file()]
    count = 0
    with writing(file):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            writing(file),
            os.fdopen(descriptor, "wb") as out,
            tarfile.open(fileobj=out, mode="w:gz") as archive,
        ):
            for name in names:
                path = deployment.folder / name
                if not KEPT.fullmatch(name) or path.is_symlink() or (name.startswith("runs/") and not with_runs):
                    continue
                if path.suffix == ".db":
                    path = copy_database(path, Path(folder) / path.name)
                with contextlib.suppress(FileNotFoundError):  # an older checkpoint that a run has just dropped
                    archive.add(path, name)
                    count += 1
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    return count


def restore(file: Path, folder: Path) -> Deployment:
    """The deployment in a backup, in a folder that is new. A backup with anything but files of a deployment is refused
    before anything is written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FedtailError(f"{str(folder)!r} already exists and is not empty; choose another folder")
    if not file.is_file():
        raise FedtailError(f"backup {str(file)!r} does not exist")
    new = not folder.exists()
    try:
        check_archive(file)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
        with tarfile.open(file, "r:gz") as archive:
            archive.extractall(folder, filter="data")
        return settled(load_deployment(folder))
    except (tarfile.TarError, EOFError, OSError, FedtailError) as error:
        for entry in folder.iterdir() if folder.is_dir() else ():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if new and folder.is_dir():
            folder.rmdir()
        if isinstance(error, FedtailError):
            raise
        raise FedtailError(f"{str(file)!r} cannot be read as a backup: {error}") from None


def check_archive(file: Path) -> None:
    """Raise unless an archive has files of a deployment only, of a plausible size."""
    left, found = MOST_TIMES * file.stat().st_size + MOST_BYTES, set()
    with tarfile.open(file, "r:gz") as archive:
        for entry in archive:
            if not entry.isreg() or not KEPT.fullmatch(entry.name) or ".." in Path(entry.name).parts:
                raise FedtailError(f"{str(file)!r} is not a backup of a deployment: it has {entry.name!r}")
            left -= entry.size
            if left < 0:
                raise FedtailError(
                    f"{str(file)!r} unpacks to more than {MOST_TIMES} times its size; nothing was written"
                )
            found.add(entry.name)
    if "deployment.toml" not in found:
        raise FedtailError(f"{str(file)!r} is not a backup of a deployment: it has no deployment.toml")


def settled(deployment: Deployment) -> Deployment:
    """A deployment that was unpacked here: modes, folders that were empty, and what names the old place."""
    for key in (*deployment.folder.rglob("*.key"), *deployment.folder.rglob("superlink.db")):
        key.chmod(0o600)
    for path in (deployment.server, deployment.flwr_home, deployment.runs, *map(deployment.site, deployment.sites)):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    for site in deployment.sites:
        (deployment.site(site) / "flwr").mkdir(exist_ok=True)
    for config in (deployment.config, deployment.server / "run.toml"):
        if config.is_file():
            moved = changed(load_config(config), {"run.folder": deployment.runs.name})
            config.write_text(moved.to_toml())
    write_server(deployment)
    return deployment


def copy_database(path: Path, copy: Path) -> Path:
    """A database as it is at one moment, also while it is written."""
    with (
        contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as source,
        contextlib.closing(sqlite3.connect(copy)) as target,
    ):
        try:
            source.backup(target)
        except sqlite3.DatabaseError as error:
            raise FedtailError(f"{str(path)!r} cannot be copied: {error}") from None
    return copy
