"""A folder of images as a data set: ``site/class/*.png`` or ``class/*.png``, perhaps under ``train/`` and ``test/``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtail.core.random import generator
from fedtail.data.federation import Samples, Transform, stratified_holdout
from fedtail.data.images.decode import EXTENSIONS, LARGEST, choose_size, decode, survey
from fedtail.data.registry import DATASETS, Pooled
from fedtail.data.tables.notes import class_notes
from fedtail.data.tables.read import is_saved
from fedtail.errors import FedtailError, check_range, one_of

HELD = 0.15
"""Share of the images to test on, where there is no test folder."""


@dataclass(frozen=True)
class Listing:
    """Image files with their labels; ``test`` marks files that were set apart as the test set."""

    root: Path
    files: list[Path]
    classes: list[str]
    sites: list[str] | None
    test: list[bool] | None
    notes: tuple[str, ...] = ()


@DATASETS.add("images")
def images(
    path: str,
    size: int | tuple[int, int] | None = None,
    largest: int = LARGEST,
    color: str = "auto",
    background: str | None = None,
    test_fraction: float = HELD,
    skip_corrupt: bool = False,
    cache: bool = True,
    label: str = "",
    site: str | None = None,
    seed: int = 0,
) -> Pooled:
    """Images in folders, one folder per class, optionally inside one folder per site; or a Hugging Face data set.

    Args:
        path: Folder with ``site/class/*`` or ``class/*``; a ``train`` and a ``test`` folder may lie above either. Or
            one that a Hugging Face ``Dataset`` was saved to, whose columns ``label`` and ``site`` name.
        size: Side, or (height, width), that all images are resized to; by default the size they share, else the
            median square, no side beyond ``largest``.
        largest: Longest side where ``size`` does not say; 48 by default for a network from scratch on a CPU.
        color: ``grey``, ``rgb`` or ``auto`` (grey if every image is).
        background: Class that means "nothing found"; adds the defect score to the metrics.
        test_fraction: Share of each class at each site that becomes the test set, unless there is a test folder.
        skip_corrupt: Leave out files that cannot be read instead of stopping at them.
        cache: Keep decoded images in the user's cache folder.
    """
    shared: dict[str, Any] = {
        "size": size,
        "largest": largest,
        "color": color,
        "background": background,
        "test_fraction": test_fraction,
        "skip_corrupt": skip_corrupt,
        "seed": seed,
    }
    if is_saved(path):
        from fedtail.data.huggingface import load_pooled  # which needs this module

        return load_pooled(path, label, site, pictures=True, **shared)
    return from_listing(scan(Path(path).expanduser()), Path(path).name or "images", cache=cache, **shared)


def scan(root: Path) -> Listing:
    """Find the images under ``root`` and read site, class and split off their folders."""
    if not root.is_dir():
        raise FedtailError(f"data.path = {str(root)!r} is not a folder; give DIR with DIR/site/class/* or DIR/class/*")
    everything = sorted(p for p in root.rglob("*") if not any(q.startswith(".") for q in p.relative_to(root).parts))
    files = [p for p in everything if p.is_file() and p.suffix.lower() in EXTENSIONS]
    if not files:
        raise FedtailError(f"no images ({', '.join(sorted(EXTENSIONS))}) under {root}")
    parts = [p.relative_to(root).parts for p in files]
    tops = {p[0] for p in parts}
    test = None
    if tops == {"train", "test"}:
        test = [p[0] == "test" for p in parts]
        parts = [p[1:] for p in parts]
    depths = {len(p) for p in parts}
    if depths not in ({2}, {3}):
        shallow, deep = (
            next(f for f, p in zip(files, parts, strict=True) if len(p) == d) for d in (min(depths), max(depths))
        )
        example = f"{shallow.relative_to(root)}" + (f" next to {deep.relative_to(root)}" if shallow != deep else "")
        raise FedtailError(f"{root} must contain only class/image or only site/class/image, but has {example}")
    by_site = depths == {3}
    _check_empty(root, everything, files, by_site, test is not None)
    ignored = sum(p.is_file() for p in everything) - len(files)
    return Listing(
        root,
        files,
        [p[-2] for p in parts],
        [p[0] for p in parts] if by_site else None,
        test,
        (f"{ignored:,} files that are not images were ignored",) if ignored else (),
    )


def from_listing(
    listing: Listing,
    name: str,
    *,
    size: int | tuple[int, int] | None = None,
    largest: int = LARGEST,
    color: str = "auto",
    background: str | None = None,
    augment: str | None = "flip",
    test_fraction: float = HELD,
    skip_corrupt: bool = False,
    cache: bool = True,
    seed: int = 0,
) -> Pooled:
    """Decode a listing and cut off the test set."""
    if color not in ("auto", "grey", "rgb"):
        raise one_of("data.color", color, ("auto", "grey", "rgb"))
    check_range("data.test_fraction", test_fraction, 0.0, 1.0, open_low=True, open_high=True)
    if listing.test is not None and test_fraction != HELD:
        raise FedtailError(f"data.test_fraction = {test_fraction:g} has no effect beside the test folder; leave it out")
    check_range("data.largest", largest, 4, 2048)
    headers = survey(listing.files)
    listing, _ = _readable(listing, {i: h for i, h in enumerate(headers) if isinstance(h, str)}, skip_corrupt)
    good = [h for h in headers if not isinstance(h, str)]
    channels = 1 if color == "grey" or (color == "auto" and all(h[2] for h in good)) else 3
    shape, note = choose_size([h[:2] for h in good], size, largest)
    decoded = decode(listing.root, listing.files, shape, channels, cache=cache)
    listing, kept = _readable(listing, decoded.bad, skip_corrupt)
    x = decoded.x[torch.from_numpy(kept)] if decoded.bad else decoded.x
    names, codes = np.unique(listing.classes, return_inverse=True)
    if len(names) < 2:
        raise FedtailError(f"{listing.root} has only one class ({str(names[0])!r}); it needs two class folders or more")
    if background is not None and background not in names:
        raise one_of("data.background", background, [str(v) for v in names])
    sites = np.array(listing.sites) if listing.sites else None
    y = codes.astype(np.int64)
    train, test = _split(y, sites, listing.test, test_fraction, seed)
    whole, classes = Samples(x, torch.from_numpy(y)), tuple(str(v) for v in names)
    samples = whole.take(train)
    mean, std = channel_statistics(samples.x)
    return Pooled(
        samples,
        whole.take(test),
        classes=classes,
        name=name,
        transform=Transform(1 / 255, mean, std),
        augment=augment,
        sites=sites[train] if sites is not None else None,
        test_sites=sites[test] if sites is not None else None,
        model="auto",
        background=None if background is None else [str(v) for v in names].index(background),
        preprocessing={"kind": "images", "size": list(shape), "channels": channels},
        notes=tuple(n for n in (*listing.notes, note, *class_notes(y[train], whole.take(test), classes)) if n),
    )


def channel_statistics(x: torch.Tensor, sample: int = 2000) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per-channel mean and standard deviation of x / 255, from at most ``sample`` evenly spread images."""
    step = max(1, len(x) // sample)
    part = x[::step].to(torch.float64) / 255
    std = part.std((0, 2, 3), correction=0).clamp_min(1e-3)
    return tuple(round(v, 4) for v in part.mean((0, 2, 3)).tolist()), tuple(round(v, 4) for v in std.tolist())


def _split(
    y: np.ndarray, sites: np.ndarray | None, test: list[bool] | None, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    if test is not None:
        mask = np.array(test)
        unseen = np.setdiff1d(y[mask], y[~mask])
        if not (~mask).any() or not mask.any() or unseen.size:
            raise FedtailError(
                "the train folder must have every class of the test folder, and neither folder may be empty"
            )
        return np.flatnonzero(~mask), np.flatnonzero(mask)
    strata = y if sites is None else np.unique(sites, return_inverse=True)[1] * (y.max() + 1) + y
    train, held = stratified_holdout(strata, np.arange(len(y)), fraction, generator(seed, "images/test"))
    if not len(held):
        raise FedtailError(f"{len(y)} images are too few for a test set of {fraction:g} of each class; add images")
    return train, held


def _check_empty(root: Path, everything: Sequence[Path], files: Sequence[Path], by_site: bool, splits: bool) -> None:
    """A site folder without images is a mistake the user wants to hear of."""
    level = (1 if splits else 0) + 1
    what = "site" if by_site else "class"
    full = {p.relative_to(root).parts[:level] for p in files}
    for folder in everything:
        parts = folder.relative_to(root).parts
        if folder.is_dir() and len(parts) == level and parts not in full:
            raise FedtailError(f"{what} folder {folder} has no images; add some or remove the folder")


def _readable(listing: Listing, bad: Mapping[int, str], skip: bool) -> tuple[Listing, np.ndarray]:
    """The listing without files that cannot be read, and the places of the others in it; an error unless they may be
    skipped. ``bad``: place -> what is wrong."""
    kept = np.setdiff1d(np.arange(len(listing.files)), list(bad))
    if not bad:
        return listing, kept
    place, reason = min(bad.items())
    first = f"{listing.files[place]} ({reason})"
    if not (skip and len(kept)):
        more = f" (and {len(bad) - 1:,} more)" if len(bad) > 1 else ""
        raise FedtailError(f"cannot read {first}{more}; repair or delete it, or skip it with data.skip_corrupt=true")
    note = f"{len(bad):,} files could not be read and were skipped; the first is {first}"
    files, classes = [listing.files[i] for i in kept], [listing.classes[i] for i in kept]
    sites, test = listing.sites and [listing.sites[i] for i in kept], listing.test and [listing.test[i] for i in kept]
    return Listing(listing.root, files, classes, sites, test, (*listing.notes, note)), kept
