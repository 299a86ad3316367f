"""One table per site, files that never meet: ``fedtail run --tables sites/ --label severity``.

A schema (columns, levels, classes) is agreed on beforehand; sites send moments of their training rows, get the
merged scaling back, and encode their own rows. ``site_tables`` plays all sites in one process.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtail.core.random import generator
from fedtail.data.federation import Samples, stratified_holdout
from fedtail.data.registry import DATASETS, Pooled
from fedtail.data.tables.columns import Choices
from fedtail.data.tables.encode import SiteTable, encode_site, labelled
from fedtail.data.tables.labels import label_codes
from fedtail.data.tables.notes import class_notes, describe
from fedtail.data.tables.pooled import check_columns, infer_schema, kinds_of
from fedtail.data.tables.read import is_table, read_table, table_name
from fedtail.data.tables.schema import NEEDS_LABEL, TableSchema, agreed_label, load_schema
from fedtail.data.tables.sketch import (
    MIN_COUNT,
    fit_cuts,
    fit_schema,
    merge_moments,
    merge_sketches,
    moments_of,
    sketch_of,
)
from fedtail.errors import FedtailError, check_range
from fedtail.words import listing


def read_site(path: str | Path, schema: TableSchema, *, name: str | None = None, **reading: Any) -> SiteTable:
    """A site's file under an agreed schema; rows without a label are left out and noted."""
    text = {c.name for c in schema.columns if c.kind != "numeric"}
    source = read_table(path, text=text, plain={schema.label}, **reading)
    return labelled(replace(source, name=name or source.name), schema, f"site {name or source.name!r}")


def propose_schema(
    path: str | Path,
    label: str,
    *,
    site: str | None = None,
    choices: Choices = Choices(),
    min_count: int = MIN_COUNT,
    **reading: Any,
) -> tuple[TableSchema, list[str]]:
    """(schema without scaling, notes) inferred from one file: a proposal for people to complete, since other sites
    may have levels and classes that this one lacks. A level of fewer than ``min_count`` rows is not named, since the
    proposal leaves the site. Every category gets a place for missing values."""
    label, site = label.strip(), site and site.strip()
    source = read_table(path, text=choices.categories, plain={name for name in (label, site) if name}, **reading)
    where = f"table {source.name!r}"
    check_columns(list(source.frame.columns), label, site, choices, where)
    y, classes = label_codes(source.frame[label], label, where)
    inputs = source.frame.drop(columns=[name for name in (label, site) if name])
    kinds, rows = kinds_of(inputs, choices), np.flatnonzero(y >= 0)
    schema = infer_schema(kinds, rows, label, classes, site, choices, where, min_count)
    whole = infer_schema(kinds, rows, label, classes, site, choices, where)
    kept = {c.name: len(c.levels) for c in schema.columns}
    rare = {c.name: n for c in whole.columns if (n := len(c.levels) - kept.get(c.name, 0))}
    words = [f"{name!r}: {n} of fewer than {min_count} rows" for name, n in rare.items()]
    schema = replace(
        schema, columns=tuple(c if c.kind == "numeric" else replace(c, missing=True) for c in schema.columns)
    )
    notes = [f"levels that are too rare to be named outside the site: {listing(words)}"] if words else []
    notes += [*source.notes, *(k.note for k in kinds.values() if k.note)]
    return schema, [*notes, *describe(schema, len(y), kinds)]


def site_files(path: str | Path | Sequence[str | Path]) -> dict[str, Path]:
    """Site name -> file, in order of name. ``path``: a folder, a glob pattern, or a list of files."""
    if isinstance(path, str | Path):
        if Path(path).is_dir():
            paths = [p for p in Path(path).iterdir() if p.is_file() and is_table(p) and not p.name.startswith(".")]
        else:
            # The pattern may be absolute, which Path.glob refuses.
            paths = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]  # noqa: PTH207
    else:
        paths = [Path(p) for p in path]
    if not paths:
        raise FedtailError(f"no tables at {str(path)!r}; give a folder or a pattern such as 'sites/*.csv'")
    stems = Counter(table_name(p) for p in paths)
    named = {table_name(p) if stems[table_name(p)] == 1 else p.name: p for p in sorted(paths)}
    if len(named) < len(paths):
        raise FedtailError(f"two tables at {str(path)!r} have the same file name; site names come from file names")
    return dict(sorted(named.items()))


