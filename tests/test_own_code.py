"""A method, a strategy, a data set, a model and a metric from files outside the package, as CONTRIBUTING.md says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedtail.cli
import fedtail.registry
from fedtail.core.metrics import METRICS
from fedtail.data import DATASETS
from fedtail.datasets import load
from fedtail.errors import FedtailError
from fedtail.federate.protocol.transport import InProcess
from fedtail.federate.server import federate
from fedtail.federate.site.config import load_site
from fedtail.federate.site.site import open_site
from fedtail.methods import METHODS
from fedtail.rates import RATES
from fedtail.report import load_run, write_report
from fedtail.runs.config import load_config
from fedtail.runs.execution import run
from fedtail.settings import Settings
from tests.cli.test_errors import call

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"
COMMANDS = re.findall(r"`fedtail run ([^`]*)`", GUIDE.read_text(encoding="utf-8"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The guide's examples in a folder of their own, which is the working folder."""
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S):
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(METRICS, "_own", dict(METRICS._own))  # other tests' records must not have this one's metric
    return tmp_path


def settings(name: str, **more: Any) -> Settings:
    flags = {
        "data.name": "my_data.py:spirals",
        "data.clients": 3,
        "method.name": "my_method.py:SignSGD",
        "rates.name": "my_rates.py:Rising",
        "model.name": "my_model.py:wide",
        "run.metric": "my_metric.py:worst_class",
        "run.select": "best",
        "run.rounds": 3,
        "run.name": name,
    }
    return load_config(None, [f"{key}={value}" for key, value in more.items()], flags)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_guide_runs(capsys, monkeypatch, files: Path, command: str) -> None:
    code, out, err = call(capsys, monkeypatch, "run", *command.split(), "--rounds", "2", "-q", "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["rounds"] == 2


def test_all_five_together_agree_on_every_path_of_the_simulator(files: Path) -> None:
    models = {}
    for path in ("reference", "batched", "graph"):
        result = run(settings(path, **{"engine.path": path}))
        models[path] = result.x
        assert result.history[-1]["rates"] == [pytest.approx(0.35)] * 3
        assert 0 <= result.test["my_metric.py:worst_class"] <= 1
    for path in ("batched", "graph"):
        torch.testing.assert_close(models[path], models["reference"], rtol=1e-3, atol=1e-4)


def test_the_report_calls_them_as_their_author_does(files: Path) -> None:
    folder = run(settings("mine")).folder
    assert folder is not None
    page = write_report([load_run(folder)], files / "report.html", "mine", metric="my_metric.py:worst_class")
    text = page.read_text(encoding="utf-8")
    assert "SignSGD" in text and "Worst class" in text


def sites(files: Path, policy: str) -> InProcess:
    (files / "config.toml").write_text(settings("shared").to_toml())
    handles = {}
    for k in range(3):
        folder = files / f"site{k}"
        folder.mkdir(exist_ok=True)
        data = f'[data]\nkind = "slice"\nconfig = "{files}/config.toml"\nclient = {k}\n'
        (folder / "site.toml").write_text(f'[site]\nname = "site{k}"\n{data}[policy]\ntrust = "server"\n{policy}')
        handles[k] = open_site(load_site(folder / "site.toml")).handle
    return InProcess(handles)


def test_real_sites_run_it_where_their_policy_allows_the_code_and_give_the_simulators_bits(files: Path) -> None:
    options = {"engine.path": "reference"}
    names = ["site0", "site1", "site2"]
    with pytest.raises(FedtailError, match=r"is custom code that is not on its list"):
        federate(settings("refused", **options), sites(files, ""), names)
    allowed = 'code = ["my_method.py:SignSGD", "my_model.py:wide", "my_metric.py:worst_class"]\n'
    there = federate(settings("there", **options), sites(files, allowed), names)
    here = run(settings("here", **options))
    assert there.folder is not None and here.folder is not None
    a, b = (load_file(folder / "model.safetensors") for folder in (here.folder, there.folder))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_method_is_checked_on_every_engine_before_it_is_trusted(capsys, monkeypatch, files: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # what a shell has; a run takes one
    try:
        code, out, _ = call(capsys, monkeypatch, "methods", "check", "my_method.py:SignSGD")
        assert code == 0 and out.count("yes") == 8 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    text = (files / "my_method.py").read_text()
    (files / "bad.py").write_text(text.replace(".sign(), step.state", ".sign() * __import__('torch').rand(1), {}"))
    code, out, err = call(capsys, monkeypatch, "methods", "check", "bad.py:SignSGD")
    assert code == 2 and "no   the same seed gives the same bits" in out and "fails" in err.splitlines()[-1]
    assert "draws from torch's global generator (aten.rand.default)" in out
    (files / "worse.py").write_text(
        text.replace(".sign(), step.state", ".sign() * __import__('random').random(), step.state")
    )
    code, out, _ = call(capsys, monkeypatch, "methods", "check", "worse.py:SignSGD")
    assert code == 2 and "two runs with the same seed differ" in out


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("method.name", "my_rates.py:Rising", "not a subclass of fedtail.methods.Method"),
        ("rates.name", "my_method.py:SignSGD", "not a subclass of fedtail.rates.RateStrategy"),
        ("method.name", "my_method.py:Signed", "has no 'Signed'"),
        ("method.name", "missing.py:Mine", "there is no file"),
        ("run.metric", "my_model.py:nn", "not a Metric or a function of Evidence"),
        ("data.name", "no_module:spirals", "cannot import 'no_module'"),
    ],
)
def test_what_cannot_be_used_is_one_line(files: Path, key: str, name: str, words: str) -> None:
    with pytest.raises(FedtailError, match=words):
        run(load_config(None, [f"{key}={name}"]))


