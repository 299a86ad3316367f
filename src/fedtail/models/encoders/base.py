"""An encoder: a frozen network from pixels to features, with all that must be the same wherever it is used."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtail.errors import FedtailError, first_line
from fedtail.models.norm import fix_batchnorm
from fedtail.registry import Registry

ENCODERS: Registry[Any] = Registry("encoder", "model.encoder", group="encoders")
"""Names -> functions without arguments that make an ``Encoder`` or an ``nn.Module``."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 224


class Pixels(nn.Module):
    """Stored pixels, 0 to 255, grey or colour, of any size -> what the network was trained on."""

    mean: Tensor
    std: Tensor

    def __init__(self, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, 1 or 3, height, width) -> (N, 3, size, size)."""
        x = x.to(torch.float32) / 255
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        if tuple(x.shape[2:]) != (self.size, self.size):
            shrinks = max(x.shape[2:]) > self.size
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", antialias=shrinks)
        return (x - self.mean) / self.std


class Pool(nn.Module):
    """Maps -> their means: (N, d, h, w) -> (N, d)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(2) if x.ndim > 2 else x


@dataclass(frozen=True)
class Encoding:
    """Which encoder a run uses and how. Plain values: it is in the run folder, and travels to the sites."""

    name: str
    digest: str
    """Of weights and preprocessing; sites must have the very same encoder."""
    shape: tuple[int, ...]
    """Of what is stored of an image: features, or the maps that the first unfrozen block takes."""
    weights: str | None = None
    unfreeze: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Encoding:
        try:
            own = {key: value for key, value in fields.items() if key != "views"}  # of versions before 0.3
            return cls(**{**own, "shape": tuple(int(n) for n in own["shape"])})
        except (KeyError, TypeError, ValueError) as error:
            raise FedtailError(f"malformed encoder description: {type(error).__name__} {error}") from None

    def __str__(self) -> str:
        return f"{self.name} ({self.digest[:12]})"


@dataclass(frozen=True)
class Encoder:
    """A network (N, 3, size, size) -> (N, d), or maps that are averaged; an ``nn.Sequential`` can be unfrozen."""

    name: str
    network: nn.Module
    digest: str
    size: int = SIZE
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    weights: str | None = None

    @classmethod
    def of(cls, name: str, network: nn.Module, weights: str | None = None, **more: Any) -> Encoder:
        """A network with its preprocessing: its attributes ``image_size``, ``mean`` and ``std``, else ImageNet's."""
        size = int(more.get("size", getattr(network, "image_size", SIZE)))
        usual = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
        mean, std = (tuple(map(float, more.get(key, getattr(network, key, usual[key])))) for key in usual)
        digest = more.get("digest") or fingerprint(name, network, size, mean, std)
        network = fix_batchnorm(network.eval()).requires_grad_(False)
        return cls(name, network, digest, size, mean, std, weights)

    def front(self, unfreeze: int = 0) -> nn.Module:
        """What stays frozen: stored pixels (N, C, height, width) -> (N, *shape)."""
        pixels = Pixels(self.size, self.mean, self.std)
        if not unfreeze:
            return nn.Sequential(pixels, self.network, Pool()).eval()
        return nn.Sequential(pixels, *self._blocks(unfreeze)[:-unfreeze]).eval()

    def tail(self, unfreeze: int) -> nn.Sequential:
        """A trainable copy of the last blocks: (N, *shape) -> (N, d)."""
        blocks = copy.deepcopy(self._blocks(unfreeze)[-unfreeze:])
        return nn.Sequential(*blocks, Pool()).requires_grad_(True)

    def _blocks(self, unfreeze: int) -> list[nn.Module]:
        if not isinstance(self.network, nn.Sequential):
            raise FedtailError(
                f"model.unfreeze = {unfreeze}: encoder {self.name!r} is not an nn.Sequential of blocks; use 0, or "
                "your own encoder that is one"
            )
        blocks = list(self.network)
        if unfreeze >= len(blocks):
            raise FedtailError(f"model.unfreeze = {unfreeze} is outside [0, {len(blocks) - 1}] for {self.name!r}")
        return blocks

    @property
    def features(self) -> int:
        """Width of what a head sees."""
        return int(probe(self.front(), self.name).shape[1])

    def use(self, unfreeze: int = 0) -> Encoding:
        """Return the encoder as a run uses it."""
        shape = tuple(probe(self.front(unfreeze), self.name).shape[1:])
        return Encoding(self.name, self.digest, shape, self.weights, unfreeze)


def probe(front: nn.Module, name: str) -> Tensor:
    """(1, *shape) what an encoder makes of one fixed image; one line where it fails."""
    pixels = torch.arange(3 * 64 * 64).mul(37).remainder(256).view(1, 3, 64, 64)
    try:
        with torch.no_grad():
            out = front(pixels)
    except Exception as error:  # whatever the user's code raises
        raise FedtailError(f"encoder {name!r} does not accept an image: {first_line(error)}") from error
    if not isinstance(out, Tensor) or out.ndim < 2 or not torch.isfinite(out).all():
        raise FedtailError(f"encoder {name!r} must return finite features (N, d) or maps (N, d, height, width)")
    return out


def fingerprint(name: str, network: nn.Module, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> str:
    """SHA-256 of the weights, by name and shape, and of the preprocessing."""
    out = hashlib.sha256(json.dumps([1, name, size, mean, std]).encode())
    for key, value in network.state_dict().items():
        out.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
        out.update(value.detach().cpu().contiguous().numpy().tobytes())
    return out.hexdigest()
