"""The deployment folder: keys, certificates, configuration; and the processes that belong to one."""

from __future__ import annotations

import datetime
import fcntl
import os
import re
import socket
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from flwr.supercore.fab_format_version import normalize_and_validate_fab_format

from fedtail.cli import app, deploy_view
from fedtail.data.tables.schema import schema_text
from fedtail.data.tables.sites import propose_schema
from fedtail.errors import FedtailError
from fedtail.federate.deployment import load_deployment
from fedtail.federate.operate import processes, runs
from fedtail.federate.operate.bundle import write_bundle
from fedtail.federate.operate.certificates import inspect_certificate, key_matches, make_ca, make_server_certificate
from fedtail.federate.operate.create import LAST_CONFIG, create_deployment, write_config
from fedtail.federate.operate.doctor import examine_site
from fedtail.federate.operate.processes import free_port, superlink_command
from fedtail.federate.protocol.transport import with_phase
from fedtail.federate.protocol.wire import Parcel, pack, unpack
from fedtail.federate.site import frames, worker_client
from fedtail.federate.site.config import load_site
from fedtail.federate.site.own import stamp
from fedtail.federate.status import RUN_LOCK, Status
from fedtail.runs.config import load_config
from tests.federate.conftest import settings
from tests.waiting import until

SITES = ("north", "east", "south")


def test_private_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    deployment = create_deployment(tmp_path / "fed", SITES, settings())
    keys = [*tmp_path.rglob("*.key")]
    assert len(keys) == 5
    assert all(stat.S_IMODE(k.stat().st_mode) == 0o600 for k in keys)
    assert all(key_matches(deployment.site(name)) for name in SITES)


def test_a_site_folder_holds_no_secret_of_the_server_or_of_another_site(tmp_path: Path) -> None:
    deployment = create_deployment(tmp_path / "fed", SITES, settings())
    secrets = {k.read_bytes() for k in deployment.server.glob("*.key")}
    mine = [{p.read_bytes() for p in deployment.site(name).rglob("*") if p.is_file()} for name in SITES]
    assert not any(secrets & files for files in mine)
    keys = [(deployment.site(name) / "site.key").read_bytes() for name in SITES]
    assert [sum(key in files for files in mine) for key in keys] == [1, 1, 1]


def test_the_server_certificate_is_for_the_public_address_and_signed_by_the_ca(tmp_path: Path) -> None:
    deployment = create_deployment(tmp_path / "fed", SITES, settings(), public="fed.example.org:443")
    seen = inspect_certificate(deployment.server / "server.crt", deployment.server / "ca.crt")
    assert seen.signed_by_ca and {"fed.example.org", "127.0.0.1", "localhost"} <= set(seen.hosts)
    assert seen.ends > datetime.datetime.now(datetime.UTC)
    other = tmp_path / "other"
    other.mkdir()
    make_ca(other, "other")
    assert not inspect_certificate(deployment.server / "server.crt", other / "ca.crt").signed_by_ca
    make_server_certificate(deployment.server, ["new.example.org"])
    assert (
        "new.example.org" in inspect_certificate(deployment.server / "server.crt", deployment.server / "ca.crt").hosts
    )


def test_the_proxy_is_generated_for_the_public_port_and_the_fleet_path_only(tmp_path: Path) -> None:
    deployment = create_deployment(tmp_path / "fed", SITES, settings(), public="fed.example.org:443", port=9300)
    text = (deployment.server / "nginx.conf").read_text()
    assert "listen 443 ssl;" in text and "proxy_pass https://127.0.0.1:9300;" in text
    assert text.count("location") == 2 and "location /v1/fleet/" in text and "location / { return 403; }" in text
    unit = (deployment.site("north") / "fedtail-site.service").read_text()
    assert "KillMode=control-group" in unit
    assert 'server = "fed.example.org:443"' in (deployment.site("north") / "site.toml").read_text()
    assert "PrivateTmp=true" in unit, "ProtectSystem=strict makes /tmp read-only, and the worker's socket is there"
    served = (deployment.server / "fedtail-superlink.service").read_text()
    assert f'deploy serve "{deployment.folder}"' in served
    assert "--host 127.0.0.1 --port 9300" in " ".join(superlink_command(deployment))


