"""The examples in docs/data.md run, and print what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from fedtail.cli.lazy import load
from fedtail.data import DATASETS, SOURCES

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_examples_print_what_the_page_says(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DATASETS, "_entries", dict(DATASETS._entries))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "docs/data.md", "exec"), {"__name__": "docs"})
    said = re.findall(r"^# (.*)$", block, re.M)
    assert printed.getvalue().splitlines() == said


def test_every_data_set_and_source_is_on_the_page() -> None:
    for name in ("digits", "blobs", "cifar10", "cifar100", "adult", "unsw", "elpv", "chips", "images", "table"):
        assert name in DATASETS and f"`{name}`" in PAGE
    assert all(source.page in PAGE or name == "cifar100" for name, source in SOURCES.items())


def test_commands_on_the_page_use_flags_that_exist() -> None:
    known = {
        flag
        for command in (load("run"), load("data").commands["inspect"])
        for parameter in command.params
        for flag in parameter.opts
    }
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert len(used) > 6 and used <= known
