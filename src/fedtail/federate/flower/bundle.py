"""The Flower app bundle: a small folder that ``flwr run`` sends to server and sites.

It holds the light site app as it is in this package and a server app of one import; fedtail itself is installed
at both ends, never sent.
"""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path

PACKAGE = "fedtail_app"
PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedtail-app"
version = "{version}"
description = "fedtail on Flower"
license = "MIT"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "fedtail"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
config = ""
deployment = ""
sites = 0
resume = false
mode = "train"
"""
SERVER_APP = '''"""The ServerApp: fedtail's round loop over Flower's grid."""

from fedtail.federate.flower.server_app import app

__all__ = ["app"]
'''


def write_bundle(folder: Path) -> None:
    """Write (or renew) the app bundle in ``folder``."""
    target = folder / PACKAGE
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for source in sorted((Path(__file__).parent / "site_app").glob("*.py")):
        shutil.copy(source, target / source.name)
    (target / "server_app.py").write_text(SERVER_APP)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(version=version("fedtail"), package=PACKAGE))