def test_a_deployment_comes_back_from_its_folder(tmp_path: Path) -> None:
    made = create_deployment(tmp_path / "fed", SITES, settings(), public="h.example:8443", port=9300)
    assert load_deployment(tmp_path / "fed") == made
    assert tomllib.loads(made.config.read_text())["run"]["folder"] == "runs", "the folder can be moved"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["init", "{full}", "--sites", "a,b"], "exists and is not empty"),
        (["init", "{full}/file", "--sites", "a,b"], "exists and is not empty"),
        (["init", "{new}"], "at least one site"),
        (["init", "{full}/file/fed", "--sites", "a,b"], "cannot write"),
        (["init", "{new}", "--sites", "a,a"], "must be unique"),
        (["init", "{new}", "--sites", "a/b"], "is not allowed"),
        (["init", "{new}", "--sites", "a,b", "--public", "nowhere"], "host:port"),
        (["init", "{new}", "--sites", "a,b", "--public", "host:99999"], "outside 1..65535"),
        (["init", "{new}", "--sites", "a,b", "--port", "99999"], "outside 1..65535"),
        (["doctor", "--site", "{new}/site.toml"], "does not exist"),
        (["status", "{new}"], "is not a deployment folder"),
        (["status", "{full}/site"], "is a site's folder"),
        (["run", "{full}"], "with deployment.toml; name the server's folder, or create one with"),
        (["doctor"], "give the deployment folder"),
        (["up", "{new}"], "is not a deployment folder; create one with `fedtail deploy init`"),
        (["init", "{new}$", "--sites", "a,b"], "rename it"),
        (["init", "{new}", "--sites", "a,b", "--local", "3"], "leave out --local 3"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "full" / "site").mkdir()
    (tmp_path / "full" / "site" / "site.toml").touch()
    words = [a.format(full=tmp_path / "full", new=tmp_path / "new") for a in arguments]
    result = CliRunner().invoke(app, ["deploy", *words])
    assert isinstance(result.exception, FedtailError)
    assert message in str(result.exception) and "\n" not in str(result.exception)


