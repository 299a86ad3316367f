"""The server's side over an in-process transport: handshake, own data, policy, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from fedtail.data.tables.schema import schema_text
from fedtail.data.tables.sites import propose_schema
from fedtail.errors import FedtailError
from fedtail.federate.protocol.transport import InProcess
from fedtail.federate.protocol.wire import Parts, pack, unpack
from fedtail.federate.server import federate, roster
from fedtail.federate.site.config import load_site
from fedtail.federate.site.site import open_site
from fedtail.runs.config import changed, check_config
from fedtail.runs.execution import run
from fedtail.version import VERSION

NAMES = ("north", "south")


def sites(root: Path, data: dict[str, str], policy: str = "", names: tuple[str, ...] = NAMES) -> InProcess:
    """Sites from ``site.toml`` files, as a worker would open them."""
    handles = {}
    for k, name in enumerate(names):
        folder = root / name
        folder.mkdir(exist_ok=True)
        (folder / "site.toml").write_text(
            f'[site]\nname = "{name}"\n[data]\n{data[name]}\n[policy]\ntrust = "server"\n{policy}\n'
        )
        handles[k] = open_site(load_site(folder / "site.toml")).handle
    return InProcess(handles)


def config(root: Path, **sections: dict[str, Any]) -> Any:
    raw: dict[str, Any] = {
        "local": {"batch_size": 16}, "run": {"rounds": 3, "seed": 1, "folder": str(root / "runs")}
    }  # fmt: skip
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section}
    return check_config(raw)


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Two tables with numbers, a category and missing values, and the schema both sites agreed on."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "tables"
    folder.mkdir()
    for k, name in enumerate(NAMES):
        n = 150 + 50 * k
        y = rng.random(n) < 0.25
        frame = pd.DataFrame(
            {
                "age": np.where(rng.random(n) < 0.1, np.nan, 40 + 10 * y + rng.normal(0, 5, n)),
                "dose": 1e6 + rng.normal(3 * y, 1.0, n),
                "ward": rng.choice(["a", "b", "c"], n),
                "severe": np.where(y, "yes", "no"),
            }
        )
        frame.to_csv(folder / f"{name}.csv", index=False)
    schema, _ = propose_schema(folder / "north.csv", "severe")
    (tmp_path / "schema.toml").write_text(schema_text(schema))
    return tmp_path


def table_data(root: Path) -> dict[str, str]:
    return {name: f'kind = "table"\npath = "{root}/tables/{name}.csv"\nschema = "{root}/schema.toml"' for name in NAMES}


def test_sites_with_tables_of_their_own_train_the_simulators_model(tables: Path) -> None:
    there = federate(config(tables), sites(tables, table_data(tables)), NAMES)
    data = {"name": "site_tables", "path": str(tables / "tables"), "schema": str(tables / "schema.toml")}
    here = run(config(tables, data=data, engine={"path": "reference"}))
    assert torch.equal(here.x, there.x)
    assert there.test["accuracy"] == here.test["accuracy"]
    assert there.folder is not None and here.folder is not None
    ours, theirs = (json.loads((f / "model.json").read_text()) for f in (here.folder, there.folder))
    assert ours["preprocessing"] == theirs["preprocessing"]
    about = json.loads((there.folder / "clients.json").read_text())
    assert about["sizes"] == here_sizes(here.folder) and "label_map" not in about and "train_counts" not in about
    assert {r["traffic"]["exchanges"] for r in there.history} == {2}, "train, then test and validation at once"
    assert there.test["macro_f1"] == here.test["macro_f1"]


def here_sizes(folder: Path) -> list[int]:
    return list(json.loads((folder / "clients.json").read_text())["sizes"])


def test_a_site_with_another_schema_stops_the_run_with_the_column_named(tables: Path) -> None:
    data = table_data(tables)
    other = (tables / "schema.toml").read_text().replace('"c"', '"d"')
    (tables / "other.toml").write_text(other)
    data["south"] = data["south"].replace("schema.toml", "other.toml")
    with pytest.raises(
        FedtailError, match=r"south: its schema file differs from that of 'north' \(columns \['ward'\]\)"
    ):
        federate(config(tables), sites(tables, data), NAMES)


def test_a_site_can_refuse_the_method_and_the_server_says_so(tables: Path) -> None:
    with pytest.raises(FedtailError, match="north: site policy: the method is not allowed there"):
        federate(config(tables), sites(tables, table_data(tables), 'methods = ["fedavg"]'), NAMES)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"diagnostics": ["alignment", "losses"]}, "'losses' needs the simulator"),
    ],
)
def test_what_a_real_federation_cannot_do_is_refused_and_not_left_out(
    settings: dict[str, Any], reason: str, tables: Path
) -> None:
    with pytest.raises(FedtailError, match=reason):
        federate(config(tables, run=settings), sites(tables, table_data(tables)), NAMES)


def test_a_site_folder_used_twice_is_noticed(tables: Path) -> None:
    transport = sites(tables, table_data(tables))
    transport.sites[1] = transport.sites[0]
    with pytest.raises(FedtailError, match=r"south: its site.toml says it is 'north'"):
        federate(config(tables), transport, NAMES)


def test_a_run_resumed_after_a_crash_ends_with_the_model_of_an_uninterrupted_one(tables: Path) -> None:
    method = {"name": "scaffold"}  # keeps state at the sites
    whole = federate(
        config(tables, method=method, run={"rounds": 4, "name": "whole"}), sites(tables, table_data(tables)), NAMES
    )

    class Killed(Exception):
        pass

    def kill(state: Any, record: dict[str, Any], seconds: float) -> None:
        if state.round == 2:
            raise Killed

    settings = config(tables, method=method, run={"rounds": 4, "name": "crash"})
    with pytest.raises(Killed):
        federate(settings, sites(tables, table_data(tables)), NAMES, on_round=kill)
    resumed = federate(settings, sites(tables, table_data(tables)), NAMES, resume=True)
    assert torch.equal(whole.x, resumed.x)
    assert [r["round"] for r in resumed.history] == [0, 1, 2, 3]


def test_batches_follow_the_sizes_that_sites_tell_as_in_the_simulator(tables: Path) -> None:
    open_sites = ""
    auto, run_of = {"batch_size": "auto"}, {"rounds": 4, "quorum": 0.5}
    said = federate(config(tables, run=run_of), sites(tables, table_data(tables), open_sites), NAMES)
    whole = federate(config(tables, local=auto, run=run_of), sites(tables, table_data(tables), open_sites), NAMES)
    assert torch.equal(whole.x, said.x), "the median of 120 and 160 training rows asks for batches of 16"
    assert whole.summary["found"] == {"batch_size": 16} and whole.folder is not None
    data = {"name": "site_tables", "path": str(tables / "tables"), "schema": str(tables / "schema.toml")}
    here = run(config(tables, local=auto, run=run_of, data=data, engine={"path": "reference"}))
    assert torch.equal(here.x, whole.x)
    notes = json.loads((whole.folder / "clients.json").read_text())["notes"]
    assert any("local.batch_size=auto" in note for note in notes)


def test_a_resumed_run_keeps_the_batches_and_the_optimizer_it_began_with_whoever_is_there_now(tables: Path) -> None:
    class Killed(Exception):
        pass

    def kill(state: Any, record: dict[str, Any], seconds: float) -> None:
        raise Killed

    settings = config(
        tables, local={"batch_size": "auto"}, server={"optimizer": "auto"}, run={"name": "crash", "quorum": 0.5}
    )
    with pytest.raises(Killed):
        federate(settings, sites(tables, table_data(tables)), NAMES, on_round=kill)
    agreement = tables / "runs" / "crash" / "federation.json"
    began = json.loads(agreement.read_text())
    assert began["sizes"] == [108, 144] and began["job"]["local"]["batch_size"] == 16
    resumed = federate(settings, Away(sites(tables, table_data(tables)), {0}), NAMES, resume=True)
    assert resumed.summary["found"] == {"batch_size": 16, "server_optimizer": "none"}


class Away(InProcess):
    """Sites of which some are away."""

    def __init__(self, inner: InProcess, away: set[int]) -> None:
        super().__init__(inner.sites)
        self.away = away

    def exchange(self, phase: str, payloads: Any, timeout: float | None, take: Any) -> Any:
        errors = super().exchange(phase, {k: v for k, v in payloads.items() if k not in self.away}, timeout, take)
        return {**errors, **{k: "the site is offline" for k in payloads if k in self.away}}


def test_a_run_begins_with_all_sites_and_goes_on_with_a_quorum_of_them(tables: Path) -> None:
    transport = Away(sites(tables, table_data(tables)), set())

    def come_and_go(state: Any, record: dict[str, Any], seconds: float) -> None:
        transport.away = {0} if state.round in (1, 2) else set()

    there = federate(config(tables, run={"rounds": 4, "quorum": 0.5}), transport, NAMES, on_round=come_and_go)
    assert [r["clients"] for r in there.history] == [[0, 1], [1], [1], [0, 1]]
    assert [r["reason"] for r in there.history[1]["refused"]] == ["the site is offline"]
    with pytest.raises(FedtailError, match="the sites are not ready: north: the site is offline"):
        federate(config(tables, run={"quorum": 0.5}), Away(sites(tables, table_data(tables)), {0}), NAMES)


def test_a_run_resumed_without_a_site_goes_on_with_what_was_agreed(tables: Path) -> None:
    settings = config(tables, run={"rounds": 4, "name": "crash", "quorum": 0.5})

    class Killed(Exception):
        pass

    def kill(state: Any, record: dict[str, Any], seconds: float) -> None:
        if state.round == 2:
            raise Killed

    with pytest.raises(Killed):
        federate(settings, sites(tables, table_data(tables)), NAMES, on_round=kill)
    before = json.loads((tables / "runs" / "crash" / "federation.json").read_text())["schema"]
    with pytest.raises(FedtailError, match=r"has the sites north, south, in this order, and not south"):
        federate(settings, sites(tables, table_data(tables), names=("south",)), ("south",), resume=True)
    resumed = federate(settings, Away(sites(tables, table_data(tables)), {0}), NAMES, resume=True)
    assert [r["clients"] for r in resumed.history] == [[0, 1], [0, 1], [1], [1]]
    assert resumed.folder is not None
    model = json.loads((resumed.folder / "model.json").read_text())
    assert model["preprocessing"] == before["preprocessing"], "one site alone would have other means"


def test_a_run_goes_on_with_the_sites_it_began_with_whatever_the_list_says_now(tables: Path) -> None:
    settings = config(tables, run={"rounds": 1, "name": "short"})
    federate(settings, sites(tables, table_data(tables)), NAMES)
    assert roster(settings, ["west", "south"], resume=True) == list(NAMES)
    assert roster(config(tables), ["west", "south"]) == ["west", "south"]


def test_the_sites_of_a_resumed_run_are_known_whatever_seed_they_drew(tmp_path: Path) -> None:
    """Under ``blind`` a run's seed is the sites', and not that of the config which resumes it."""
    begun = check_config({"run": {"name": "x", "folder": str(tmp_path), "seed": 3}, "deploy": {"trust": "blind"}})
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.toml").write_text(changed(begun, {"run.seed": 188185546641896}).to_toml())
    assert roster(begun, NAMES, resume=True) == list(NAMES)


def test_sites_with_image_folders_train_and_share_one_scaling(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for name in NAMES:
        for label, level in (("good", 60), ("crack", 190)):
            folder = tmp_path / "images" / name / label
            folder.mkdir(parents=True)
            for i in range(24 if label == "good" else 8):
                pixels = np.clip(rng.normal(level, 20, (8, 8)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    data = {
        name: f'kind = "images"\npath = "{tmp_path}/images/{name}"\nclasses = ["crack", "good"]\nsize = 8\nchannels = 1'
        for name in NAMES
    }
    result = federate(
        config(tmp_path, model={"name": "mlp", "hidden": [8]}, run={"rounds": 8}), sites(tmp_path, data), NAMES
    )
    assert result.test["accuracy"] > 0.9
    assert result.folder is not None
    about = json.loads((result.folder / "model.json").read_text())
    assert about["preprocessing"] == {"kind": "images", "size": [8, 8], "channels": 1}
    assert 0.2 < about["transform"]["mean"][0] < 0.6
    assert load_file(result.folder / "model.safetensors")


def test_a_mistake_in_site_toml_is_one_line(tmp_path: Path) -> None:
    data = dict.fromkeys(NAMES, 'kind = "table"\npath = "x.csv"\nschem = "s"')
    with pytest.raises(FedtailError, match=r"did you mean 'schema'"):
        sites(tmp_path, data)
    with pytest.raises(FedtailError, match=r"missing 1 required positional argument: 'schema'"):
        sites(tmp_path, dict.fromkeys(NAMES, 'kind = "table"\npath = "x.csv"'))


def test_a_site_writes_down_what_it_was_asked_and_what_became_of_it(tables: Path) -> None:
    federate(config(tables), sites(tables, table_data(tables)), NAMES)
    lines = [json.loads(line) for line in (tables / "north" / "audit.jsonl").read_text().splitlines()]
    assert {"hello", "statistics", "train", "confusion"} <= {line["phase"] for line in lines}
    trained = [line for line in lines if line["phase"] == "train"]
    assert [line["round"] for line in trained] == [0, 1, 2]
    assert all(line["verdict"] == "answered" and line["bytes_out"] > 0 and line["run"] for line in trained)
    with pytest.raises(FedtailError):
        federate(config(tables), sites(tables, table_data(tables), 'methods = ["fedavg"]'), NAMES)
    last = json.loads((tables / "north" / "audit.jsonl").read_text().splitlines()[-1])
    assert last["verdict"] == "refused" and "'fedcgnm' is not allowed" in last["reason"]


def test_a_site_of_another_minor_version_is_named(tables: Path) -> None:
    major, minor = (int(part) for part in VERSION.split(".")[:2])
    transport = sites(tables, table_data(tables))
    honest = transport.sites[1]

    def other(phase: str, parts: Parts) -> Parts:
        said = unpack(honest(phase, parts))
        if phase == "hello":
            said.meta["version"] = f"{major}.{minor + 1}.0"
        return pack(said)

    transport.sites[1] = other
    with pytest.raises(
        FedtailError, match=rf"south: runs fedtail {major}.{minor + 1}.0, the server .* install the same"
    ):
        federate(config(tables), transport, NAMES)


def test_a_site_whose_data_changed_meanwhile_does_not_take_part_in_a_resumed_run(tables: Path) -> None:
    settings = config(tables, run={"rounds": 4, "name": "crash", "quorum": 0.5})

    class Killed(Exception):
        pass

    def kill(state: Any, record: dict[str, Any], seconds: float) -> None:
        if state.round == 2:
            raise Killed

    with pytest.raises(Killed):
        federate(settings, sites(tables, table_data(tables)), NAMES, on_round=kill)
    frame = pd.read_csv(tables / "tables" / "north.csv")
    pd.concat([frame, frame.head(40)]).to_csv(tables / "tables" / "north.csv", index=False)
    resumed = federate(settings, sites(tables, table_data(tables)), NAMES, resume=True)
    assert [r["clients"] for r in resumed.history] == [[0, 1], [0, 1], [1], [1]]
    (reason,) = [r["reason"] for r in resumed.history[2]["refused"]]
    assert "training samples, in the handshake 108" in reason


def test_a_quorum_that_is_no_whole_number_of_sites_is_met_by_the_next_larger_one(tables: Path) -> None:
    """0.6 of two sites are two."""
    transport = Away(sites(tables, table_data(tables)), set())
    with pytest.raises(FedtailError, match="1 of 2"):
        federate(config(tables, run={"quorum": 0.6}), transport, NAMES, on_round=lambda *_: transport.away.add(0))
