"""Fetch a public file once, with a checksum and a bar of progress; what is incomplete is never kept.

Every failure is one line that also says how to get the file by hand.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

from fedtail.errors import FedtailError

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
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            part = Path(scratch) / target.name
            with part.open("wb") as out:
                _receive(remote, out, timeout)
            digest = _digest(part, remote.checksum)
            if digest != remote.checksum:
                raise FedtailError(
                    f"{remote.url} has checksum {digest} instead of {remote.checksum}, so nothing was kept; the "
                    f"connection was cut, or a proxy or mirror changed the file: run again, or {hand}"
                )
            part.replace(target)
    except urllib.error.HTTPError as error:
        raise FedtailError(f"{remote.url} answered {error.code} {error.reason}; {hand}") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise FedtailError(f"cannot download {remote.url}: {reason}; {hand}") from None
    except OSError as error:
        place = target.parent
        raise FedtailError(
            f"cannot write to {place}: {error.strerror or error}; free space or choose --data-dir"
        ) from None
    return target


def _receive(remote: Remote, out: IO[bytes], timeout: float) -> None:
    from rich.console import Console
    from rich.progress import wrap_file

    request = urllib.request.Request(remote.url, headers={"User-Agent": "fedtail"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        length = int(reply.headers.get("Content-Length") or 0)
        bar = wrap_file(
            cast(BinaryIO, reply),
            length,
            description=remote.name,
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        with bar as body:
            shutil.copyfileobj(body, out)


def _digest(path: Path, like: str) -> str:
    kind = like.split(":")[0]
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"
