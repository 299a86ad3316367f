"""The public data sets: where they come from, under which terms, and their files, fetched once and checked.

What is incomplete is never kept, and every failure also says how to get the file by hand.
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fedtail.data.registry import DATASETS
from fedtail.errors import FedtailError, one_of
from fedtail.files import hash_file
from fedtail.registry import is_own

TIMEOUT = 30.0
"""Seconds without a byte after which a download is given up."""


@dataclass(frozen=True)
class Remote:
    """A file on the network and what it must hash to (``md5:...`` or ``sha256:...``)."""

    url: str
    checksum: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Source:
    """A public data set in its official layout, ``<root>/<folder>/<files>``."""

    title: str
    folder: str
    files: tuple[str, ...]
    page: str
    terms: str
    remotes: tuple[Remote, ...] = ()
    """Either one per file or a single tar archive that holds ``folder``; none where no stable link exists."""
    any_file: bool = False
    """One of ``files`` is enough."""
    by_hand: str = ""
    """What to fetch when there is no link."""
    package: str = ""
    """A Python package that carries the files in its folder ``data``, where it is installed."""


def _cifar(classes: int, folder: str, files: tuple[str, ...], md5: str) -> Source:
    home, terms = "https://www.cs.toronto.edu/~kriz", "free for research, cite Krizhevsky (2009)"
    remote = Remote(f"{home}/cifar-{classes}-binary.tar.gz", f"md5:{md5}")
    return Source(f"CIFAR-{classes}, binary version", folder, files, f"{home}/cifar.html", terms, (remote,))


_CIFAR_10 = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
SOURCES: dict[str, Source] = {
    "cifar10": _cifar(10, "cifar-10-batches-bin", _CIFAR_10, "c32a1d4ab5d03f1284b67883e8d87530"),
    "cifar100": _cifar(100, "cifar-100-binary", ("train.bin", "test.bin"), "03b5dce01913d631647c71ecec9e9cb8"),
}


def is_public(name: str) -> bool:
    """Whether files of this data set can be fetched, or are known to have to be fetched by hand."""
    if name not in SOURCES and name in DATASETS and not is_own(name):
        DATASETS[name]  # a data set of an installed package adds its source when it is imported
    return name in SOURCES


def locate(name: str, data_dir: str | Path | None = None) -> Path:
    """The folder of a public data set, downloaded first if it is not there yet."""
    source = _source(name)
    folder = data_root(data_dir) / source.folder
    if (found := _folder(source, data_dir)) is not None:
        return found
    if source.package:
        raise FedtailError(
            f"data set {name!r} is neither installed nor in {folder}; pip install {source.package}, or put "
            f"{' and '.join(source.files)} of {source.page} into that folder"
        )
    if not source.remotes:
        raise FedtailError(
            f"data set {name!r} is not in {folder} and has no stable direct link; download {source.by_hand} from "
            f"{source.page} into that folder, or set FEDTAIL_DATA (or --data-dir) to the folder above yours"
        )
    if len(source.remotes) == 1 and source.remotes[0].name.endswith(".tar.gz"):
        archive = fetch(source.remotes[0], folder.parent / source.remotes[0].name, check=True)
        unpack(archive, source.folder, source.files, folder)
        archive.unlink()
    else:
        for file, remote in zip(source.files, source.remotes, strict=True):
            fetch(remote, folder / file)
    return folder


def is_here(name: str, data_dir: str | Path | None = None) -> bool:
    """Whether the loader would find its files without a download."""
    return _folder(_source(name), data_dir) is not None


def _folder(source: Source, data_dir: str | Path | None) -> Path | None:
    """Where the files are: the user's folder, else that of an installed package; None if nowhere."""
    enough = any if source.any_file else all
    for folder in (data_root(data_dir) / source.folder, *_package_folders(source.package)):
        if enough((folder / file).exists() for file in source.files):
            return folder
    return None


