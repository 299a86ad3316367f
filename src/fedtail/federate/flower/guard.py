"""What Flower's open edition lets anybody do on a machine, closed.

The SuperLink's control and runtime paths have no authentication: any local user could start a run, and its app would
run at every site. So only processes of the SuperLink's own user are answered there, and a site runs no app but those
whose hash it has pinned, whoever sends it. The standard library and Flower only.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import operator
import os
import socket
import sys
import zipfile
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

APPS = "FEDTAIL_APPS"
"""Environment variable: hashes of the apps that a site runs, with commas; or ``any``."""
APP_FILES, APP_BYTES = 1000, 1 << 23
"""The most that an app may have, unpacked; fedtail's has a dozen files of together 30 kB."""
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
ESTABLISHED = "01"
OPEN = ("/v1/fleet/", "/health")
"""Paths for everybody who reaches the SuperLink: sites authenticate with their keys."""
Scope = MutableMapping[str, Any]


def private(module: str, *names: str, loses: str) -> Any:
    """Return a module of Flower's that has all these names, none of which is part of its API; None, and a line that
    says what is lost, in a version without them."""
    try:
        found = importlib.import_module(module)
        for name in names:
            operator.attrgetter(name)(found)
    except (ImportError, AttributeError) as error:
        sys.stderr.write(f"WARNING :   flwr {version('flwr')} is not known here ({error}): {loses}\n")
        return None
    return found


def app_hash(content: bytes) -> str:
    """Return the hash of an app's files, however they are compressed; ``ValueError`` if they would be too large."""
    found = hashlib.sha256()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        sizes = [entry.file_size for entry in archive.infolist()]  # no more than this is unpacked of an entry
        if len(sizes) > APP_FILES or sum(sizes) > APP_BYTES:
            raise ValueError(f"an app of {len(sizes)} files and {sum(sizes)} bytes")
        for entry in sorted(archive.infolist(), key=lambda entry: entry.filename):
            data = archive.read(entry)
            name = entry.filename.encode()
            found.update(len(name).to_bytes(8, "big") + name + len(data).to_bytes(8, "big") + data)
    return found.hexdigest()


def pin_apps(allowed: Collection[str]) -> bool:
    """Have a SuperNode run only apps with one of these hashes. Others are answered with Flower's own error for an app
    that could not be verified, before anything of them is unpacked. False, and a line, where Flower's names are others:
    such a SuperNode must not start."""
    if "any" in allowed:
        return True
    loses = "apps cannot be pinned; install the version fedtail needs, or put apps = 'any' into site.toml"
    names = ("_pull_and_store_message", "_verify_fab", "Fab")
    loop = private("flwr.supernode.start_client_internal", *names, loses=loses)
    if loop is None or not {"get_fab", "trusted_entities"} <= set(signature(loop._pull_and_store_message).parameters):
        return False
    pull = loop._pull_and_store_message

    def pinned(*args: Any, **options: Any) -> int | None:
        bound = signature(pull).bind(*args, **options).arguments
        fetch = bound["get_fab"]

        def signed(name: str, run: int) -> Any:  # Flower verifies only what its server says can be verified
            fab = fetch(name, run)
            return loop.Fab(fab.hash_str, fab.content, {**fab.verifications, "valid_license": "fedtail"})

        run: int | None = pull(**{**bound, "get_fab": signed, "trusted_entities": {"fedtail": ""}})
        return run

    def verify(fab: Any, trusted: dict[str, str]) -> bool:
        try:
            found = app_hash(fab.content)
        except (zipfile.BadZipFile, OSError, ValueError, RuntimeError, NotImplementedError):
            found = "not an app"
        if found in allowed:
            return True
        sys.stderr.write(f"ERROR :     refused an app that is not pinned here: {found}\n")
        return False

    loop._pull_and_store_message, loop._verify_fab = pinned, verify
    return True


def close_paths(name: str, everybody: tuple[str, ...]) -> None:
    """Let the web application that a module of Flower's creates answer its own user alone, but for these paths."""
    module = private(name, "create_app", loses="other users of this machine reach Flower's API")
    if module is None:
        return
    create = module.create_app

    def closed(*args: Any, **options: Any) -> Any:
        app = create(*args, **options)
        app.add_middleware(OwnUserOnly, everybody=everybody)
        return app

    module.create_app = closed


class OwnUserOnly:
    """Answers 403 unless the other end of the connection belongs to this process's user, or to root."""

    def __init__(self, app: Callable[..., Awaitable[None]], everybody: tuple[str, ...] = ()) -> None:
        self.app, self.everybody = app, everybody

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or self.admits(scope):
            await self.app(scope, receive, send)
            return
        text = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 403, "headers": text})
        await send({"type": "http.response.body", "body": b"only the user that runs this service may do that\n"})

    def admits(self, scope: Scope) -> bool:
        path = str(scope["path"])
        if any(path.startswith(each) for each in self.everybody) and ".." not in path:
            return True
        client, server = (tuple(scope.get(end) or ()) for end in ("client", "server"))
        return len(client) == len(server) == 2 and peer_user(client, server) in {os.getuid(), 0}


def peer_user(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the user whose socket is at ``client``, connected to ``server`` on this machine; None for none. The
    kernel says so for sockets that are open: one that was closed would count as root's, and is not looked at."""
    for table in TABLES:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] != ESTABLISHED or words[9] == "0":
                continue
            if (address(words[1]), address(words[2])) == (client, server):
                return int(words[7])
    return None


def address(words: str) -> tuple[str, int]:
    """Return host and port of ``0100007F:1F90`` as the kernel writes it: words of four bytes, each turned round."""
    raw = bytes.fromhex(words[:-5])
    turned = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    host = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, turned)
    return host.removeprefix("::ffff:"), int(words[-4:], 16)
