"""The rules of the house that no other tool checks."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import fedtail
from fedtail.version import VERSION

SOURCE = Path(fedtail.__file__).parent
OPTIONAL = ("fedtail.federate.flower", "fedtail.federate.nvflare", "fedtail.__main__")
PACKAGES = [
    m.name for m in pkgutil.walk_packages([str(SOURCE)], "fedtail.") if m.ispkg and not m.name.startswith(OPTIONAL)
]


@pytest.mark.parametrize("package", ["fedtail", *PACKAGES])
def test_a_module_is_not_shadowed_by_a_function(package: str) -> None:
    """After `import fedtail.x.y as m`, m is a module."""
    found = importlib.import_module(package)
    for module in pkgutil.iter_modules(found.__path__):
        value = getattr(found, module.name, None)
        assert value is None or inspect.ismodule(value), f"{package}.{module.name} is {value!r}"


def test_reports_read_run_folders_only() -> None:
    allowed = ("fedtail.report", "fedtail.runs.record", "fedtail.rounds.history")
    allowed += (
        "fedtail.runs.record",
        "fedtail.runs.monitor",  # its state is the record of a model's life, as a folder is that of a run
        "fedtail.core",
        "fedtail.settings",
        "fedtail.errors",
        "fedtail.files",
        "fedtail.plots",
        "fedtail.words",
        "fedtail.version",
    )
    for file in (SOURCE / "report").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedtail"):
                assert str(node.module).startswith(allowed), f"{file.name} imports {node.module}"


def test_no_dependency_hides_in_a_string() -> None:
    """A module named in a string is an import that no contract sees."""
    modules = {m.name for m in pkgutil.walk_packages([str(SOURCE)], "fedtail.") if m.name.count(".") > 1}
    for file in SOURCE.rglob("*.py"):
        if file == SOURCE / "__init__.py":
            continue  # names are imported when used; the same imports stand there for the contract
        tree = ast.parse(file.read_text())
        docs = {id(n.body[0].value) for n in ast.walk(tree) if hasattr(n, "body") and isinstance(n.body, list)
                and n.body and isinstance(n.body[0], ast.Expr)}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                named = [m for m in modules if m in node.value.split("``")[0]]
                assert not named or "\n" in node.value.strip() or "see" in node.value, f"{file}: {node.value!r}"


def test_most_functions_that_take_records_build_them_by_keyword() -> None:
    """No `# fmt: skip` but where a table is easier to read than a column of keywords."""
    skips = [f for f in SOURCE.rglob("*.py") for line in f.read_text().splitlines() if "# fmt: skip" in line]
    assert len(skips) <= 25, f"{len(skips)}: {sorted({str(f.relative_to(SOURCE)) for f in skips})}"


def test_no_run_folder_and_no_model_is_in_the_tree() -> None:
    root = Path(__file__).parents[1]
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = [f for f in listed.stdout.splitlines() if f.endswith((".safetensors", "/result.json", ".npz", ".pt"))]
    assert not found, found


def test_the_version_is_declared_once_and_is_the_changelogs() -> None:
    root = Path(__file__).parents[1]
    newest = re.search(r"^## (\d\S*)", (root / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None and newest[1] == VERSION == fedtail.__version__
    about = tomllib.loads((root / "pyproject.toml").read_text())
    assert about["project"]["dynamic"] == ["version"] and "version" not in about["project"]
    assert root / about["tool"]["hatch"]["version"]["path"] == Path(inspect.getfile(fedtail.version))
    experiments = tomllib.loads((root / "experiments" / "pyproject.toml").read_text())
    assert experiments["project"]["version"] == VERSION
    again = [f for f in SOURCE.rglob("*.py") if f'"{VERSION}"' in f.read_text() and f.name != "version.py"]
    asked = [f for f in SOURCE.rglob("*.py") if re.search(r"""version\(["']fedtail["']\)""", f.read_text())]
    assert not again and not asked, "fedtail.version.VERSION says it, whatever is installed"
