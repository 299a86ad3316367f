"""What the documentation shows is run: Python blocks, marked commands, the site itself.

All Python blocks of a page run in order in one namespace; ``<!-- skip: reason -->`` above a block leaves it out.
Console blocks below ``<!-- test -->`` are run; every other ``$ fedtail ...`` line must at least parse. A block below
``<!-- file: name -->`` is a file that these commands find.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import typer

import fedtail as ft
from fedtail.cli import app
from fedtail.cli.options import FLAGS, config_values, split_arguments
from fedtail.data import DATASETS
from fedtail.errors import FedtailError
from fedtail.methods import METHODS
from fedtail.rates import RATES
from fedtail.runs.config import load_config
from tests.browser import complaints, forget, requests, start

ROOT = Path(__file__).parent.parent
OWN_TEST = {"your-data.md", "models.md"}
"""Pages whose commands and Python depend on each other; they have a test of their own."""
FIRST = {"README.md", "index.md", "notebooks.md"}
"""Pages whose Python is the first that somebody runs: every class is found in the end."""
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>test|(?:skip|file:)[^>]*?) -->\s*)?^```(?P<kind>\w+)\n(?P<body>.*?)^```", re.S | re.M
)


def blocks(page: Path, kind: str) -> list[tuple[str, str]]:
    """(mark, body) of the page's fenced blocks of a kind."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [(m["mark"] or "", m["body"]) for m in found if m["kind"] == kind]


def runnable(page: Path) -> list[str]:
    """The page's Python blocks, without those marked to be left out."""
    return [body for mark, body in blocks(page, "python") if not mark.startswith("skip")]


def commands(page: Path, *, marked: bool) -> list[str]:
    """``fedtail`` commands of the page's console blocks, without prompt and comment."""
    lines = [line for mark, body in blocks(page, "console") if (mark == "test") == marked for line in body.splitlines()]
    return [line[2:] for line in lines if line.startswith("$ fedtail ")]


def named(pages: list[Path]) -> list[object]:
    return [pytest.param(p, id=p.name) for p in pages]


@pytest.fixture
def registries() -> Iterator[None]:
    """Methods that a page registers are forgotten again."""
    kept = [(r, dict(r._entries)) for r in (METHODS, RATES, DATASETS)]
    yield
    for registry, entries in kept:
        registry._entries.clear()
        registry._entries.update(entries)


SOURCES = ROOT / "src"
EXAMPLES = [p for p in sorted((SOURCES / "fedtail").rglob("*.py")) if ">>> " in p.read_text(encoding="utf-8")]


@pytest.mark.parametrize("file", named(EXAMPLES))
def test_examples_in_docstrings_run(file: Path) -> None:
    module = importlib.import_module(".".join(file.relative_to(SOURCES).with_suffix("").parts))
    failed, tried = doctest.testmod(module)
    assert tried and not failed


@pytest.mark.parametrize("page", named([p for p in PAGES if p.name not in OWN_TEST and runnable(p)]))
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registries: None) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for body in runnable(page):
        exec(compile(body, page.name, "exec"), module.__dict__)
    if page.name in FIRST:
        results = [value for value in vars(module).values() if isinstance(value, ft.Result)]
        assert results and all(min(result.test["per_class_accuracy"]) > 0.3 for result in results)


@pytest.mark.parametrize("page", named([p for p in PAGES if commands(p, marked=True)]))
def test_marked_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for mark, body in blocks(page, "toml"):
        if mark.startswith("file:"):
            (tmp_path / mark.removeprefix("file:").strip()).write_text(body, encoding="utf-8")
    for command in commands(page, marked=True):
        arguments = shlex.split(command, comments=True)[1:]
        code = app(arguments, standalone_mode=False)
        assert not code, command


@pytest.mark.parametrize("page", named([p for p in PAGES if commands(p, marked=False)]))
def test_every_command_shown_exists_with_its_options(page: Path) -> None:
    for line in commands(page, marked=False):
        arguments = shlex.split(line, comments=True)[1:]
        try:
            context = _parse(typer.main.get_command(app), arguments)
            if context is not None and context.info_name in ("run", "tune") and not page.name.startswith("deploy"):
                _check_settings(context.params, "fedhoo" if context.info_name == "tune" else None)
        except (click.UsageError, FedtailError) as error:
            pytest.fail(f"{page.name}: {line}: {error}")


