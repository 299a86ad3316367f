"""A federation from data of the user's own: tables, images, arrays, data sets of torch and Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from fedtail.core.random import generator
from fedtail.data.federation import Federation, Samples, assemble, stratified_holdout
from fedtail.data.huggingface import load_pooled
from fedtail.data.partitions import SPLITTING, partition
from fedtail.data.registry import DATASETS, Pooled
from fedtail.data.tables.labels import label_type, need_column
from fedtail.data.tables.pooled import table_from_frame
from fedtail.errors import FedtailError
from fedtail.registry import is_own

SITE, LABEL = "site", "label"


def from_tables(
    tables: Mapping[str, pd.DataFrame] | pd.DataFrame | str | Path, label: str, site: str | None = None, **options: Any
) -> Federation:
    """See ``Federation.from_tables``."""
    splitting = _splitting(options)
    if isinstance(tables, Mapping):
        if not tables or site is not None:
            raise FedtailError("from_tables() takes one table per site without `site`, or one table with `site`")
        named = [frame.assign(**{SITE: name}) for name, frame in tables.items()]
        pooled = table_from_frame(pd.concat(named, ignore_index=True), label, SITE, **options)
    elif isinstance(tables, pd.DataFrame):
        pooled = table_from_frame(tables, label, site, **options)
    else:
        if site is not None:
            options["site"] = site
        name = "table" if Path(tables).is_file() else "site_tables"
        pooled = DATASETS.build(name, path=str(tables), label=label, **options)
    return _split(pooled, splitting, "table")


def from_rows(x: Any, y: Any, sites: Any = None, **options: Any) -> Federation:
    """See ``Federation.from_rows``."""
    column = sites if isinstance(sites, str) and isinstance(x, pd.DataFrame) else None
    if column is not None:
        need_column("site", column, list(x.columns), "the table")
        sites = x[column]
    given = x if isinstance(x, pd.DataFrame) else np.asarray(x)
    labels, owners = np.asarray(y), None if sites is None else np.asarray(sites)
    for name, values in (("y", labels), ("sites", owners)):
        if values is not None and values.shape != (len(given),):
            raise FedtailError(f"{name} has shape {values.shape}, but there are {len(given):,} rows; give one per row")
    if owners is not None:
        gone = pd.isna(owners)  # such rows are left out; as text they would be a site called "nan"
        owners = np.where(gone, np.array(None), owners.astype(str))
        if gone.any() and not isinstance(given, pd.DataFrame) and given.ndim != 2:
            raise FedtailError(f"sites: {int(gone.sum()):,} of {len(gone):,} samples have none; leave them out")
    if not isinstance(given, pd.DataFrame) and given.ndim != 2:
        names = np.zeros(1) if owners is None else np.unique(owners)
        parts = [np.arange(len(labels)) if owners is None else np.flatnonzero(owners == name) for name in names]
        where = None if owners is None else [str(name) for name in names]
        return Federation.from_arrays([(given[part], labels[part]) for part in parts], sites=where, **options)
    if not isinstance(given, pd.DataFrame):
        given = pd.DataFrame(given, columns=[str(i) for i in range(given.shape[1])])
        if given.shape[1] and all(kind.kind in "biuf" for kind in given.dtypes):
            options.setdefault("numbers", list(given.columns))
    label, site = (next(n for n in (what, f"{what}_", f"__{what}__") if n not in given) for what in (LABEL, SITE))
    frame = given.assign(**{label: labels})
    if owners is None:
        alone: dict[str, Any] = {} if {"clients", "partition"} & options.keys() else {"clients": 1, "partition": "iid"}
        return from_tables(frame, label, **alone, **options)
    return from_tables(frame.assign(**{column or site: owners}), label, column or site, **options)


def from_images(folder: str | Path, **options: Any) -> Federation:
    """See ``Federation.from_images``."""
    splitting = _splitting(options)
    return _split(DATASETS.build("images", path=str(folder), **options), splitting, "images")


def from_huggingface(data: Any, label: str = "", site: str | None = None, **options: Any) -> Federation:
    """See ``Federation.from_huggingface``."""
    splitting = _splitting(options)
    pooled = load_pooled(data, label, site, **options)
    return _split(pooled, splitting, str(pooled.preprocessing["kind"]))


def _splitting(options: dict[str, Any]) -> dict[str, Any]:
    """The options that are of ``partition``, which leave the others."""
    return {key: options.pop(key) for key in list(options) if key in SPLITTING}


def _split(pooled: Pooled, splitting: Mapping[str, Any], own: str) -> Federation:
    return replace(partition(pooled, **splitting), own=own)


def from_arrays(
    clients: Sequence[tuple[Any, Any]],
    test: tuple[Any, Any] | None,
    classes: Sequence[str] | None,
    sites: Sequence[str] | None,
    test_fraction: float,
    **more: Any,
) -> Federation:
    """See ``Federation.from_arrays``."""
    if not isinstance(clients, Sequence) or not clients:
        raise FedtailError("from_arrays needs a list with one (x, y) pair per client")
    if sites is not None and len(sites) != len(clients):
        raise FedtailError(f"{len(sites)} site names for {len(clients)} clients")
    if sites is not None and len(set(sites)) < len(sites):
        raise FedtailError(f"site names must be different, got {list(sites)!r}")
    who = [f"client {k}" + (f" ({sites[k]!r})" if sites is not None else "") for k in range(len(clients))]
    pairs = [_pair(pair, name) for pair, name in zip(clients, who, strict=True)]
    tested = None if test is None else _pair(test, "the test set")
    shape = tuple(pairs[0][0].shape[1:])
    for (x, _), name in zip([*pairs, *([tested] if tested else [])], [*who, "the test set"], strict=False):
        if tuple(x.shape[1:]) != shape:
            raise FedtailError(f"{name} has inputs of shape {tuple(x.shape[1:])}, {who[0]} of shape {shape}")
        if not len(x) and name != "the test set":
            raise FedtailError(f"{name} has no samples; leave it out")
    raw = [y for _, y in pairs]
    labels, y_test, names = _labels(raw, tested[1] if tested else raw[0][:0], classes, who)
    dtype = torch.uint8 if all(x.dtype == torch.uint8 for x, _ in pairs) else torch.float32
    y = np.concatenate(labels)
    samples = Samples(torch.cat([x.to(dtype) for x, _ in pairs]), torch.as_tensor(y))
    parts = [np.arange(a, b) for a, b in pairwise(np.cumsum([0, *map(len, labels)]))]
    owners, seed = np.empty(0, dtype=np.int64), more["seed"]
    if tested is None:
        draws = [generator(seed, "arrays/test", k) for k in range(len(parts))]
        cut = [stratified_holdout(y, p, test_fraction, d, "test_fraction") for p, d in zip(parts, draws, strict=True)]
        parts, held = [rest for rest, _ in cut], [held for _, held in cut]
        tests = samples.take(np.concatenate(held))
        owners = np.repeat(np.arange(len(held)), [len(rows) for rows in held])
    else:
        tests = Samples(tested[0].to(dtype), torch.as_tensor(y_test))
    kind = label_type(np.concatenate(raw) if classes is None else classes)
    own = {"own": "table" if samples.x.ndim == 2 else "arrays", "model": "auto"}
    rest = {"classes": names, "label_type": kind, "sites": sites, "test_clients": owners, **own, **more}
    return assemble(samples, parts, tests, **rest)


def whole(name: str, pooled: Any) -> Pooled:
    """What a data set by name returned: of one in the user's own code, samples and labels are looked at."""
    if not is_own(name):
        return pooled
    if not isinstance(pooled, Pooled):
        raise FedtailError(f"data set {name!r} returned a {type(pooled).__name__}, not a fedtail.data.Pooled")
    who = [f"data set {name!r}, {part}" for part in ("training", "test")]
    (x, y), (x_test, y_test) = (_pair((p.x, p.y), w) for p, w in zip((pooled.train, pooled.test), who, strict=True))
    (codes,), tested, _ = _labels([y], y_test, pooled.classes, who[:1])
    return replace(pooled, train=Samples(x, torch.as_tensor(codes)), test=Samples(x_test, torch.as_tensor(tested)))


