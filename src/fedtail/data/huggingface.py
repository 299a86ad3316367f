"""Hugging Face data sets and flwr-datasets federations: rows of tables, or pictures with a class."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fedtail.data.images.folders import Listing, from_listing
from fedtail.data.registry import Pooled
from fedtail.data.tables.pooled import table_from_frame
from fedtail.errors import FedtailError, one_of
from fedtail.words import listing

SITE = "partition"
Parts = list[tuple[str, Any]]
"""Sites by name, or all data under ""."""


def load_pooled(
    data: Any, label: str = "", site: str | None = None, pictures: bool | None = None, **options: Any
) -> Pooled:
    """Samples before they are split: as of ``table_from_frame``, or of ``images`` where a column has pictures.

    ``data``: a ``Dataset``, a ``DatasetDict`` with ``train`` and perhaps ``test``, the folder of either, or a
    ``FederatedDataset``, whose partitions are the sites. ``pictures``: whether they are expected.
    """
    if isinstance(data, str | Path):
        try:
            from datasets import load_from_disk  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise FedtailError(f"{str(data)!r} is a Hugging Face data set: pip install datasets") from None
        data = load_from_disk(str(data))
    parts, test = _parts(data)
    features = parts[0][1].features
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    label = label or next((name for name, kind in kinds.items() if kind == "ClassLabel"), "label")
    for column in (label, site):
        if column is not None and column not in kinds:
            raise one_of("column", column, kinds)
    if site is not None and parts[0][0]:
        raise FedtailError(f"the partitions of a federation are its sites; leave out site = {site!r}")
    frames, everything = [], [*parts, *([] if test is None else [("", test)])]
    for name, part in everything:
        plain = part.remove_columns([n for n in kinds if kinds[n] == "Image"]).to_pandas()
        for column, names in ((n, f.names) for n, f in features.items() if kinds[n] == "ClassLabel"):
            plain[column] = [names[int(v)] if v >= 0 else None for v in plain[column]]
        frames.append(plain.assign(**({SITE: name} if parts[0][0] else {})))
    site = SITE if parts[0][0] else site
    images = [name for name in kinds if kinds[name] == "Image"]
    if len(images) > 1:
        raise FedtailError(f"images in more than one column: {listing(images)}; keep one with remove_columns")
    if pictures not in (None, bool(images)):
        raise FedtailError("no column has images; use --table" if pictures else "use --images for images")
    if not images:
        nested = [name for name, kind in kinds.items() if kind not in ("Value", "ClassLabel")]
        options["exclude"] = [*options.get("exclude", ()), *nested]
        if test is not None:
            options["test"] = frames.pop()
        return table_from_frame(pd.concat(frames, ignore_index=True), label, site, **options)
    with tempfile.TemporaryDirectory() as folder:
        files = list[Path]()
        for image in (image for _, part in everything for image in part[images[0]]):
            files.append(Path(folder, f"{len(files)}.png"))
            image.save(files[-1])
        rows, held = pd.concat(frames), len(files) - (0 if test is None else len(test))
        tested = None if test is None else [i >= held for i in range(len(files))]
        sites = None if site is None else rows[site].astype(str).tolist()
        found = Listing(Path(folder), files, rows[label].astype(str).tolist(), sites, tested)
        return from_listing(found, "images", **{"cache": False, **options})


def _parts(data: Any) -> tuple[Parts, Any]:
    """The training data by site, and the test data where they are apart."""
    if hasattr(data, "load_partition"):
        split, partitioner = next(iter(data.partitioners.items()))
        data.load_partition(0, split)  # from now on partitions are counted
        names = getattr(partitioner, "partition_id_to_natural_id", {})
        parts = [(str(names.get(k, k)), data.load_partition(k, split)) for k in range(partitioner.num_partitions)]
        try:
            return parts, data.load_split("test") if split != "test" else None
        except ValueError:  # there is no such split
            return parts, None
    if isinstance(data, Mapping):
        if "train" not in data:
            raise one_of("split", "train", data)
        return [("", data["train"])], data.get("test")
    if not hasattr(data, "features"):
        raise FedtailError(f"a {type(data).__name__} is no Dataset, DatasetDict or FederatedDataset")
    return [("", data)], None