@DATASETS.add("site_tables")
def site_tables(
    path: str | Sequence[str],
    label: str = "",
    schema: str | None = None,
    test_fraction: float = 0.2,
    exclude: Sequence[str] | str = (),
    categories: Sequence[str] | str = (),
    numbers: Sequence[str] | str = (),
    max_levels: int = 64,
    hash_buckets: int = 64,
    pieces: int | None = None,
    min_count: int = MIN_COUNT,
    delimiter: str | None = None,
    encoding: str | None = None,
    seed: int = 0,
) -> Pooled:
    """One table per site, given as a folder or a glob pattern. Sites are named after their files.

    ``schema``: the schema file all sites agreed on (``fedtail data schema`` proposes one). Without it the first
    site's table is taken as the proposal. ``min_count``: a site tells no mean of fewer values than this. Each site
    holds out a stratified ``test_fraction`` of its own rows.
    """
    check_range("data.test_fraction", test_fraction, 0.0, 1.0, open_high=True)
    choices = Choices(exclude, categories, numbers, max_levels, hash_buckets, pieces)
    files = site_files(path)
    reading: dict[str, Any] = {"delimiter": delimiter, "encoding": encoding}
    notes: list[str] = []
    if schema:
        agreed = load_schema(schema)
        choices.check_with_schema()
        agreed_label(label.strip(), agreed)
    else:
        first, file = next(iter(files.items()))
        if not label:
            raise FedtailError(f"table {first!r} {NEEDS_LABEL}")
        agreed, words = propose_schema(file, label, choices=choices, min_count=1, **reading)
        telling = ("left out", "hashed", "numbers", "categories", "codes")
        notes = [f"columns, levels and classes come from the first site, {first!r}; declare them with data.schema"]
        notes += [note for note in words if note.startswith(telling)]
    sites = [read_site(file, agreed, name=name, **reading) for name, file in files.items()]
    draws = [generator(seed, "site_tables/test", k) for k in range(len(sites))]
    splits = [stratified_holdout(s.y, np.arange(len(s)), test_fraction, d) for s, d in zip(sites, draws, strict=True)]
    kept = [(s, train) for s, (train, _) in zip(sites, splits, strict=True)]
    moments = merge_moments([moments_of(agreed, s.columns, rows, min_count) for s, rows in kept])
    scaled = fit_schema(agreed if pieces is None else replace(agreed, pieces=pieces), moments)
    sketches = [sketch_of(scaled, s.columns, rows, min_count) for s, rows in kept]
    fitted = fit_cuts(scaled, merge_sketches(sketches, len(scaled.numeric)))
    train = [encode_site(s, fitted, rows) for s, rows in kept]
    test = [encode_site(s, fitted, rows) for s, (_, rows) in zip(sites, splits, strict=True)]
    notes += [f"site {s.name!r}: {note}" for s in sites for note in dict.fromkeys(s.notes)]
    present = np.unique(np.concatenate([s.y for s in sites]))
    if len(present) < 2:
        raise FedtailError(f"all sites together have only one class, {fitted.classes[present[0]]!r}; nothing to learn")
    samples, test_set = _concat(train), _concat(test)
    notes += class_notes(samples.y.numpy(), test_set, fitted.classes)
    names = np.array([s.name for s in sites], dtype=object)
    return Pooled(
        samples,
        test_set,
        classes=fitted.classes,
        name="site tables",
        sites=np.repeat(names, [len(t) for t in train]),
        test_sites=np.repeat(names, [len(t) for t in test]),
        model="auto",
        preprocessing=fitted.to_dict(),
        notes=tuple(notes),
    )


def _concat(parts: Sequence[Samples]) -> Samples:
    return Samples(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))