def _pair(pair: Any, name: str) -> tuple[Tensor, np.ndarray]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise FedtailError(f"{name} is a {type(pair).__name__}, not an (x, y) pair")
    x, y = _inputs(pair[0], name), np.asarray(pair[1])
    if y.ndim == 2 and y.shape[1] > 1:
        raise FedtailError(f"{name}: labels of shape {y.shape} are not one class per sample; use y.argmax(1)")
    y = y.reshape(-1)
    if len(x) != len(y):
        raise FedtailError(f"{name} has {len(x)} inputs but {len(y)} labels")
    if y.dtype.kind == "f" and not (np.isfinite(y).all() and (y == np.rint(y)).all()):
        raise FedtailError(f"{name}: labels are fractions or not finite; a label is a class name or a whole number")
    return x, y.astype(np.int64) if y.dtype.kind in "fb" else y


def _inputs(raw: Any, name: str) -> Tensor:
    try:
        x = raw.detach().cpu() if isinstance(raw, Tensor) else torch.as_tensor(np.require(raw, requirements="W"))
    except (TypeError, ValueError) as error:
        raise FedtailError(
            f"{name}: inputs are not numbers of one shape ({' '.join(str(error).split())[:120]}); for tables with "
            "text use fedtail.data.table_from_frame"
        ) from error
    x = x.contiguous()
    if x.is_complex() or x.ndim == 0:
        raise FedtailError(f"{name}: inputs must be an array of real numbers, (samples, ...)")
    if x.is_floating_point():
        x = x.float()
        bad = (~torch.isfinite(x)).nonzero()
        if len(bad):
            raise FedtailError(f"{name} has {len(bad):,} values that are not finite (first in row {int(bad[0, 0])})")
    if x.ndim == 1:
        raise FedtailError(f"{name}: inputs have shape {tuple(x.shape)}; give (samples, features), e.g. x[:, None]")
    return x


