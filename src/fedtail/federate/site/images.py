"""A site's own images: one folder per class. Pixel sums leave once, before round 0, for a common scaling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtail.core.random import generator
from fedtail.data.federation import Client, Samples, stratified_holdout
from fedtail.data.images.decode import decode
from fedtail.data.images.folders import scan
from fedtail.errors import FedtailError, check_range, one_of
from fedtail.federate.protocol.job import Job
from fedtail.federate.site.table import judge_new
from fedtail.runs.judged import Judged
from fedtail.runs.saved import SavedModel


class ImageSite:
    """``path/class/*.png``. Classes, size and channels are part of what sites agree on, so ``site.toml`` names them."""

    def __init__(
        self,
        path: str | Path,
        classes: Sequence[str],
        size: int | Sequence[int],
        channels: int = 3,
        *,
        validation: float = 0.1,
        test: float = 0.15,
        augment: str | None = "flip",
        new: str | Path = "",
    ) -> None:
        check_range("data.test", test, 0.0, 1.0, open_high=True)
        if channels not in (1, 3):
            raise FedtailError(f"data.channels = {channels!r} is not allowed; use 1 (grey) or 3 (colour)")
        listing = scan(Path(path).expanduser())
        if listing.sites is not None:
            raise FedtailError(
                f"{str(path)!r} must contain one folder per class; it seems to contain folders of several sites"
            )
        unknown = sorted(set(listing.classes) - set(classes))
        if unknown:
            raise one_of("class folder", unknown[0], classes)
        height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        decoded = decode(listing.root, listing.files, (height, width), channels)
        if decoded.bad:
            first, reason = min(decoded.bad.items())
            raise FedtailError(f"cannot read {listing.files[first]} ({reason}); repair or delete it")
        self.classes, self.augment = tuple(classes), augment
        codes = torch.tensor([self.classes.index(c) for c in listing.classes])
        self.samples = Samples(decoded.x, codes)
        self.validation, self.test_share, self.new = validation, test, new

    def judged(self, model: SavedModel) -> Judged:
        return judge_new(model, self.new)

    def schema(self) -> dict[str, Any]:
        return {
            "kind": "images",
            "name": "site images",
            "classes": list(self.classes),
            "input_shape": list(self.samples.x.shape[1:]),
            "augment": self.augment,
            "model": "auto",
        }

    def statistics(self, request: dict[str, Any]) -> dict[str, Any]:
        """Per channel: sum and sum of squares of x / 255 over the training images, and how many pixels there are."""
        rest, _ = self._split(int(request["client"]), int(request["seed"]))
        x = self.samples.x[torch.as_tensor(rest)].to(torch.float64) / 255
        pixels = x.shape[0] * x.shape[2] * x.shape[3]
        return {"sum": x.sum((0, 2, 3)).tolist(), "square": (x**2).sum((0, 2, 3)).tolist(), "pixels": pixels}

    def columns(self, index: int, seed: int) -> list[np.ndarray]:
        rest, _ = self._split(index, seed)
        pixels = self.samples.x[torch.as_tensor(rest)].to(torch.float64) / 255
        return [channel.reshape(-1).numpy() for channel in pixels.unbind(1)]

    def client(self, index: int, job: Job) -> Client:
        rest, _ = self._split(index, job.seed)
        rng = generator(job.seed, "validation", index)
        train, held = stratified_holdout(self.samples.y.numpy(), rest, self.validation, rng)
        return Client(index, self.samples, train, held, job.n_classes, job.transform, job.augment)

    def test(self, index: int, job: Job) -> np.ndarray:
        return self._split(index, job.seed)[1]

    def _split(self, index: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(rest, test) images."""
        y = self.samples.y.numpy()
        return stratified_holdout(y, np.arange(len(y)), self.test_share, generator(seed, "images/test", index))
