"""Commands that messages tell a user to try exist, with the options they are told with."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from typer.main import get_command

from fedtail.cli import app
from fedtail.cli.lazy import LazyCommand, load

SOURCE = Path(__file__).parents[2] / "src"
TOLD = re.compile(r"\bfedtail ((?:[a-z]+ )*[a-z]+)([^`\n|;&#]*)")
FILES = sorted(f for f in SOURCE.rglob("*.py") if TOLD.search(f.read_text(encoding="utf-8")))


def unknown(text: str) -> list[str]:
    """Options in a text that the command before them does not have."""
    out = []
    for told in TOLD.finditer(text):
        command: click.Command = get_command(app)
        for word in told[1].split():
            inner = command.get_command(click.Context(command), word) if isinstance(command, click.Group) else None
            inner = load(word) if isinstance(inner, LazyCommand) else inner
            if inner is None:
                break
            command = inner
        if isinstance(command, click.Group) and not command.invoke_without_command:
            continue  # a sentence about fedtail
        known = {"--help", *(o for p in command.params for o in (*p.opts, *p.secondary_opts))}
        given = re.findall(r"(?<![\w-])--[a-z][a-z-]*", told[2])
        out += [f"{command.name} {option}" for option in given if option not in known]
    return out


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_options_that_messages_name_exist(file: Path) -> None:
    assert unknown(file.read_text(encoding="utf-8")) == []


def test_an_option_that_a_command_lacks_is_seen() -> None:
    assert unknown("try: fedtail run --data adult --method fedavg") == ["run --data"]
    assert unknown("`fedtail deploy init --sites a,b`; see fedtail data schema --help") == []
