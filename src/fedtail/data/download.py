"""Fetch a public file once: checksum, resume, progress, and never a half-written result.

Bytes go to ``<target>.part``, which a later call resumes; only a file whose checksum is right is renamed to its
final name. Every failure is one line that also says how to get the file by hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fedtail.errors import FedtailError

CHUNK = 1 << 18
Progress = Callable[[int, int | None], None]
"""Called with bytes done and bytes in all (None if the server does not say)."""


@dataclass(frozen=True)
class Remote:
    """A file on the network and what it must hash to (``md5:...`` or ``sha256:...``)."""

    url: str
    checksum: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


class TruncatedError(Exception):
    """The connection ended before the file did."""


def data_root(data_dir: str | Path | None = None) -> Path:
    """Where data sets live: ``data_dir``, else $FEDTAIL_DATA, else the user's cache folder."""
    given = data_dir or os.environ.get("FEDTAIL_DATA")
    return Path(given).expanduser() if given else cache_root() / "data"


def cache_root() -> Path:
    """The user's cache folder: $FEDTAIL_CACHE, $XDG_CACHE_HOME/fedtail or ~/.cache/fedtail."""
    own = os.environ.get("FEDTAIL_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedtail"


def fetch(
    remote: Remote,
    target: Path,
    *,
    check: bool = False,
    progress: Progress | None = None,
    tries: int = 3,
    timeout: float = 30.0,
) -> Path:
    """Download ``remote`` to ``target`` unless it is there already. Resumes what an earlier call left.

    ``check`` also checks a file that is there, perhaps put there by hand.
    """
    if target.exists():
        if check and (found := _digest(target, remote.checksum)) != remote.checksum:
            raise FedtailError(f"{target} has checksum {found} instead of {remote.checksum}; delete it and run again")
        return target
    hand = f"download {remote.url} by hand to {target}, or set FEDTAIL_DATA to a folder that has the data"
    if os.environ.get("FEDTAIL_OFFLINE"):
        raise FedtailError(f"{target} is missing and FEDTAIL_OFFLINE forbids downloads; {hand}")
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as out, _locked(out), _bar(remote.name, progress) as show:
            if target.exists():  # another process fetched it while this one waited for the lock
                return target
            resumed = _receive(remote, out, show, tries, timeout, hand)
            found = _digest(part, remote.checksum)
            if found != remote.checksum and resumed:  # the leftover may be of another version: once more, from scratch
                out.truncate(0)
                _receive(remote, out, show, tries, timeout, hand)
                found = _digest(part, remote.checksum)
            if found != remote.checksum:
                part.unlink()
                raise FedtailError(
                    f"{remote.url} has checksum {found} instead of {remote.checksum}, so nothing was kept; "
                    f"a proxy or mirror may have changed it: {hand}"
                )
            part.replace(target)
    except OSError as error:
        raise FedtailError(f"cannot write {part}: {error.strerror or error}; free space or choose --data-dir") from None
    finally:
        if part.exists() and part.stat().st_size == 0:
            part.unlink()
    return target


def _receive(remote: Remote, out: IO[bytes], show: Progress, tries: int, timeout: float, hand: str) -> bool:
    """Bring ``out`` to its full length; whether bytes of an earlier call were kept."""
    before = out.tell()
    resumed = before > 0
    reason = ""
    for _ in range(tries):
        try:
            _transfer(remote.url, out, show, timeout)
            return resumed and out.tell() >= before
        except urllib.error.HTTPError as error:
            if error.code == 416 and out.tell() > 0:  # the leftover is not a prefix of what the server has
                resumed = out.truncate(0) > 0
                reason = "the server refused to resume"
                continue
            raise FedtailError(f"{remote.url} answered {error.code} {error.reason}; {hand}") from None
        except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        except TruncatedError as error:
            reason = str(error)
        out.flush()
    kept = f" ({out.tell():,} bytes are kept: run again to resume)" if out.tell() else ""
    raise FedtailError(f"cannot download {remote.url}: {reason}{kept}; {hand}")


def _transfer(url: str, out: IO[bytes], show: Progress, timeout: float) -> None:
    """One request that continues at the end of ``out``."""
    out.seek(0, os.SEEK_END)
    done = out.tell()
    headers = {"User-Agent": "fedtail", **({"Range": f"bytes={done}-"} if done else {})}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as reply:
        if done and not (reply.status == 206 and _start(reply.headers.get("Content-Range")) == done):
            out.truncate(0)  # the server sends the whole file
            out.seek(0)
            done = 0
        length = reply.headers.get("Content-Length")
        total = done + int(length) if length is not None else None
        show(done, total)
        while chunk := _read(reply):
            out.write(chunk)
            done += len(chunk)
            show(done, total)
        out.flush()
    if total is not None and done < total:
        raise TruncatedError(f"the connection closed after {done:,} of {total:,} bytes")


def _read(reply: http.client.HTTPResponse) -> bytes:
    """The next bytes; nothing once the connection is gone, so that what arrived is kept."""
    try:
        return reply.read(CHUNK)
    except http.client.IncompleteRead as error:
        return error.partial
    except OSError:  # reset, timeout, TLS failure in mid-stream
        return b""


def _start(content_range: str | None) -> int | None:
    """First byte of a ``Content-Range: bytes 5-9/10`` header."""
    try:
        return int((content_range or "").split()[1].split("-")[0])
    except (IndexError, ValueError):
        return None


def _digest(path: Path, like: str) -> str:
    kind = like.split(":")[0]
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


@contextlib.contextmanager
def _locked(file: IO[bytes]) -> Iterator[None]:
    """Keep two processes from appending to the same file; a no-op where the system has no flock."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def _bar(name: str, progress: Progress | None) -> Iterator[Progress]:
    """The caller's progress function, else a bar on a terminal, else silence."""
    if progress is not None:
        yield progress
    elif not sys.stderr.isatty():
        yield lambda done, total: None
    else:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Bar(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(name, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
