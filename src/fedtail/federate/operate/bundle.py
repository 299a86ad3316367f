"""The Flower app bundle: a small folder that ``flwr run`` sends to server and sites.

It holds the light modules of a site as they are in this package, under the same relative names so that their imports
of each other hold, and a server app of one import; fedtail itself is installed at both ends, never sent.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from fedtail import federate
from fedtail.errors import FedtailError
from fedtail.federate import flower, site
from fedtail.federate.flower import client_app, content, server_app
from fedtail.federate.operate.create import filled
from fedtail.federate.site import frames, worker_client
from fedtail.version import VERSION

PACKAGE = "fedtail_app"
LIGHT = (flower, client_app, content, site, frames, worker_client)
"""What runs at a site for every message: the standard library and Flower only."""
SERVER_APP = f'''"""The ServerApp: fedtail's round loop over Flower's grid."""

from {server_app.__name__} import app

__all__ = ["app"]
'''


def write_bundle(folder: Path) -> None:
    """Write (or renew) the app bundle in ``folder``."""
    if folder.exists() and not folder.is_dir():
        raise FedtailError(f"{str(folder)!r} is a file; choose a folder to write the app into")
    target, root = folder / PACKAGE, Path(str(federate.__file__)).parent
    shutil.rmtree(target, ignore_errors=True)
    for module in LIGHT:
        source = Path(str(module.__file__))
        copy = target / source.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    (target / "__init__.py").write_text('"""fedtail on Flower."""\n')
    (target / "server_app.py").write_text(SERVER_APP)
    about = filled("app.toml", version=VERSION, flower=flower.TESTED)
    (folder / "pyproject.toml").write_text(about)
    (folder / "README.md").write_text(filled("app-README.md", version=VERSION))
    (folder / "LICENSE").write_text(filled("app-LICENSE"))