def _check_settings(given: dict[str, Any], rates: str | None) -> None:
    """Overrides name keys and values that the config takes; files that only a reader has are left out."""
    path, overrides = split_arguments(given["arguments"])
    flags = {name: given[name] for name in FLAGS if name in given}
    if flags["rates"] is None or flags["rates"].endswith((".toml", ".json")):
        flags["rates"] = rates
    load_config(ROOT / path if path and (ROOT / path).is_file() else None, overrides, config_values(flags))


def _parse(command: click.Command, arguments: list[str]) -> click.Context | None:
    """Parse without running: unknown commands, options and bad values raise."""
    if isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        inner = command.get_command(click.Context(command), arguments[0])
        if inner is None:
            raise click.UsageError(f"no command {arguments[0]!r}")
        return _parse(inner, arguments[1:])
    return None if "--help" in arguments else command.make_context(command.name, list(arguments))


def test_drawings_are_what_the_code_draws() -> None:
    drawings = runpy.run_path(str(ROOT / "docs" / "drawings.py"))["DRAWINGS"]
    for name, draw in drawings.items():
        kept = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
        assert kept == draw(), f"{name}.svg is out of date: run python docs/drawings.py"


def test_a_method_tutorial_stays_under_100_lines() -> None:
    first = blocks(ROOT / "docs" / "add-a-method.md", "python")[0][1]
    assert len(first.splitlines()) < 100


(BUILD,) = (
    line.split("#")[0].split("/")[1].split()
    for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    if "$(BIN)/mkdocs" in line
)
"""What ``make docs`` runs."""


@pytest.mark.parametrize("link", ["gone.md", "index.md#gone", "/index.md"])
def test_a_dead_link_ends_the_build(link: str, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra fedtail[docs] is not installed")
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text(
        "site_name: x\nplugins: []\n" + yaml.safe_dump({"validation": yaml.safe_load(text)["validation"]})
    )
    (tmp_path / "docs").mkdir()
    for body, code in ((f"[x]({link})", 1), ("[x](index.md)", 0)):
        (tmp_path / "docs" / "index.md").write_text(f"# x\n\n{body}\n")
        done = subprocess.run([sys.executable, "-m", *BUILD], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    pytest.importorskip("material", reason="the extra fedtail[docs] is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", *BUILD, "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
def test_the_site_is_whole_and_asks_nothing_from_outside(site: Path) -> None:
    pages = list(site.glob("*.html"))
    assert len(pages) > 5
    for page in pages:
        html = page.read_text(encoding="utf-8")
        fetched = re.findall(r"""<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=["']?(https?:)?//""", html)
        assert fetched == [], page.name


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.xdist_group("browser")
def test_the_site_works_and_searches_without_a_server(site: Path, tmp_path: Path) -> None:
    driver = start(tmp_path)
    try:
        driver.set_window_size(1300, 900)
        driver.get("about:blank")
        forget(driver)
        page = site / "index.html"
        driver.get(page.as_uri())
        box = driver.find_element("css selector", "input.md-search__input")
        box.click()
        box.send_keys("FedHOO")
        found: list[str] = []
        for _ in range(100):
            found = [e.text for e in driver.find_elements("css selector", ".md-search-result__item") if e.text]
            if found:
                break
            time.sleep(0.1)
        assert found and "Concepts" in " ".join(found)
        assert complaints(driver) == []
        assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in requests(driver, page))
    finally:
        driver.quit()


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_is_wider_than_its_window(site: Path, width: int, tmp_path: Path) -> None:
    driver = start(tmp_path)
    window = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    try:
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
        wide = []
        for page in sorted(site.glob("*.html")):
            driver.get(page.as_uri())
            if driver.execute_script("return document.documentElement.scrollWidth") > width:
                wide.append(page.name)
        assert wide == []
    finally:
        driver.quit()


def test_pages_made_from_the_code_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    for name, made in hooks.MADE.items():
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert page.partition(hooks.MARK)[2].strip() == made().strip(), f"bring {name} up to date: python docs/hooks.py"
