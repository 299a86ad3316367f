"""The user's own network by ``module:callable`` or ``file.py:callable``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fedtail.errors import FedtailError
from fedtail.models import build_model

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, width=4):
        super().__init__()
        self.body = nn.LazyLinear(width)
        self.head = nn.Linear(width, num_classes)
    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())

def both(shape, count):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], count))

def registry_style(input_shape, n_classes, **options):
    return nn.Linear(input_shape[0], n_classes, **options)

ready = nn.Linear(6, 3)
wrong = lambda: nn.Linear(6, 1000)
number = 3
returns_number = lambda: 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_nets.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("my_nets", None)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("my_nets:Net", {}),
        ("my_nets:Net", {"width": 7}),
        ("my_nets:both", {}),
        ("my_nets:registry_style", {"bias": False}),
        ("my_nets:ready", {}),
        ("my_nets.py:Net", {"width": 2}),
    ],
)
def test_classes_functions_and_instances_are_accepted(folder: Path, name: str, options: dict[str, object]) -> None:
    path = list(sys.path)
    model = build_model(name, (6,), 3, **options)
    assert model(torch.zeros(4, 6)).shape == (4, 3)
    assert not any(isinstance(p, nn.UninitializedParameter) for p in model.parameters())
    assert sys.path == path


def test_an_instance_is_copied_so_that_runs_stay_apart(folder: Path) -> None:
    first, second = (build_model("my_nets:ready", (6,), 3) for _ in range(2))
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert not torch.equal(next(first.parameters()), next(second.parameters()))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("my_nets:Nett", {}, "has no 'Nett' .it defines: Net,"),
        ("no_such_module:Net", {}, "cannot import 'no_such_module'"),
        ("missing.py:Net", {}, "no file 'missing.py'"),
        ("my_nets:", {}, "not of the form"),
        ("my_nets:number", {}, "is a int"),
        ("my_nets:returns_number", {}, "returned a int"),
        ("my_nets:wrong", {}, r"\(2, 3\), not \(2, 1000\)"),
        ("my_nets:Net", {"with": 3}, "no option 'with' .allowed: width"),
    ],
)
def test_mistakes_are_one_clear_line(folder: Path, name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(FedtailError, match=words) as caught:
        build_model(name, (6,), 3, **options)
    assert "\n" not in str(caught.value)


def test_a_module_that_does_not_fit_the_samples_is_refused(folder: Path) -> None:
    with pytest.raises(FedtailError, match=r"does not accept samples of shape \(5,\)"):
        build_model("my_nets:ready", (5,), 3)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "def net(input_shape, n_classes):\n    raise OSError('a\\nb')\n",
            "OSError in .*, line 2: a;",
        ),
        ("x = 1 / 0\n", "ZeroDivisionError in .*, line 1: division by zero; use --debug for the full traceback"),
        ("def net(:\n", "SyntaxError in .*, line 1"),
    ],
)
def test_code_that_fails_is_one_line_with_its_place(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "failing.py").write_text(code)
    with pytest.raises(FedtailError, match=words) as raised:
        build_model(f"{tmp_path / 'failing.py'}:net", (4,), 2)
    assert "\n" not in str(raised.value)
