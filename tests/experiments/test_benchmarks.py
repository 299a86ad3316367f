"""The programs in benchmarks/ are no part of the package, but what they use of it by name must be there."""

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(p for folder in ("benchmarks", "notebooks") for p in (ROOT / folder).glob("*.py"))
OPTIONAL = ("flwr", "nvflare", "triton")
"""What only some programs need."""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_what_a_benchmark_uses_of_the_package_is_there(program: Path) -> None:
    tree, modules = ast.parse(program.read_text(encoding="utf-8")), dict[str, ModuleType]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("fedtail"):
            continue
        try:
            module = importlib.import_module(str(node.module))
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            continue
        for alias in node.names:
            if not hasattr(module, alias.name):
                importlib.import_module(f"{node.module}.{alias.name}")
            if isinstance(found := getattr(module, alias.name), ModuleType):
                modules[alias.asname or alias.name] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert hasattr(modules[node.value.id], node.attr), f"{node.value.id}.{node.attr}"
