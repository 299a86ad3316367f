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

from fedtail.data.tables import propose_schema, schema_text
from fedtail.errors import FedtailError
from fedtail.federate.protocol.transport import InProcess
from fedtail.federate.protocol.wire import Parts, pack, unpack
from fedtail.federate.server import SitesJoined, federate, roster
from fedtail.federate.site.config import load_site
from fedtail.runs.config import check_config
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
        handles[k] = load_site(folder / "site.toml").open_site().handle
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

    settings = config(tables, local={"batch_size": "auto"}, server={"optimizer": "auto"}, run={"name": "crash"})
    with pytest.raises(Killed):
        federate(settings, sites(tables, table_data(tables)), NAMES, on_round=kill)
    agreement = tables / "runs" / "crash" / "federation.json"
    began = json.loads(agreement.read_text())
    assert (began["batch_size"], began["server_optimizer"]) == (16, "none")
    other = {"batch_size": 32, "server_optimizer": "adam"}  # as if its sites had been larger, and more
    agreement.write_text(json.dumps({**began, **other}))
    resumed = federate(settings, sites(tables, table_data(tables)), NAMES, resume=True)
    assert resumed.summary["found"] == other


class Away(InProcess):
    """Sites of which some are away."""

    def __init__(self, inner: InProcess, away: set[int]) -> None:
        super().__init__(inner.sites)
        self.away = away

    def exchange(self, phase: str, payloads: Any, timeout: float | None, take: Any) -> Any:
        errors = super().exchange(phase, {k: v for k, v in payloads.items() if k not in self.away}, timeout, take)
        return {**errors, **{k: "the site is offline" for k in payloads if k in self.away}}

    def close(self) -> None: ...


def test_a_quorum_of_sites_starts_the_run_and_a_late_one_joins(tables: Path) -> None:
    transport = Away(sites(tables, table_data(tables)), {0})

    def arrive(state: Any, record: dict[str, Any], seconds: float) -> None:
        if state.round == 2:
            transport.away.clear()

    settings = config(tables, run={"rounds": 5, "quorum": 0.5})
    there = federate(settings, transport, NAMES, on_round=arrive)
    assert [r["clients"] for r in there.history] == [[1], [1], [1], [0, 1], [0, 1]]
    said = [{f["client"]: f["reason"] for f in r["refused"]} for r in there.history]
    assert said[0] == {0: "the site is offline"} and "has joined" in said[2][0] and said[3] == {}
    assert there.history[0]["faults"] == [{"client": 0, "reason": "hello: the site is offline", "code": "transport"}]
    assert there.folder is not None
    about = json.loads((there.folder / "federation.json").read_text())
    assert about["sites"] == list(NAMES)
    with pytest.raises(FedtailError, match="the sites are not ready: north: the site is offline"):
        federate(config(tables), Away(sites(tables, table_data(tables)), {0}), NAMES)


def test_a_late_site_with_another_schema_is_not_let_in(tables: Path) -> None:
    data = table_data(tables)
    (tables / "other.toml").write_text((tables / "schema.toml").read_text().replace('"c"', '"d"'))
    data["north"] = data["north"].replace("schema.toml", "other.toml")
    transport = Away(sites(tables, data), {0})
    result = federate(
        config(tables, run={"rounds": 2, "quorum": 0.5}), transport, NAMES, on_round=lambda *_: transport.away.clear()
    )
    assert [r["clients"] for r in result.history] == [[1], [1]]
    assert "the data do not fit the run" in result.history[1]["refused"][0]["reason"]


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


def test_a_site_that_leaves_for_good_is_not_asked_any_more_and_keeps_its_number(tables: Path) -> None:
    listed = list(NAMES)
    settings = config(tables, run={"rounds": 4, "name": "shrinks"})

    def leave(state: Any, record: dict[str, Any], seconds: float) -> None:
        if state.round == 2:
            listed.remove("north")

    result = federate(settings, sites(tables, table_data(tables)), NAMES, on_round=leave, members=lambda: tuple(listed))
    assert [r["clients"] for r in result.history] == [[0, 1], [0, 1], [1], [1]], "with a quorum of 1, and no refusals"
    assert not any(r["refused"] for r in result.history)
    assert roster(settings, ["south"], resume=True) == ["north", "south"]