def test_an_installed_package_adds_entries_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint, EntryPoints

    points = EntryPoints([EntryPoint("twin", "fedtail.methods.fedavg:FedAvg", "fedtail.methods")])
    monkeypatch.setattr(fedtail.registry, "entry_points", lambda **by: points.select(**by))
    assert "twin" in METHODS and "twin" in list(METHODS)
    monkeypatch.setattr(METHODS, "adapt", lambda name, found: found)  # FedAvg keeps its own name
    assert METHODS.build("twin").weight_decay == 0.0


RAISES = [
    (
        "my_method.py",
        "step.grads.sum(dim=-2)",
        "step.missing",
        r"AttributeError in .*my_method.py, line \d+: .*missing",
    ),
    ("my_method.py", ", step.state\n", "\n", r"unpack.* \(with .*method 'my_method.py:SignSGD'"),
    (
        "my_rates.py",
        "self.done_rounds += 1",
        "1 / 0",
        r"ZeroDivisionError in .*my_rates.py, line \d+: division by zero",
    ),
    ("my_rates.py", "[:, None]", "", r"IndexError: .*\(with .*rate strategy 'my_rates.py:Rising'"),
    ("my_data.py", "def draw", "open('none.csv')\n\n    def draw", r"FileNotFoundError in .*my_data.py, line \d+"),
    ("my_metric.py", "evidence.recall", "evidence.nothing", r"AttributeError in .*my_metric.py, line \d+: .*nothing"),
    (
        "my_data.py",
        "torch.tensor(y)",
        "torch.tensor(y[1:])",
        r"data set 'my_data.py:spirals', training has 300 inputs but",
    ),
    ("my_data.py", "torch.tensor(y)", "torch.tensor(y) - 1", r"labels must be 0..1, got -1..0"),
    (
        "my_data.py",
        "rng.normal(0, 0.02",
        "np.nan * rng.normal(0, 0.02",
        r"training has 600 values that are not finite",
    ),
    ("my_data.py", '"common", "rare"', '"rare", "rare"', r"classes must be two or more different names"),
    ("my_data.py", "return Pooled(", "return dict(", r"data set 'my_data.py:spirals' returned a dict, not a .*Pooled"),
]


@pytest.mark.parametrize(("file", "right", "wrong", "words"), RAISES)
def test_a_mistake_in_a_users_file_is_one_line_with_its_place(
    capsys, monkeypatch, files: Path, file: str, right: str, wrong: str, words: str
) -> None:
    for registry in (METHODS, RATES, DATASETS, METRICS):
        monkeypatch.setattr(registry, "_own", {})
    monkeypatch.setattr(fedtail.registry, "OWN", {})
    text = (files / file).read_text()
    assert right in text
    (files / file).write_text(text.replace(right, wrong))
    flags = ["--dataset", "my_data.py:spirals", "--method", "my_method.py:SignSGD", "--rates", "my_rates.py:Rising"]
    settings = ["run.metric=my_metric.py:worst_class", "run.select=best", "--rounds", "1", "-q", "--json"]
    code, out, err = call(capsys, monkeypatch, "run", *flags, *settings)
    assert code == 2 and "Traceback" not in err, err
    assert re.search(words, json.loads(out.splitlines()[-1])["error"]), out


def test_an_error_that_no_code_of_the_users_has_part_in_keeps_its_traceback(monkeypatch) -> None:
    monkeypatch.setattr(fedtail.registry, "OWN", {})
    monkeypatch.setattr(fedtail.cli, "app", lambda *_, **__: {}["a defect of ours"])
    monkeypatch.setattr(sys, "argv", ["fedtail"])
    with pytest.raises(KeyError):
        fedtail.cli.main()


def test_arrays_and_whole_floats_will_do_for_samples(files: Path) -> None:
    text = (files / "my_data.py").read_text()
    arrays = text.replace("torch.tensor(x, dtype=torch.float32), torch.tensor(y)", "x, y.astype(float)")
    (files / "arrays.py").write_text(arrays)
    one, two = (load(f"{file}.py:spirals") for file in ("my_data", "arrays"))
    assert torch.equal(one.train.x, two.train.x) and torch.equal(one.test.y, two.test.y)