def test_init_writes_a_folder_and_a_sites_doctor_reads_its_data(tmp_path: Path) -> None:
    runner = CliRunner()
    made = runner.invoke(app, ["deploy", "init", str(tmp_path / "fed"), "--sites", "a,b", "data.name=blobs"])
    assert made.exit_code == 0, made.output
    site = tmp_path / "fed" / "sites" / "a"
    healthy = runner.invoke(app, ["deploy", "doctor", "--site", str(site)])  # as `fedtail site` takes it
    assert healthy.exit_code == 0 and "data: slice" in healthy.output
    (site / "site.key").chmod(0o644)
    broken = runner.invoke(app, ["deploy", "doctor", "--site", str(site / "site.toml")])
    assert broken.exit_code == 1 and "chmod 600" in broken.output


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("site.toml", b'site = "north"\n', r"site = 'north' must be a table; write \[site\] above its keys"),
        ("site.toml", b'[site]\nname = "north"\n[data]\npath = 3\n', r"\[data\] path = 3 must be text"),
        ("site.toml", b'[site]\nname = "north"\n[data]\npath = "~/d.csv"\nschema = "s.toml"\n', r"s\.toml' does not"),
        ("site.key", b"x", r"site\.key' is no key .* make another with `fedtail site keys --new`"),
        ("site.pub", b"x", r"site\.pub' is not a site's public key; `fedtail site keys` writes it"),
        ("sites.pub", b"\xff x", "has a line that is not a public key with a name"),
        ("ca.crt", b"x", r"cannot be reached over TLS with .*ca\.crt"),
    ],
)
def test_a_file_of_a_site_that_cannot_be_read_is_one_line(
    tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    site = create_deployment(tmp_path / "fed", SITES, settings()).site("north")
    (site / file).write_bytes(content)
    try:
        said = "; ".join(f.message for f in examine_site(site / "site.toml", "127.0.0.1:1") if f.level == "error")
    except FedtailError as error:
        said = str(error)
    assert re.search(message, said) and "\n" not in said, said


def test_a_path_at_home_and_a_share_outside_its_range_are_noticed_before_a_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pd.DataFrame({"a": [*range(20), *range(20)], "y": ["no", "yes"] * 20}).to_csv(tmp_path / "d.csv", index=False)
    schema, _ = propose_schema(tmp_path / "d.csv", "y")
    (tmp_path / "schema.toml").write_text(schema_text(schema))
    file = tmp_path / "site.toml"
    for validation, level in (("0.1", "ok"), ("1.5", "error")):
        paths = 'path = "~/d.csv"\nschema = "~/schema.toml"'
        file.write_text(f'[site]\nname = "north"\n[data]\n{paths}\nvalidation = {validation}\n')
        assert [f.level for f in examine_site(file) if f.subject == "data"] == [level]
    assert any(str(tmp_path / "d.csv") in str(part) for part in stamp(load_site(file))), "a change is noticed"


@pytest.mark.parametrize(
    ("device", "message"),
    [("cude", "worker.device 'cude' is unknown; did you mean 'cuda'"), ("cuda:77", "worker.device = 'cuda:77' but")],
)
def test_a_device_that_is_not_there_is_noticed_by_doctor_and_at_the_workers_start(
    tmp_path: Path, device: str, message: str
) -> None:
    site = create_deployment(tmp_path / "fed", SITES, settings()).site("north") / "site.toml"
    site.write_text(site.read_text().replace('device = "cpu"', f'device = "{device}"'))
    (finding,) = [f for f in examine_site(site) if f.level == "error"]
    assert finding.subject == "worker" and message in finding.message and "\n" not in finding.message
    with pytest.raises(worker_client.WorkerError, match=r"exited with code 2; see worker\.log"):
        worker_client.ask(site, with_phase("hello", pack(Parcel({}))))
    assert message in site.with_name("worker.log").read_text()  # a site's own words stay with it


def test_a_sites_doctor_says_what_is_wrong_with_data_and_address(tmp_path: Path) -> None:
    site = create_deployment(tmp_path / "fed", SITES, settings(), rehearsal=False).site("north") / "site.toml"
    key, data = [f for f in examine_site(site) if f.level == "error"]
    assert key.subject == "north" and "site.pub is missing" in key.message
    assert data.subject == "data" and "schema.toml" in data.message
    with pytest.raises(FedtailError, match=r"--server 'nowhere' is not of the form host:port"):
        examine_site(site, "nowhere")
    (site.parent / "ca.crt").unlink()
    assert "ca.crt is missing" in examine_site(site, "127.0.0.1:1")[-1].message


@pytest.mark.parametrize(("flag", "kind"), [("--own-data", "table"), ("--images", "images")])
def test_sites_with_data_of_their_own_get_the_defaults_of_a_run_on_ones_own_data(
    tmp_path: Path, flag: str, kind: str
) -> None:
    sites = ("--sites", "a,b,c")
    assert (
        CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "fed"), *sites, flag, "local.epochs=2"]).exit_code
        == 0
    )
    made = load_config(tmp_path / "fed" / "config.toml")
    same = load_config(None, ["local.epochs=2"], {"data.name": kind}, suggest=True)
    for section in ("method", "rates", "local", "server", "decision", "model"):
        assert getattr(made, section) == getattr(same, section), section
    assert made.run == same.run and made.local.epochs == 2 and made.data.name == "sites"
    assert made.deploy.trust == "blind", "no server needs to be trusted"
    assert made.data.options == ({"schema": "schema.toml"} if kind == "table" else {})
    if kind == "table":
        folder = load_deployment(tmp_path / "fed").folder
        assert load_config(write_config(load_deployment(folder))).data.options["schema"] == str(folder / "schema.toml")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--sites", "a,b"), "needs at least 3 sites"),
        (("--sites", "a,b,c", "run.quorum=0.5"), "quorum"),
        (("--sites", "a,b,c", "deploy.trust=server"), ""),
    ],
)
def test_where_a_server_must_be_trusted_init_says_why(
    tmp_path: Path, words: tuple[str, ...], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    done = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "fed"), "--own-data", *words])
    assert done.exit_code == 0 and load_config(tmp_path / "fed" / "config.toml").deploy.trust == "server"
    note = done.output + capfd.readouterr().err
    assert ("sites must trust this server" in note) == bool(why) and why in note


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["deploy", "up", str(tmp_path / "new"), "--local", "3", "--port", str(port)])
        assert isinstance(result.exception, FedtailError)
        assert f"port {port} is already in use; set another in" in str(result.exception)


def test_overrides_to_a_folder_that_exists_are_not_lost_in_silence(tmp_path: Path) -> None:
    create_deployment(tmp_path / "fed", SITES, settings())
    result = CliRunner().invoke(app, ["deploy", "up", str(tmp_path / "fed"), "run.rounds=9"])
    assert isinstance(result.exception, FedtailError) and "config.toml" in str(result.exception)


