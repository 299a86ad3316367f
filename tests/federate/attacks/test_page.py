"""The threat model's page names settings, tests and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

from fedtail.federate.site.config import Rules
from fedtail.settings import Settings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")


def test_every_test_and_file_on_the_page_exists() -> None:
    here = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests" / "federate").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 15 and not [name for name in named if f"def {name}(" not in here]
    assert not [file for file in re.findall(r"`(tests/[\w/]+\.py)`", PAGE) if not (ROOT / file).is_file()]


def test_every_setting_on_the_page_exists() -> None:
    sections = {**Settings.model_fields, **Rules.model_fields}
    found = re.findall(r"`([a-z]+)\.([a-z_]+)(?: = [^`]*)?`", PAGE)
    named = {(section, key) for section, key in found if section in sections and key != "log"}
    assert len(named) > 7
    for section, key in named:
        fields = sections[section].annotation.model_fields  # type: ignore[union-attr]
        assert key in fields, f"{section}.{key}"
