"""Apps that are not fedtail's run at no site, whoever starts them; docs/threat-model.md refers to this."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.supercore.fab import Fab

from fedtail.federate.deployment import Deployment
from fedtail.federate.operate.bundle import write_bundle
from fedtail.federate.operate.control import Control
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


@pytest.mark.flower
@pytest.mark.xdist_group("flower")
def test_a_foreign_app_runs_at_no_site(flower_deployment: Deployment, tmp_path: Path) -> None:
    """A user of the server's machine sends an app that is not fedtail's: sites fetch none, and answer with an error."""
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
    assert log.read_text().count("<class 'KeyError'>") == 3 and "answered" not in log.read_text()
    assert not mark.exists()
