"""One table for all sites: ``fedtail run --table crashes.csv --label severity --site state``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fedtail.core.random import generator
from fedtail.data.federation import stratified_holdout
from fedtail.data.registry import DATASETS, Pooled
from fedtail.data.tables.columns import Choices, Kind, Levels, Numbers, infer_kind, level_name, parse_column
from fedtail.data.tables.encode import SiteTable, encode_site, frame_columns, labelled
from fedtail.data.tables.labels import label_codes, label_notes, label_type, name_codes, natural_order, need_column
from fedtail.data.tables.notes import class_notes, describe, doubts, leak_note, leaking_columns, left_out_words
from fedtail.data.tables.read import Table, from_frame, is_saved, read_table
from fedtail.data.tables.schema import NEEDS_LABEL, Column, TableSchema, agreed_label, load_schema
from fedtail.data.tables.sketch import fit_cuts, fit_schema, moments_of, sketch_of
from fedtail.errors import FedtailError, check_range
from fedtail.words import listing

HELD = 0.2
"""Share of the rows to test on, where no other file has them."""
MANY_SITES = 100
"""From this many sites on, a column that gives half of them one row is refused."""


@DATASETS.add("table")
def table(
    path: str,
    label: str = "",
    site: str | None = None,
    cluster: str | None = None,
    test: str | None = None,
    test_fraction: float = HELD,
    exclude: Sequence[str] | str = (),
    categories: Sequence[str] | str = (),
    numbers: Sequence[str] | str = (),
    schema: str | None = None,
    max_levels: int = 64,
    hash_buckets: int = 64,
    pieces: int | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    seed: int = 0,
) -> Pooled:
    """Your own table: CSV, TSV or Parquet (also .gz, .xz, .bz2, .zip), or a folder that a Hugging Face ``Dataset`` was
    saved to, with a ``label`` column and, optionally, a ``site`` column. ``label`` may be left out if ``schema`` names
    it.

    ``cluster``: a column that puts sites together (region, machine type), for rate searches over clusters; it stays an
    input.
    ``test``: a second file for testing; without it a stratified ``test_fraction`` is held out. ``exclude``: columns
    not to use; ``categories``: columns of codes that look like numbers; ``numbers``: columns of numbers that look like
    codes; ``schema``: a schema file that declares kinds and levels. Categories of more than ``max_levels`` levels are
    hashed into ``hash_buckets`` features; a number is cut into ``pieces`` (0 for none).
    """
    choices = Choices(exclude, categories, numbers, max_levels, hash_buckets, pieces)
    declared = load_schema(schema) if schema else None
    if declared is not None:
        choices.check_with_schema()
    label, site = agreed_label(label.strip(), declared), site and site.strip()
    shared = {"cluster": cluster, "test_fraction": test_fraction, "schema": declared, "seed": seed, **vars(choices)}
    if is_saved(path):
        from fedtail.data.huggingface import load_pooled  # which needs this module

        return load_pooled(path, label, site, pictures=False, **shared)
    reading: dict[str, Any] = {
        "text": {*choices.categories, *((c.name for c in declared.columns if c.kind != "numeric") if declared else ())},
        "plain": {label, site} - {None, ""},
        "delimiter": delimiter,
        "encoding": encoding,
    }
    tested = read_table(test, **reading) if test else None
    return table_from_frame(read_table(path, **reading), label, site, test=tested, **shared)


def table_from_frame(
    frame: pd.DataFrame | Table,
    label: Hashable,
    site: Hashable = None,
    *,
    cluster: Hashable = None,
    test: pd.DataFrame | Table | None = None,
    test_fraction: float = HELD,
    classes: Sequence[str] | None = None,
    schema: TableSchema | None = None,
    seed: int = 0,
    **choices: Any,
) -> Pooled:
    """Turn a DataFrame into a data set; see ``table`` for the options. The frame is not changed.

    Args:
        classes: the order of the classes, if not alphabetical.
        choices: as of ``Choices``: ``exclude``, ``categories``, ``numbers``, ``max_levels``, ``hash_buckets`` and
            ``pieces``.
    """
    check_range("data.test_fraction", test_fraction, 0.0, 1.0, open_high=True)
    if test is not None and test_fraction != HELD:
        raise FedtailError(f"data.test_fraction = {test_fraction:g} has no effect beside data.test; leave one out")
    said = Choices(**choices)
    source = frame if isinstance(frame, Table) else from_frame(frame)
    where, notes = f"table {source.name!r}", list(source.notes)
    data = source.frame.copy(deep=False)
    label = "" if label is None else str(label).strip()  # columns of a DataFrame may be numbers
    site, cluster = (None if name is None else str(name).strip() for name in (site, cluster))
    check_columns(list(data.columns), label, site, said, where)
    if cluster is not None:
        need_column("cluster", cluster, list(data.columns), where)
    labels = None if cluster is None else data[cluster].astype(str).to_numpy()
    kind = label_type(data[label])
    if kind == "str" and isinstance(frame, Table):
        kind = ""  # a file of text, whose whole numbers are integers
    y, classes = label_codes(data.pop(label), label, where, schema.classes if schema else classes)
    sites, site_names = name_codes(data.pop(site)) if site else (np.zeros(len(y), dtype=np.int64), [])
    keep = _labelled_rows(y, sites, label, site, notes)
    notes += label_notes(classes, label)
    if site:
        check_sites(np.bincount(sites[keep], minlength=len(site_names)), site, source.frame, label, where)

    tested = None if test is None else (test if isinstance(test, Table) else from_frame(test, "test table"))
    train, held = keep, np.empty(0, dtype=np.int64)
    if tested is None:
        train, held = _split(y, sites, keep, test_fraction, seed)
    kinds = kinds_of(data, said)
    notes += [k.note for k in kinds.values() if k.note]
    if schema is None:
        schema = infer_schema(kinds, train, label, classes, site, said, where)
        columns = {c.name: kinds[c.name].data for c in schema.columns}
    else:
        schema = schema if said.pieces is None else replace(schema, pieces=said.pieces)
        columns = frame_columns(schema, source.frame, where)
    rows = SiteTable(source.name, columns, y, notes)
    scaled = fit_schema(schema, moments_of(schema, columns, train, 1))
    schema = fit_cuts(scaled, sketch_of(scaled, columns, train, 1))
    notes += describe(schema, len(keep), kinds)
    notes += doubts(schema, kinds, y, sites, at_random=tested is None and test_fraction > 0)
    leaks = leaking_columns(columns, y, classes, train, seed=seed)
    notes += [leak_note(name, found, classes, label) for name, found in leaks.items()]

    samples, test_set = encode_site(rows, schema, train), encode_site(rows, schema, held)
    owners = np.array(site_names, dtype=object)[sites] if site else None
    test_owners = None if owners is None else owners[held]
    if tested is not None:
        later = labelled(tested, schema, f"table {tested.name!r}")
        test_set, test_owners = encode_site(later, schema), None
        notes += [f"table {tested.name!r}: {note}" for note in later.notes]
        if site and site in tested.frame.columns:
            codes, names = name_codes(tested.frame[site])
            test_owners = np.array([*names, ""], dtype=object)[codes]
    notes += class_notes(y[train], test_set, classes)
    return Pooled(
        samples,
        test_set,
        classes=as_given(classes, source.frame[label]) if kind == "str" else classes,
        name=source.name,
        sites=None if owners is None else owners[train],
        test_sites=test_owners,
        clusters=None if labels is None else labels[train],
        model="auto",
        preprocessing=schema.to_dict(),
        notes=tuple(notes),
        label_type=kind,
    )


def as_given(classes: Sequence[str], labels: pd.Series[Any]) -> tuple[str, ...]:
    """The classes as a caller's labels spell them, with spaces and capitals; of several spellings the shortest."""
    spelled = {level_name(v): v for v in sorted({v for v in labels if isinstance(v, str)}, key=lambda v: (-len(v), v))}
    return tuple(spelled.get(name, name) for name in classes)


