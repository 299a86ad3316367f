"""Commands that are imported when they are called: torch takes seconds, and ``fedtail --help`` needs none of it."""

from __future__ import annotations

import ast
import difflib
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

MARKUP: Any = "markdown"
UsageError: Any = typer.BadParameter.__mro__[1]
"""click's, or that of the copy of click that later versions of typer bring; the next is what both derive from."""
ClickException: Any = UsageError.__mro__[1]
COMMANDS = {
    "demo": "demo:demo",
    "data": "data:app",
    "run": "run:run_command",
    "compare": "compare:compare_command",
    "tune": "tune:tune",
    "report": "report:report",
    "predict": "predict:predict",
    "plan": "plan:plan_command",
    "evaluate": "evaluate:evaluate",
    "monitor": "monitor:monitor",
    "recalibrate": "monitor:recalibrate_command",
    "export": "export:export",
    "methods": "methods:app",
    "deploy": "deploy:app",
    "site": "site:app",
}
"""Command -> its module in this package, and there the function or the group of commands."""
MISSING = (
    "{!r} is a command of the package fedtail-experiments, which is not installed; in a checkout of fedtail: "
    "pip install -e experiments"
)
EXPERIMENTS = ("reproduce", "bench")
"""Commands of the package ``fedtail-experiments``."""


@cache
def all_commands() -> dict[str, str]:
    """Every command with its full place: ``COMMANDS``, then the entry points ``fedtail.commands`` of other packages."""
    ours = {name: f"{__package__}.{place}" for name, place in COMMANDS.items()}
    return ours | {point.name: point.value for point in entry_points(group="fedtail.commands")}


class LazyCommand(TyperCommand):
    """A command as a list shows it; what it does is imported when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name, help=said_of(name))

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        assert self.name is not None
        return load(self.name).make_context(info_name, args, parent=parent, **extra)


class LazyGroup(TyperGroup):
    """A group whose commands are those of ``all_commands``."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(all_commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return LazyCommand(cmd_name) if cmd_name in all_commands() else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            if args[0] in EXPERIMENTS:
                raise UsageError(MISSING.format(args[0]), ctx) from None
            # typer only guesses among commands that are loaded
            close = difflib.get_close_matches(args[0], all_commands(), n=1)
            if not close or "Did you mean" in error.message:
                raise
            raise UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from None


@cache
def load(name: str) -> Any:
    """Import a command."""
    module, _, attribute = all_commands()[name].partition(":")
    command = getattr(import_module(module), attribute)
    parent = typer.Typer(add_completion=False, rich_markup_mode=MARKUP)
    parent.callback()(lambda: None)
    if isinstance(command, typer.Typer):
        parent.add_typer(command, name=name)
    else:
        parent.command(name)(command)
    group: Any = get_command(parent)
    return group.commands[name]


def said_of(name: str) -> str:
    """The help of a command as its source has it: the docstring of its function, or what a group has as help."""
    module, _, attribute = all_commands()[name].partition(":")
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if own := functions.get(name if attribute == "app" else attribute):
        return ast.get_docstring(own) or ""
    named = (node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "help")
    return next(str(value.value) for value in named if isinstance(value, ast.Constant))  # of typer.Typer(), the first
