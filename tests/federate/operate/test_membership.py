"""Sites that come, go, lose a key and get a new one, in the deployment's folder."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from fedtail.cli import app
from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment, load_deployment
from fedtail.federate.operate import membership
from fedtail.federate.operate.certificates import inspect_certificate, key_matches, make_site_key
from fedtail.federate.operate.create import create_deployment
from fedtail.federate.operate.processes import free_port
from fedtail.federate.site.config import load_site
from tests.federate.conftest import settings


def call(*words: object) -> tuple[int, str]:
    """Exit code and words; a ``FedtailError`` is what ``main`` makes one line and code 2 of."""
    done = CliRunner().invoke(app, ["deploy", *map(str, words)])
    wrong = isinstance(done.exception, FedtailError)
    return (2, str(done.exception)) if wrong else (done.exit_code, done.output.strip())


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return create_deployment(tmp_path / "fed", ("north", "east", "south"), settings(), port=free_port())


def test_a_site_is_removed_and_its_folder_kept(deployment: Deployment) -> None:
    code, said = call("remove", deployment.folder, "east")
    assert code == 0 and "2 sites left" in said
    assert load_deployment(deployment.folder).sites == ("north", "south")
    assert not deployment.site("east").exists()
    (kept,) = (deployment.server / "removed").iterdir()
    assert kept.name.startswith("east-") and (kept / "site.pub").is_file()


def test_sites_with_data_of_their_own_may_be_any_number(tmp_path: Path) -> None:
    made = create_deployment(tmp_path / "own", ("north",), settings(), port=free_port(), rehearsal=False)
    assert membership.add_site(made, "west").sites == ("north", "west")
    assert load_site(made.site("west") / "site.toml").data["kind"] == "table"


def test_a_public_half_that_was_lost_is_written_again_for_the_same_key(deployment: Deployment) -> None:
    site = deployment.site("north")
    lost, listed = (site / "site.pub").read_text(), (site / "sites.pub").read_text()
    (site / "site.pub").unlink()
    assert membership.own_key(site)[0] == lost.strip() and (site / "site.pub").read_text() == lost
    assert key_matches(site) and (site / "sites.pub").read_text() == listed
    assert membership.own_key(site, new=True)[0] != lost.strip() and key_matches(site)


def test_sites_with_data_of_their_own_make_their_own_keys(tmp_path: Path) -> None:
    """The server's folder never holds a private key of a site; a new key takes the place of a lost one."""
    assert call("init", tmp_path / "fed", "--sites", "north,south", "--own-data", "--port", free_port())[0] == 0
    made = load_deployment(tmp_path / "fed")
    assert {p.name for p in made.folder.rglob("*.key")} == {"ca.key", "server.key"}
    for place in ("north", "south", "north"):
        site = tmp_path / "elsewhere"
        shutil.rmtree(site, ignore_errors=True)
        site.mkdir()
        make_site_key(site, "whatever the site calls itself")
        code, said = call("add", made.folder, place, "--key", site / "site.pub")
        assert code == 0 and "send the new list" in said
    code, said = call("add", made.folder, "south", "--key", site / "site.pub")
    assert code == 2 and "that is the key of 'north'" in said, "two sites with one key: one of them could never come in"
    lists = [(made.site(name) / "sites.pub").read_text() for name in made.sites]
    assert lists[0] == lists[1] and [line.split()[2] for line in lists[0].splitlines()] == ["north", "south"]
    assert (site / "site.pub").read_text().split()[:2] == lists[0].split()[:2], "the newest key of north"
    assert {p.name for p in made.folder.rglob("*.key")} == {"ca.key", "server.key"}
    code, said = call("add", made.folder, "west")
    assert code == 0 and "--key FILE" in said and not (made.site("west") / "site.key").exists()
    with pytest.raises(FedtailError, match="the keys of north, south are at the sites; start the server with"):
        membership.make_missing_keys(load_deployment(made.folder))


def test_a_rehearsal_makes_keys_that_are_missing(tmp_path: Path) -> None:
    assert call("init", tmp_path / "fed", "--sites", "north,south", "--own-data", "--port", free_port())[0] == 0
    made = load_deployment(tmp_path / "fed")
    assert membership.make_missing_keys(made) == ["north", "south"] and membership.make_missing_keys(made) == []
    assert all(key_matches(made.site(name)) for name in made.sites)
    assert len((made.site("north") / "sites.pub").read_text().splitlines()) == 2


@pytest.mark.parametrize("content", ["", "ssh-rsa AAAA x", "a\nb", "ssh-ed25519"])
def test_what_is_no_public_key_is_one_line(deployment: Deployment, tmp_path: Path, content: str) -> None:
    before = (deployment.site("north") / "site.pub").read_text()
    (tmp_path / "key").write_text(content)
    code, said = call("add", deployment.folder, "north", "--key", tmp_path / "key")
    assert code == 2 and "no public key as `fedtail site keys` prints it" in said and len(said.splitlines()) == 1
    assert (deployment.site("north") / "site.pub").read_text() == before
    assert call("add", deployment.folder, "north", "--key", tmp_path / "none")[0] == 2


def test_a_renewed_certificate_is_for_the_same_addresses(deployment: Deployment) -> None:
    server = deployment.server
    old, before = (server / "server.crt").read_bytes(), inspect_certificate(server / "server.crt", server / "ca.crt")
    code, said = call("renew", deployment.folder)
    now = inspect_certificate(server / "server.crt", server / "ca.crt")
    assert code == 0 and f"{now.ends:%Y-%m-%d}" in said and (server / "server.crt").read_bytes() != old
    assert set(now.hosts) == set(before.hosts) and now.signed_by_ca
    assert now.ends - datetime.datetime.now(datetime.UTC) > datetime.timedelta(days=800)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add", "north"), "site 'north' already exists in"),
        (("add", "../x"), "site name '../x' is not allowed"),
        (("add", "west"), "is a rehearsal, whose sites are the clients of one data set"),
        (("remove", "nord"), "'nord'"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(deployment: Deployment, words: tuple[str, str], said: str) -> None:
    code, output = call(words[0], deployment.folder, words[1])
    assert code == 2 and said in output and "Traceback" not in output


def test_the_last_site_stays_and_a_missing_ca_is_named(deployment: Deployment) -> None:
    for name in ("north", "east"):
        membership.remove_site(load_deployment(deployment.folder), name)
    code, output = call("remove", deployment.folder, "south")
    assert code == 2 and "is the last site" in output
    (deployment.server / "server.crt").unlink()
    assert call("renew", deployment.folder)[0] == 0, "one that was lost"
    seen = inspect_certificate(deployment.server / "server.crt", deployment.server / "ca.crt")
    assert set(seen.hosts) == {"127.0.0.1", "localhost"}
    (deployment.server / "ca.key").write_text("x")
    code, output = call("renew", deployment.folder)
    assert code == 2 and "restore ca.key and ca.crt" in output
    (deployment.server / "ca.key").unlink()
    code, output = call("renew", deployment.folder)
    assert code == 2 and "restore the CA's key" in output


def test_a_key_that_a_sleeping_superlink_knows_is_not_forgotten_silently(deployment: Deployment) -> None:
    (deployment.server / "superlink.db").touch()
    code, output = call("remove", deployment.folder, "north")
    assert code == 2 and "it knows the key of 'north', and must be told" in output