def kinds_of(frame: pd.DataFrame, choices: Choices) -> dict[str, Kind]:
    """Return what each column of a frame is taken for."""

    def kind(name: str) -> Kind:
        if name in choices.exclude:
            return Kind("excluded", Levels(np.empty(0, dtype=np.int32), []))
        try:
            column = parse_column(frame[name])
        except TypeError:
            raise FedtailError(
                f"column {name!r} holds lists or other things that are no numbers or names; exclude it"
            ) from None
        return infer_kind(name, column, choices)

    return {str(name): kind(name) for name in frame.columns}


def infer_schema(
    kinds: dict[str, Kind],
    train: np.ndarray,
    label: str,
    classes: tuple[str, ...],
    site: str | None,
    choices: Choices,
    where: str,
    min_count: int = 1,
) -> TableSchema:
    """Columns with the levels that ``min_count`` training rows or more have; numbers are not yet fitted."""
    left_out = {name: kind.name for name, kind in kinds.items() if not kind.used}
    columns = []
    for name, kind in kinds.items():
        if kind.used and (column := make_column(name, kind.data, train, choices, min_count)):
            columns.append(column)
        elif kind.used:
            left_out[name] = "empty"  # but for held-out rows, or levels that are too rare to be named
    if not columns:
        raise FedtailError(
            f"{where} has no usable input column besides {label!r} (left out: {left_out_words(left_out) or 'nothing'})"
        )
    return TableSchema(label, classes, tuple(columns), site, left_out, pieces=choices.pieces)


