"""Apps that are not fedtail's run at no site, whoever starts them; docs/threat-model.md refers to this."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.supercore.fab import Fab

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment
from fedtail.federate.flower import guard
from fedtail.federate.operate.bundle import own_hash, write_bundle
from fedtail.federate.operate.control import Control
from fedtail.federate.site.config import load_site
from tests.waiting import until

CLIENT_APP = """from pathlib import Path
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query("fedtail")
def answer(message: Message, context: Context) -> Message:
    Path({mark!r}).write_text("it ran")
    return Message(RecordDict(), reply_to=message)
"""
SERVER_APP = """import time
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    replies = grid.send_and_receive([Message(RecordDict(), node, "query.fedtail") for node in grid.get_node_ids()])
    open({log!r}, "w").write(";".join(str(r.error.reason) if r.has_error() else "answered" for r in replies))
"""


def test_an_app_is_known_by_its_files_and_not_by_how_they_are_packed(tmp_path: Path) -> None:
    write_bundle(tmp_path)
    content = build_fab_from_disk(tmp_path)
    assert guard.app_hash(content) == own_hash()
    (tmp_path / "fab.zip").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "fab.zip") as archive, zipfile.ZipFile(tmp_path / "plain.zip", "w") as plain:
        for name in reversed(archive.namelist()):
            plain.writestr(name, archive.read(name))
    assert guard.app_hash((tmp_path / "plain.zip").read_bytes()) == own_hash()
    with zipfile.ZipFile(tmp_path / "plain.zip", "a") as more:
        more.writestr("fedtail_app/more.py", "")
    assert guard.app_hash((tmp_path / "plain.zip").read_bytes()) != own_hash()


def test_a_site_lists_further_apps_by_their_hashes(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(f'[site]\nname = "north"\napps = ["{own_hash()}"]\n')
    assert load_site(tmp_path / "site.toml").identity.apps == (own_hash(),)
    (tmp_path / "site.toml").write_text('[site]\nname = "north"\napps = ["latest"]\n')
    with pytest.raises(FedtailError, match="'latest', which is not the hash of an app"):
        load_site(tmp_path / "site.toml")


def test_a_supernode_without_pins_does_not_start() -> None:
    environment = {k: v for k, v in os.environ.items() if k != guard.APPS}
    script = Path(guard.__file__).with_name("supernode.py")
    ended = subprocess.run([sys.executable, "-P", script], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "does not say which apps" in ended.stderr


@pytest.mark.flower
@pytest.mark.xdist_group("flower")
def test_a_foreign_app_runs_at_no_site(flower_deployment: Deployment, tmp_path: Path) -> None:
    """A user of the server's machine sends an app that is not fedtail's: all sites refuse it."""
    mark, log = tmp_path / "mark", tmp_path / "replies"
    write_bundle(tmp_path / "app")
    package = tmp_path / "app" / "fedtail_app"
    (package / "flower" / "client_app.py").write_text(CLIENT_APP.format(mark=str(mark)))
    (package / "server_app.py").write_text(SERVER_APP.format(log=str(log)))
    content = build_fab_from_disk(tmp_path / "app")
    fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
    with Control(flower_deployment) as control:
        control._call("StartRun", StartRunRequest(fab=fab))
        until(lambda: log.exists() and log.read_text(), "replies")
    assert log.read_text() == ";".join(["The FAB could not be verified."] * 3) and not mark.exists()
    for site in flower_deployment.sites:
        assert "refused an app that is not pinned here" in (flower_deployment.site(site) / "site.log").read_text()