def _package_folders(package: str) -> list[Path]:
    """Found without importing it, since what its import needs may be missing."""
    try:
        spec = importlib.util.find_spec(package) if package else None
    except (ImportError, ValueError):
        return []
    return [Path(place) / "data" for place in (spec.submodule_search_locations or ())] if spec else []


def unpack(archive: Path, prefix: str, files: Sequence[str], folder: Path) -> None:
    """Take the named regular files out of a tar archive; ``folder`` appears complete or not at all."""
    try:
        with tarfile.open(archive) as tar, tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            for file in files:
                member = tar.extractfile(f"{prefix}/{file}")
                if member is None:
                    raise KeyError(file)
                with (Path(scratch) / file).open("wb") as out:
                    shutil.copyfileobj(member, out)
            folder.mkdir(exist_ok=True)
            for file in files:
                (Path(scratch) / file).replace(folder / file)
    except (tarfile.TarError, KeyError, EOFError) as error:
        raise FedtailError(f"{archive} is not the expected archive ({error}); delete it and run again") from None


def _source(name: str) -> Source:
    if not is_public(name):
        raise one_of("public data set", name, SOURCES)
    return SOURCES[name]


def data_root(data_dir: str | Path | None = None) -> Path:
    """Where data sets live: ``data_dir``, else $FEDTAIL_DATA, else the user's cache folder."""
    given = data_dir or os.environ.get("FEDTAIL_DATA")
    return Path(given).expanduser() if given else cache_root() / "data"


def cache_root() -> Path:
    """The user's cache folder: $FEDTAIL_CACHE, $XDG_CACHE_HOME/fedtail or ~/.cache/fedtail."""
    if own := os.environ.get("FEDTAIL_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedtail"


def fetch(remote: Remote, target: Path, *, check: bool = False, timeout: float = TIMEOUT) -> Path:
    """Download ``remote`` to ``target`` unless it is there already; ``check`` also checks one that is, perhaps put
    there by hand."""
    if target.exists():
        if check and (digest := _digest(target, remote.checksum)) != remote.checksum:
            raise FedtailError(f"{target} has checksum {digest} instead of {remote.checksum}; delete it and run again")
        return target
    hand = f"download {remote.url} by hand to {target}, or set FEDTAIL_DATA to a folder that has the data"
    if os.environ.get("FEDTAIL_OFFLINE"):
        raise FedtailError(f"{target} is missing and FEDTAIL_OFFLINE forbids downloads; {hand}")
    try:
        above = next(p for p in target.absolute().parents if p.is_dir())
        with tempfile.TemporaryDirectory(dir=above) as scratch:
            part = Path(scratch) / target.name
            with part.open("wb") as out:
                _receive(remote, out, timeout)
            digest = _digest(part, remote.checksum)
            if digest != remote.checksum:
                raise FedtailError(
                    f"{remote.url} has checksum {digest} instead of {remote.checksum}, so nothing was kept; the "
                    f"connection was cut, or a proxy or mirror changed the file: run again, or {hand}"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)
    except urllib.error.HTTPError as error:
        raise FedtailError(f"{remote.url} answered {error.code} {error.reason}; {hand}") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise FedtailError(f"cannot download {remote.url}: {reason}; {hand}") from None
    except OSError as error:
        why = f"cannot write to {target.parent}: {error.strerror or error}"
        raise FedtailError(f"{why}; free space or choose --data-dir") from None
    return target


def _receive(remote: Remote, out: IO[bytes], timeout: float) -> None:
    from rich.console import Console
    from rich.progress import wrap_file

    request = urllib.request.Request(remote.url, headers={"User-Agent": "fedtail"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        length, shown = int(reply.headers.get("Content-Length") or 0), sys.stderr.isatty()
        console = Console(stderr=True)
        with wrap_file(reply, length, description=remote.name, console=console, disable=not shown) as body:
            shutil.copyfileobj(body, out)


def _digest(path: Path, like: str) -> str:
    kind = like.split(":")[0]
    return f"{kind}:{hash_file(path, kind)}"
