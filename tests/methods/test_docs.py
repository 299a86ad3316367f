"""docs/methods.md and the names in reports cannot fall behind the registry."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedtail.methods import METHODS
from fedtail.methods.registry import describe_methods, methods_markdown

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")


def test_the_table_is_what_the_command_prints() -> None:
    assert methods_markdown() in PAGE, "run: fedtail methods --markdown, and put the table into docs/methods.md"


def test_every_method_has_a_section_and_every_section_a_method() -> None:
    sections = re.findall(r"^## ([a-z_]+)$", PAGE, flags=re.MULTILINE)
    assert sorted(sections) == sorted(METHODS)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_section_names_the_method_as_the_registry_does(name: str) -> None:
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert f"**{METHODS.build(name).title}.**" in section
    assert len(section.split()) > 25


def test_descriptions_are_plain_values_with_a_paper() -> None:
    for method in json.loads(json.dumps(describe_methods())):
        assert re.search(r"(19|20)\d\d$", method["paper"]), method["name"]
        assert method["wire"] and method["client_state"]
