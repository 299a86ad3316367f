"""A site runs no app but those whose hash it has pinned, whoever sends it. The standard library and Flower only.

In Flower's open edition whoever reaches the control path of a SuperLink starts runs, whose app all sites would execute.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import operator
import sys
import zipfile
from collections.abc import Collection
from importlib.metadata import version
from inspect import signature
from typing import Any

APPS = "FEDTAIL_APPS"
"""Environment variable: hashes of the apps that a site runs, with commas; or ``any``."""
APP_FILES, APP_BYTES = 1000, 1 << 23
"""The most that an app may have, unpacked; fedtail's has a dozen files of together 30 kB."""


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
    loses = "apps cannot be pinned; install the version fedtail needs, or start the site with FEDTAIL_APPS=any"
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
        if found not in allowed:
            sys.stderr.write(f"ERROR :     refused an app that is not pinned here: {found}\n")
        return found in allowed

    loop._pull_and_store_message, loop._verify_fab = pinned, verify
    return True