def test_commands_on_a_federation_that_is_down_say_so(tmp_path: Path) -> None:
    create_deployment(tmp_path / "fed", SITES, settings(), port=free_port())
    runner, folder = CliRunner(), str(tmp_path / "fed")
    for command in ("run", "register"):
        result = runner.invoke(app, ["deploy", command, folder])
        assert isinstance(result.exception, FedtailError) and "fedtail deploy up" in str(result.exception)
    assert "no run is active" in runner.invoke(app, ["deploy", "stop", folder]).output
    assert "nothing was running" in runner.invoke(app, ["deploy", "down", folder]).output
    shown = runner.invoke(app, ["deploy", "status", folder]).output
    assert "SuperLink down" in shown and "no run yet" in shown


def test_status_of_a_run_that_was_cut_off_says_stopped_and_how_to_go_on(tmp_path: Path) -> None:
    deployment = create_deployment(tmp_path / "fed", SITES, settings(), port=free_port())
    fault = {"client": 1, "round": 1, "reason": "no reply within 20 s"}
    status = Status(deployment.server / "run.json", settings(), 7)
    status.write(state="training", round=2, errors=[fault])
    with (deployment.server / RUN_LOCK).open("w") as lock:  # held by the process that trains, as long as it lives
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert runs.where(deployment)["state"] == "training"
    shown = CliRunner().invoke(app, ["deploy", "status", str(deployment.folder)]).output
    assert "run: stopped, round 2 of 3" in shown and "--resume" in shown
    assert "round 2, east: no reply within 20 s" in shown
    status.finish(deployment.runs / "digits")
    shown = CliRunner().invoke(app, ["deploy", "status", str(deployment.folder)]).output
    assert "run: finished" in shown and "create its report with: fedtail report" in shown
    assert not (deployment.server / LAST_CONFIG).exists(), "no run was started with overrides"


def test_stop_ends_all_marked_processes_and_no_other(tmp_path: Path) -> None:
    child = "[sys.executable, '-c', 'import time; time.sleep(3600)']"
    sleep = [sys.executable, "-c", f"import subprocess, sys; subprocess.run({child}, start_new_session=True)"]
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        folder.mkdir()
        processes.start(folder, "site:x", sleep, folder / "log", dict(os.environ))
    until(lambda: len(processes.find(mine)) == len(processes.find(other)) == 2, "two processes each")
    assert {p.role for p in processes.find(mine)} == {"site:x"}
    assert processes.stop(mine, grace=2.0) == 2
    assert processes.find(mine) == [] and len(processes.find(other)) == 2
    processes.stop(other, grace=2.0)


