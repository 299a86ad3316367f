"""The page of a run that goes on: served on this machine alone, and up to date."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedtail.report.watch import Watch
from tests.browser import complaints, forget, start

Writer = Callable[..., Path]


@pytest.fixture
def going_on(run_folder: Writer) -> Iterator[tuple[Watch, Callable[[int], None]]]:
    """A served run folder, and a function that lets the run be so many rounds old."""
    folder = run_folder("a", asked=12, scored=True)
    history = folder / "history.jsonl"
    lines = history.read_text().splitlines(keepends=True)
    (folder / "result.json").unlink(missing_ok=True)

    def at(rounds: int) -> None:
        history.write_text("".join(lines[:rounds]))

    with Watch() as watch:
        watch.folder = folder
        yield watch, at


def ask(watch: Watch, path: str, host: str = "") -> tuple[int, str]:
    port = int(watch.url.rstrip("/").rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(errors="replace")


def test_the_page_is_of_the_rounds_that_are_done(going_on: tuple[Watch, Callable[[int], None]]) -> None:
    watch, at = going_on
    at(0)
    assert ask(watch, "/state") == (200, "round 0") and "The first round is not done" in ask(watch, "/")[1]
    for rounds in (3, 5):
        at(rounds)
        status, page = ask(watch, "/")
        assert status == 200 and ask(watch, "/state")[1] == f"round {rounds}"
        assert f'data-live="round {rounds}"' in page and f"stopped after {rounds} of 12 rounds" not in page


def test_nobody_else_is_answered_and_nothing_else_is_served(going_on: tuple[Watch, Callable[[int], None]]) -> None:
    watch, _ = going_on
    assert watch._server.server_address[0] == "127.0.0.1"
    assert ask(watch, "/", host="evil.example")[0] == 403, "a name elsewhere that resolves to this machine"
    assert ask(watch, "/result.json")[0] == ask(watch, "/../a/config.toml")[0] == 404


@pytest.mark.browser
@pytest.mark.xdist_group("browser")
def test_the_page_updates_itself_keeps_its_folds_and_sees_the_end(
    going_on: tuple[Watch, Callable[[int], None]], tmp_path: Path
) -> None:
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    watch, at = going_on
    at(3)
    driver = start(tmp_path / "profile")

    def wait_for(text: str) -> None:
        wait = WebDriverWait(driver, 60, ignored_exceptions=[StaleElementReferenceException])
        wait.until(lambda d: text in d.find_element("css selector", ".live").text)

    try:
        forget(driver)
        driver.get(watch.url)
        assert "round 3" in driver.find_element("css selector", ".live").text
        driver.execute_script("document.querySelector('details.fold').open = true")
        at(6)
        wait_for("round 6")
        assert driver.execute_script("return document.querySelector('details.fold').open")
        assert complaints(driver) == []
        watch.__exit__()
        wait_for("over")
    finally:
        driver.quit()