def make_column(
    name: str, data: Numbers | Levels, train: np.ndarray, choices: Choices, min_count: int = 1
) -> Column | None:
    """The column as training rows show it; None for a category of which they have no level often enough."""
    if isinstance(data, Numbers):
        return Column(name, "numeric", comma=data.comma, marks=data.marks)
    codes = data.codes[train]
    missing = bool((codes < 0).any())
    counts = np.bincount(codes[codes >= 0], minlength=len(data.levels))
    if np.count_nonzero(counts) > choices.max_levels:
        return Column(name, "hashed", buckets=choices.hash_buckets, missing=missing)
    levels = natural_order({data.levels[i] for i in np.flatnonzero(counts >= min_count)})
    return Column(name, "category", tuple(levels), missing=missing) if levels else None


def check_columns(names: list[str], label: str, site: str | None, choices: Choices, where: str) -> None:
    """Raise unless the table has the columns that people name, and each in one role."""
    if not label:
        raise FedtailError(f"{where} {NEEDS_LABEL}; columns: {listing(names, 12)}")
    need_column("label", label, names, where)
    if site is not None:
        need_column("site", site, names, where)
        if site == label:
            raise FedtailError(f"{where}: label and site are the same column {label!r}")
    if any(re.fullmatch(rf"{re.escape(label)} \(\d+\)", name) for name in names):
        raise FedtailError(f"{where} has more than one column called {label!r}; rename all others")
    for role in ("exclude", "categories", "numbers"):  # a misspelt one would stay as it is, unseen
        for name in getattr(choices, role):
            need_column(role, name, names, where)
            if name in (label, site):
                raise FedtailError(
                    f"data.{role} names {name!r}, the {'label' if name == label else 'site'}; leave it out"
                )
    both = next((n for n in choices.categories if n in choices.numbers), None)
    if both is not None:
        raise FedtailError(f"{where}: column {both!r} is in data.categories and in data.numbers; list it only once")


def _labelled_rows(y: np.ndarray, sites: np.ndarray, label: str, site: str | None, notes: list[str]) -> np.ndarray:
    """Indices of rows that have a label and, where asked for, a site."""
    no_label, no_site = int((y < 0).sum()), int((sites < 0).sum())
    if no_label:
        notes.append(f"{no_label:,} of {len(y):,} rows left out: no {label}")
    if no_site == len(y):
        raise FedtailError(f"site column {site!r} is empty; name another column, or leave --site out")
    if no_site:
        notes.append(f"{no_site:,} of {len(y):,} rows left out: no {site}")
    keep = np.flatnonzero((y >= 0) & (sites >= 0))
    if len(np.unique(y[keep])) < 2:
        raise FedtailError(f"fewer than two classes are left after rows without {label} or {site} are left out")
    return keep


def check_sites(sizes: np.ndarray, site: str, frame: pd.DataFrame, label: str, where: str) -> None:
    """Raise where a site column names rows rather than places: a model of one-row sites is scored on next to nothing.

    sizes: (K,) rows of each site.
    """
    lone = int((sizes == 1).sum())
    if len(sizes) < MANY_SITES or lone < 0.5 * len(sizes):
        return
    better = []
    for name in sorted(frame.columns, key=lambda n: pd.api.types.is_numeric_dtype(frame[n])):  # names first
        counts = frame[name].value_counts() if name not in (site, label) else pd.Series(dtype=int)
        if 2 <= len(counts) < MANY_SITES and counts.iloc[-1] >= 20:
            better.append(f"{name!r} ({len(counts)} values)")
    instead = f"Columns that could be sites: {listing(better, 4)}" if better else "No other column looks like sites"
    raise FedtailError(
        f"{where}: column {site!r} makes {len(sizes):,} sites, {lone:,} of them of one row; a site has many rows. "
        f"{instead}; without --site, sites are made up"
    )


def _split(
    y: np.ndarray, sites: np.ndarray, keep: np.ndarray, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Stratified by class; a site whose rows would all be held out gets one back."""
    train, held = stratified_holdout(y, keep, fraction, generator(seed, "table/test"))
    bare = np.setdiff1d(sites[held], sites[train])
    if len(bare):
        back = np.array([held[np.flatnonzero(sites[held] == s)[0]] for s in bare])
        train, held = np.sort(np.concatenate([train, back])), np.setdiff1d(held, back)
    return train, held