def test_the_site_app_imports_neither_torch_nor_fedtail(tmp_path: Path) -> None:
    """Flower starts it for every message; what it imports is paid each time."""
    write_bundle(tmp_path)
    named = tomllib.loads((tmp_path / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        f"import {named['clientapp'].partition(':')[0]}\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'fedtail')]\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_the_app_can_be_published_as_it_is(tmp_path: Path) -> None:
    publish = pytest.importorskip("flwr.cli.app_cmd.publish", reason="this version of Flower publishes nothing")
    write_bundle(tmp_path)
    files = publish._collect_file_paths(tmp_path)
    publish._validate_files(files)
    assert {"README.md", "LICENSE", "pyproject.toml"} <= {f.name for f in files}
    assert (tmp_path / "LICENSE").read_text() == (Path(__file__).parents[3] / "LICENSE").read_text()
    about = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert normalize_and_validate_fab_format(about) and "@" not in (tmp_path / "README.md").read_text()


def test_a_worker_is_started_on_demand_reused_replaced_when_killed_and_ends_when_told(tmp_path: Path) -> None:
    deployment = create_deployment(tmp_path / "fed", SITES, settings())
    site = deployment.site("north") / "site.toml"
    hello = pack(Parcel({}))
    pid = site.parent / "worker.pid"
    try:
        first = unpack(worker_client.ask(site, with_phase("hello", hello))).meta
        assert first["site"] == "north" and first["schema"]["kind"] == "slice"
        one = int(pid.read_text())
        worker_client.ask(site, with_phase("hello", hello))
        assert int(pid.read_text()) == one, "the same worker answers"
        os.kill(one, 9)
        assert unpack(worker_client.ask(site, with_phase("hello", hello))).meta["site"] == "north"
        assert int(pid.read_text()) != one
        assert unpack(worker_client.ask(site, with_phase("nonsense", hello))).meta["error"] == "malformed"
    finally:
        os.kill(int(pid.read_text()), 15)
    until(lambda: not pid.exists(), "the worker to end")
    assert not frames.socket_path(site).exists()


def test_a_worker_reads_its_files_anew_when_a_run_begins_and_not_in_the_middle_of_one(tmp_path: Path) -> None:
    site = create_deployment(tmp_path / "fed", SITES, settings(), rehearsal=False).site("north") / "site.toml"
    pd.DataFrame({"age": [1.5, 2.5, 3.5, 4.5] * 10, "y": ["a", "b"] * 20}).to_csv(site.parent / "data.csv", index=False)
    (site.parent / "schema.toml").write_text(schema_text(propose_schema(site.parent / "data.csv", "y")[0]))
    site.write_text(site.read_text().replace('trust = "blind"', 'trust = "server"'))  # else hello tells no schema
    hello, pid = pack(Parcel({})), site.parent / "worker.pid"
    try:
        assert unpack(worker_client.ask(site, with_phase("hello", hello))).meta["schema"]["classes"] == ["a", "b"]
        first = int(pid.read_text())
        later = (site.parent / "schema.toml").read_text().replace('"b",', '"b",\n    "c",')
        (site.parent / "schema.toml").write_text(later)
        worker_client.ask(site, with_phase("statistics", pack(Parcel({"request": {"client": 0, "seed": 0}}))))
        assert int(pid.read_text()) == first, "only a hello begins a run"
        assert unpack(worker_client.ask(site, with_phase("hello", hello))).meta["schema"]["classes"] == ["a", "b", "c"]
        assert int(pid.read_text()) != first
    finally:
        os.kill(int(pid.read_text()), 15)


def test_overrides_of_the_data_are_refused_and_another_seed_keeps_the_sites_split(tmp_path: Path) -> None:
    deployment = create_deployment(tmp_path / "fed", SITES, settings())
    theirs = load_config(deployment.config)
    with pytest.raises(FedtailError, match=r"data.\* is set at the sites"):
        write_config(deployment, load_config(deployment.config, ["data.n_max=50"]))
    other = load_config(write_config(deployment, load_config(deployment.config, ["run.seed=9"])))
    assert other.run.seed == 9 and other.data_seed == theirs.data_seed
    assert load_config(write_config(deployment)).data == theirs.data


def test_a_worker_that_grew_too_large_is_replaced_after_its_answer(tmp_path: Path) -> None:
    site = create_deployment(tmp_path / "fed", SITES, settings()).site("north") / "site.toml"
    site.write_text(site.read_text().replace("memory_mb = 4096", "memory_mb = 256"))
    assert unpack(worker_client.ask(site, with_phase("hello", pack(Parcel({}))))).meta["site"] == "north"
    log = site.parent / "worker.log"
    until(lambda: "more than worker.memory_mb = 256" in log.read_text(), "its last line, after it has cleaned up")
    assert not frames.socket_path(site).exists()


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('[site]\nname = "x"\n[data]\nkind = "tabel"\n')
    with pytest.raises(worker_client.WorkerError, match=r"exited with code 2; see worker\.log"):
        worker_client.ask(site, with_phase("hello", pack(Parcel({}))))
    assert "did you mean 'table'" in site.with_name("worker.log").read_text()


def test_rounds_are_told_once_each_with_loss_accuracy_and_faults(capfd: pytest.CaptureFixture[str]) -> None:
    show = deploy_view.follower()
    status: dict[str, object] = {"state": "waiting for sites", "round": 0, "rounds": 2, "errors": []}
    show(status)
    show({**status, "time": 1.0})
    done = {**status, "state": "training", "round": 1, "seconds": 12.3, "loss": 0.51, "accuracy": 0.8}
    show(done)
    show({**done, "state": "finished", "errors": []})
    show({**done, "round": 2, "errors": [{}]})
    assert capfd.readouterr().err.splitlines() == [
        "waiting for sites",
        "round 1/2  12.3 s  loss 0.510  accuracy 0.800",
        "round 2/2  12.3 s  loss 0.510  accuracy 0.800  errors so far: 1",
    ]


def test_a_flower_that_lacks_what_is_called_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = create_deployment(tmp_path / "fed", SITES, settings())
    monkeypatch.setitem(sys.modules, "fedtail.federate.operate.control", None)
    with pytest.raises(FedtailError, match=r"lacks what `fedtail deploy` calls .* or use `fedtail deploy app`"):
        deploy_view.load(made.folder)
