"""Sites that encode their own images: the head alone travels, and all sites have the same encoder or none starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedtail.errors import FedtailError
from fedtail.federate.protocol.policy import Policy, PolicyError
from fedtail.federate.protocol.transport import Errors, InProcess, Phase, Take
from fedtail.federate.protocol.wire import Parts, size_of
from fedtail.federate.server import federate
from fedtail.federate.site.config import load_site
from fedtail.federate.site.site import Site, open_site
from fedtail.models.encoders.opening import open_encoder
from fedtail.runs import encoding
from fedtail.runs.config import changed, check_config
from fedtail.runs.execution import run
from fedtail.runs.saved import load_model
from fedtail.settings import Settings
from tests.encoders import TINY, draw_folder, tiny

NAMES = ("north", "south")
ALLOW = f'encoders = ["{TINY}"]'
HEAD = 3 * 32 + 3


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("photos"), {"north": (40, 12, 6), "south": (20, 24, 8)})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAIL_CACHE", str(tmp_path / "cache"))


def config(root: Path, photos: Path, **model: Any) -> Settings:
    return check_config(
        {
            "data": {"name": "images", "path": str(photos), "clients": 2},
            "model": {"encoder": TINY, **model},
            "local": {"batch_size": 16},
            "run": {"rounds": 3, "seed": 1, "folder": str(root / "runs")},
            "engine": {"path": "reference"},
        }
    )


class Scales(InProcess):
    """Weighs what travels in training."""

    def __init__(self, sites: dict[int, Any]) -> None:
        super().__init__(sites)
        self.down: list[int] = []
        self.up: list[int] = []

    def exchange(self, phase: str, payloads: Mapping[int, Parts], timeout: float | None, take: Take) -> Errors:
        def measured(client: int, parts: Parts) -> None:
            if phase == Phase.TRAIN:
                self.up.append(size_of(parts))
            take(client, parts)

        if phase == Phase.TRAIN:
            self.down += map(size_of, payloads.values())
        return super().exchange(phase, payloads, timeout, measured)


def open_sites(root: Path, data: Mapping[str, str], policy: str = ALLOW) -> dict[int, Site]:
    out = {}
    for k, name in enumerate(NAMES):
        (root / name).mkdir(exist_ok=True)
        rules = f'[policy]\ntrust = "server"\n{policy}\n'
        (root / name / "site.toml").write_text(f'[site]\nname = "{name}"\n[data]\n{data[name]}\n{rules}')
        out[k] = open_site(load_site(root / name / "site.toml"))
    return out


def slices(root: Path, settings: Settings, policy: str = ALLOW) -> Scales:
    (root / "config.toml").write_text(settings.to_toml())
    data = {name: f'kind = "slice"\nconfig = "{root}/config.toml"\nclient = {k}' for k, name in enumerate(NAMES)}
    return Scales({k: site.handle for k, site in open_sites(root, data, policy).items()})


def own_images(photos: Path) -> dict[str, str]:
    classes = '["kind0", "kind1", "kind2"]'
    return {n: f'kind = "images"\npath = "{photos}/{n}"\nclasses = {classes}\nsize = 20\nchannels = 1' for n in NAMES}


@pytest.mark.parametrize("model", [{}, {"unfreeze": 1}, {"name": "cosine"}], ids=str)
def test_a_federation_trains_the_simulators_head_bit_by_bit(
    tmp_path: Path, photos: Path, model: dict[str, Any]
) -> None:
    settings = config(tmp_path, photos, **model)
    there, here = federate(settings, slices(tmp_path, settings), NAMES), run(settings)
    assert torch.equal(there.x, here.x)
    assert np.array_equal(there.confusion, here.confusion)
    assert there.about.encoder == here.about.encoder and there.about.input_shape == (1, 20, 20)


def test_logistic_regression_over_sites_is_the_simulators_bit_by_bit(tmp_path: Path, photos: Path) -> None:
    settings = changed(config(tmp_path, photos), {"method.name": "logistic", "run.rounds": 6})
    there, here = federate(settings, slices(tmp_path, settings), NAMES), run(settings)
    assert torch.equal(there.x, here.x)
    assert here.test["macro_f1"] > 0.5


def test_the_head_alone_is_on_the_wire(tmp_path: Path, photos: Path) -> None:
    settings = config(tmp_path, photos)
    scales = slices(tmp_path, settings)
    result = federate(settings, scales, NAMES)
    assert result.x.numel() == HEAD
    frame = 3000  # names, numbers and headers of a message
    assert max(scales.down) < 4 * HEAD + frame and max(scales.up) < 4 * HEAD + frame
    whole = sum(p.numel() for p in tiny().parameters())
    assert 4 * whole > 10 * 4 * HEAD + frame, "the encoder would not fit into such a message"


def test_sites_with_their_own_folders_encode_at_home_and_share_no_pixel_sums(tmp_path: Path, photos: Path) -> None:
    sites = open_sites(tmp_path, own_images(photos))
    asked: list[str] = []

    class Listening(Scales):
        def exchange(self, phase: str, payloads: Mapping[int, Parts], timeout: float | None, take: Take) -> Errors:
            asked.append(phase)
            return super().exchange(phase, payloads, timeout, take)

    settings = config(tmp_path, photos)
    settings = check_config({**settings.model_dump(exclude={"data"}), "data": {"name": "sites", "clients": 2}})
    result = federate(settings, Listening({k: s.handle for k, s in sites.items()}), NAMES)
    assert Phase.STATISTICS not in asked
    assert result.folder is not None
    model = load_model(result.folder, allow_code=True)
    assert model.predict(sorted(photos.rglob("*.png"))[:5]).shape == (5,)
    assert list((tmp_path / "north" / "features").rglob("*.safetensors")), "kept beside the site's own files"


def test_a_site_opens_no_encoder_that_its_policy_does_not_name(tmp_path: Path, photos: Path) -> None:
    settings = config(tmp_path, photos)
    with pytest.raises(FedtailError, match=r"site policy: the encoder is not allowed there"):
        federate(settings, slices(tmp_path, settings, ""), NAMES)
    Policy().check_encoder("efficientnet_lite0")
    for name in ("timm:resnet10t", "weights.onnx", TINY):
        with pytest.raises(PolicyError, match=r"add it to policy\.encoders"):
            Policy().check_encoder(name)
    with pytest.raises(PolicyError, match=r"\(allowed: timm:resnet10t\)"):
        Policy(encoders=("timm:resnet10t",)).check_encoder("efficientnet_lite0")


def test_sites_with_other_weights_do_not_start(tmp_path: Path, photos: Path) -> None:
    other = tiny()
    with torch.no_grad():
        other[0][0].bias += 1  # type: ignore[index]
    files = [tmp_path / f"{name}.safetensors" for name in NAMES]
    for file, network in zip(files, (tiny(), other), strict=True):
        save_file(network.state_dict(), file)
    settings = config(tmp_path, photos, encoder=f"{TINY}@weights.safetensors")
    sites = open_sites(tmp_path, own_images(photos))

    def at(k: int) -> Any:
        """Each site finds its own file under the name that the server gives."""

        def handle(phase: str, parts: Parts) -> Parts:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(_linked(tmp_path / NAMES[k], files[k]))
                patch.syspath_prepend(str(Path(__file__).parents[2]))
                return sites[k].handle(phase, parts)

        return handle

    with pytest.raises(FedtailError, match=r"south: its encoder is tests.encoders:tiny \(\w+\), but at 'north' it is"):
        federate(settings, InProcess({k: at(k) for k in sites}), NAMES)


def _linked(folder: Path, file: Path) -> Path:
    target = folder / "weights.safetensors"
    if not target.exists():
        target.write_bytes(file.read_bytes())
    return folder


def test_auto_is_what_is_installed_at_the_sites(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "default_encoder", lambda: TINY)
    monkeypatch.setattr("fedtail.federate.site.site.default_encoder", lambda: TINY)
    settings = config(tmp_path, photos, encoder="auto")
    result = federate(settings, slices(tmp_path, settings), NAMES)
    assert result.about.encoder["digest"] == open_encoder(TINY).digest and result.x.numel() == HEAD
