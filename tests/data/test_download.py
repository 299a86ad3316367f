"""Downloads against a local server: whatever goes wrong, one clear line and nothing half-written."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedtail.data import sources
from fedtail.data.sources import Remote, Source, cache_root, data_root, fetch, is_here, locate
from fedtail.errors import FedtailError

BODY = bytes(range(256)) * 4096  # 1 MiB
MD5 = "md5:" + hashlib.md5(BODY).hexdigest()


@dataclass
class Site:
    """What the server does, and what it was asked."""

    base: str = ""
    body: bytes = BODY
    status: int = 200
    cut: int | None = None
    """Bytes to send before the connection is closed."""
    asked: int = 0


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    state = Site()
    monkeypatch.delenv("FEDTAIL_OFFLINE", raising=False)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked += 1
            if state.status != 200:
                self.send_error(state.status)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(state.body)))
            self.end_headers()
            self.wfile.write(state.body[: state.cut])

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    state.base = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


def test_a_file_is_fetched_once(site: Site, tmp_path: Path) -> None:
    target = tmp_path / "sub" / "x.bin"
    for _ in range(2):
        fetch(Remote(f"{site.base}/x.bin", MD5), target)
    assert target.read_bytes() == BODY and site.asked == 1
    assert files(tmp_path) == ["x.bin"]


def test_a_wrong_checksum_leaves_nothing_behind(site: Site, tmp_path: Path) -> None:
    with pytest.raises(FedtailError, match=r"has checksum md5:\w+ instead of md5:0+, so nothing was kept.*by hand"):
        fetch(Remote(f"{site.base}/x.bin", "md5:" + "0" * 32), tmp_path / "x.bin")
    assert files(tmp_path) == []


def test_a_broken_connection_leaves_nothing_behind(site: Site, tmp_path: Path) -> None:
    site.cut = 300_000
    with pytest.raises(FedtailError, match=r"so nothing was kept; the connection was cut.*run again|cannot download"):
        fetch(Remote(f"{site.base}/x.bin", MD5), tmp_path / "x.bin")
    assert files(tmp_path) == []
    site.cut = None
    fetch(Remote(f"{site.base}/x.bin", MD5), tmp_path / "x.bin")
    assert (tmp_path / "x.bin").read_bytes() == BODY


def test_no_network_names_the_url_and_the_way_by_hand(tmp_path: Path) -> None:
    with pytest.raises(FedtailError, match=r"cannot download http://127.0.0.1:9/x.bin.*by hand to .*x.bin, or set FED"):
        fetch(Remote("http://127.0.0.1:9/x.bin", MD5), tmp_path / "x.bin", timeout=2)
    assert files(tmp_path) == []


@pytest.mark.parametrize("status", [403, 404, 500])
def test_an_http_error_is_one_line(site: Site, tmp_path: Path, status: int) -> None:
    site.status = status
    with pytest.raises(FedtailError, match=f"answered {status} .*by hand") as error:
        fetch(Remote(f"{site.base}/x.bin", MD5), tmp_path / "x.bin")
    assert "\n" not in str(error.value)
    assert files(tmp_path) == []


def test_offline_forbids_downloads(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAIL_OFFLINE", "1")
    with pytest.raises(FedtailError, match="FEDTAIL_OFFLINE forbids"):
        fetch(Remote(f"{site.base}/x.bin", MD5), tmp_path / "x.bin")
    assert site.asked == 0


def test_a_folder_that_cannot_be_written_is_one_line(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(FedtailError, match=r"cannot write to .*--data-dir"):
        fetch(Remote(f"{site.base}/x.bin", MD5), tmp_path / "file" / "x.bin")


def test_two_at_once_do_not_mix(site: Site, tmp_path: Path) -> None:
    remote, target = Remote(f"{site.base}/x.bin", MD5), tmp_path / "x.bin"
    threads = [threading.Thread(target=fetch, args=(remote, target)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert target.read_bytes() == BODY and files(tmp_path) == ["x.bin"]


def archive(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, body in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


def _serve(site: Site, monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    site.body = body
    remote = Remote(f"{site.base}/toy.tar.gz", "sha256:" + hashlib.sha256(body).hexdigest())
    source = Source("toy", "toy-bin", ("a.bin", "b.bin"), "http://page", "free", (remote,))
    monkeypatch.setitem(sources.SOURCES, "toy", source)


def test_an_archive_is_unpacked_to_its_official_layout(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve(site, monkeypatch, archive({"toy-bin/a.bin": b"A", "toy-bin/b.bin": b"B", "../evil": b"no"}))
    assert not is_here("toy", tmp_path)
    folder = locate("toy", tmp_path)
    assert folder == tmp_path / "toy-bin" and is_here("toy", tmp_path)
    assert files(tmp_path) == ["a.bin", "b.bin"] and not (tmp_path.parent / "evil").exists()


def test_an_archive_put_there_by_hand_is_checked_too(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = archive({"toy-bin/a.bin": b"A", "toy-bin/b.bin": b"B"})
    _serve(site, monkeypatch, body)
    (tmp_path / "toy.tar.gz").write_bytes(body[:-5])
    with pytest.raises(FedtailError, match=r"toy.tar.gz has checksum .* instead of .*; delete it and run again"):
        locate("toy", tmp_path)
    (tmp_path / "toy.tar.gz").write_bytes(body)
    locate("toy", tmp_path)
    assert site.asked == 0 and files(tmp_path) == ["a.bin", "b.bin"]


def test_an_archive_without_the_expected_files_leaves_no_folder(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve(site, monkeypatch, archive({"toy-bin/a.bin": b"A"}))
    with pytest.raises(FedtailError, match="not the expected archive"):
        locate("toy", tmp_path)
    assert not (tmp_path / "toy-bin").exists()


def test_single_files_are_fetched_into_the_folder(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remotes = tuple(Remote(f"{site.base}/{n}", MD5) for n in ("a", "b"))
    monkeypatch.setitem(sources.SOURCES, "toy", Source("toy", "toy", ("a", "b"), "http://page", "free", remotes))
    locate("toy", tmp_path)
    assert files(tmp_path) == ["a", "b"]


def test_a_set_without_a_link_says_what_to_fetch_from_where(tmp_path: Path) -> None:
    with pytest.raises(
        FedtailError, match=r"no stable direct link; download UNSW_NB15_training-set.csv .*research.unsw"
    ):
        locate("unsw", tmp_path)


def test_the_data_folder_is_the_option_then_the_environment_then_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDTAIL_DATA", str(tmp_path / "env"))
    assert data_root("given") == Path("given") and data_root() == tmp_path / "env"
    monkeypatch.delenv("FEDTAIL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FEDTAIL_CACHE", raising=False)
    assert data_root() == tmp_path / "fedtail" / "data" and cache_root() == tmp_path / "fedtail"


def test_every_public_set_has_a_page_terms_and_a_way_to_get_it() -> None:
    for name, source in sources.SOURCES.items():
        assert source.page.startswith("https://") and source.terms and source.files, name
        assert source.remotes or source.by_hand, name
        for remote in source.remotes:
            kind, digest = remote.checksum.split(":")
            assert remote.url.startswith("https://") and len(digest) == {"md5": 32, "sha256": 64}[kind]