@pytest.mark.parametrize(
    ("method", "rates"),
    [("fedcgnm", "uniform"), ("climb", "uniform"), ("scaffold", "uniform"), ("fedcgnm", "fedhoo")],
)
def test_a_new_site_joins_a_run_with_the_next_number(tables: Path, method: str, rates: str) -> None:
    listed = ["south"]
    data, policy = table_data(tables), ""
    options = {"cold_rounds": 1} if rates == "fedhoo" else {}
    settings = config(
        tables, run={"rounds": 5, "name": "grows"}, method={"name": method}, rates={"name": rates, **options}
    )

    def list_another(state: Any, record: dict[str, Any], seconds: float) -> None:
        if state.round == 2:
            listed.insert(0, "north")

    with pytest.raises(SitesJoined):
        federate(
            settings,
            sites(tables, data, policy, ("south",)),
            roster(settings, listed),
            on_round=list_another,
            members=lambda: tuple(listed),
        )
    names = roster(settings, listed, resume=True)
    assert names == ["south", "north"], "whatever the order of the list"
    result = federate(
        settings, sites(tables, data, policy, tuple(names)), names, resume=True, members=lambda: tuple(listed)
    )
    assert [r["clients"] for r in result.history] == [[0], [0], [0, 1], [0, 1], [0, 1]]
    assert all(len(r["rates"]) == 2 for r in result.history) and torch.isfinite(result.x).all()
    assert result.folder is not None
    assert json.loads((result.folder / "clients.json").read_text())["sites"] == names


def test_sizes_of_a_late_site_are_written_once_it_is_there(tables: Path) -> None:
    transport = Away(sites(tables, table_data(tables)), {0})
    settings = config(tables, run={"rounds": 3, "quorum": 0.5})
    result = federate(settings, transport, NAMES, on_round=lambda *_: transport.away.clear())
    assert result.folder is not None
    about = json.loads((result.folder / "clients.json").read_text())
    assert min(about["sizes"]) > 0 and min(about["validation_sizes"]) > 0


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


@pytest.mark.parametrize(("steps", "refused"), [(1, False), (-1, False), (2, True)])
def test_a_site_one_minor_version_apart_takes_part(tables: Path, steps: int, refused: bool) -> None:
    """Its hello names another version, and the server's job has a setting at its default that it does not know."""
    major, minor = (int(part) for part in VERSION.split(".")[:2])
    transport = sites(tables, table_data(tables))
    honest = transport.sites[1]

    def other(phase: str, parts: Parts) -> Parts:
        asked = unpack(parts)
        job = asked.meta.get("job")
        if job is not None:
            job |= {"shiny": 0, "usual": [*job["usual"], "shiny"]}
        said = unpack(honest(phase, pack(asked)))
        if phase == "hello":
            said.meta["versions"]["fedtail"] = f"{major}.{minor + steps}.0"
        return pack(said)

    transport.sites[1] = other
    if refused:
        with pytest.raises(FedtailError, match="differ by one minor version at most"):
            federate(config(tables), transport, NAMES)
        return
    mixed = federate(config(tables), transport, NAMES)
    assert all(r["clients"] == [0, 1] for r in mixed.history)


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
    assert "training samples, but had" in reason and "when the run began" in reason


def test_a_quorum_that_is_no_whole_number_of_sites_is_met_by_the_next_larger_one(tables: Path) -> None:
    """0.6 of two sites are two."""
    with pytest.raises(FedtailError, match="the sites are not ready: north: the site is offline"):
        federate(config(tables, run={"quorum": 0.6}), Away(sites(tables, table_data(tables)), {0}), NAMES)