def _labels(
    raw: list[np.ndarray], raw_test: np.ndarray, classes: Sequence[str] | None, who: list[str]
) -> tuple[list[np.ndarray], np.ndarray, list[str]]:
    if classes is None:
        try:
            names = np.unique(np.concatenate(raw))
            unknown = np.setdiff1d(raw_test, names)
        except TypeError as error:
            raise FedtailError("labels mix numbers and names; use one kind") from error
        if unknown.size:
            raise FedtailError(f"test labels {unknown[:5].tolist()} do not occur at any client")
        if len(names) < 2:
            raise FedtailError(f"there is only one class, {str(names[0])!r}; training needs at least two classes")
        return [np.searchsorted(names, y) for y in raw], np.searchsorted(names, raw_test), [str(v) for v in names]
    known = {str(c): i for i, c in enumerate(classes)}
    if len(known) < max(len(classes), 2):
        raise FedtailError(f"classes must be two or more different names, got {list(classes)!r}")
    out = [_codes(y, known, name) for y, name in zip([*raw, raw_test], [*who, "the test set"], strict=True)]
    return out[:-1], out[-1], list(known)


def _codes(y: np.ndarray, known: dict[str, int], name: str) -> np.ndarray:
    if y.dtype.kind in "iu":
        if y.size and (y.min() < 0 or y.max() >= len(known)):
            raise FedtailError(f"{name}: labels must be 0..{len(known) - 1}, got {int(y.min())}..{int(y.max())}")
        return y.astype(np.int64)
    strange = next((v for v in y if str(v) not in known), None)
    if strange is not None:
        raise FedtailError(f"{name}: label {str(strange)!r} is not among the classes ({', '.join(list(known)[:8])})")
    return np.array([known[str(v)] for v in y], dtype=np.int64)


def read_dataset(dataset: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(N, ...) inputs and (N,) labels. Map-style and iterable data sets, tensors, arrays, numbers and PIL images
    (which become channels first); labels may be anything sortable."""
    inputs: list[np.ndarray] = []
    labels: list[Any] = []
    counted = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not counted and not hasattr(dataset, "__iter__"):
        raise FedtailError(f"{name} is a {type(dataset).__name__}; give a torch Dataset or sequence of (input, label)")
    for i, item in enumerate((dataset[i] for i in range(len(dataset))) if counted else dataset):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise FedtailError(f"{name}: sample {i} is a {type(item).__name__}, not an (input, label) pair")
        x, label = _array(item[0], name, i), np.asarray(item[1])
        if label.size != 1:
            raise FedtailError(f"{name}: the label of sample {i} has shape {label.shape}, expected one value")
        if inputs and x.shape != inputs[0].shape:
            raise FedtailError(
                f"{name}: sample {i} has shape {x.shape}, the first has {inputs[0].shape}; "
                "resize or pad inputs to one shape"
            )
        inputs.append(x)
        labels.append(label.item())
    if not inputs:
        raise FedtailError(f"{name} has no samples; drop this client")
    return np.stack(inputs), np.array(labels)


def _array(value: Any, name: str, i: int) -> np.ndarray:
    if isinstance(value, Image.Image):
        pixels = np.asarray(value)
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    try:
        return np.asarray(torch.as_tensor(value).detach().cpu())
    except (TypeError, ValueError, RuntimeError):
        raise FedtailError(
            f"{name}: the input of sample {i} is a {type(value).__name__}, not a tensor, array, number or image; "
            "add a transform that converts it"
        ) from None
