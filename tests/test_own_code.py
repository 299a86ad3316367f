"""A method, a strategy, a data set, a model and a metric from files outside the package, as CONTRIBUTING.md says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedtail.core.metrics import METRICS
from fedtail.errors import FedtailError
from fedtail.federate.protocol.transport import InProcess
from fedtail.federate.server import federate
from fedtail.federate.site.config import load_site
from fedtail.federate.site.site import open_site
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

    import fedtail.registry
    from fedtail.methods import METHODS

    points = EntryPoints([EntryPoint("twin", "fedtail.methods.fedavg:FedAvg", "fedtail.methods")])
    monkeypatch.setattr(fedtail.registry, "entry_points", lambda **by: points.select(**by))
    assert "twin" in METHODS and "twin" in list(METHODS)
    monkeypatch.setattr(METHODS, "adapt", lambda name, found: found)  # FedAvg keeps its own name
    assert METHODS.build("twin").weight_decay == 0.0
