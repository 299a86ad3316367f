"""Flags that several commands share, and what they mean in the config."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtail.core.errors import FedtailError

Dataset = Annotated[str | None, typer.Option("--dataset", help="Data set by name; see `fedtail data list`.")]
Table = Annotated[str | None, typer.Option("--table", help="Your own table: CSV, TSV or Parquet; needs --label.")]
Tables = Annotated[
    str | None,
    typer.Option("--tables", help="Folder or glob of tables, one per site; needs --label."),
]
Images = Annotated[str | None, typer.Option("--images", help="Your own images: DIR/site/class/* or DIR/class/*.")]
Label = Annotated[str | None, typer.Option("--label", help="Column that holds the class.")]
Site = Annotated[str | None, typer.Option("--site", help="Column that names the site; one client per value.")]
DataDir = Annotated[str | None, typer.Option("--data-dir", help="Folder of data files (data.dir).")]


def data_flags(
    dataset: str | None, table: str | None, tables: str | None, images: str | None, label: str | None, site: str | None
) -> dict[str, Any]:
    """Config values that name the data; at most one source may be given."""
    given = {"--dataset": dataset, "--table": table, "--tables": tables, "--images": images}
    named = [flag for flag, value in given.items() if value is not None]
    if len(named) > 1:
        raise FedtailError(f"{named[0]} and {named[1]} both name the data; give one")
    if (table or tables) and label is None:
        raise FedtailError(f"{named[0]} needs --label, the column that holds the class")
    if label is not None and not (table or tables):
        raise FedtailError(f"--label {label!r} goes with --table or --tables")
    if site is not None and not table:
        raise FedtailError(f"--site {site!r} goes with --table")
    flags: dict[str, Any] = {"data.name": dataset}
    if table:
        flags |= {"data.name": "table", "data.path": table, "data.label": label, "data.site": site}
    elif tables:
        flags |= {"data.name": "site_tables", "data.path": tables, "data.label": label}
    elif images:
        flags |= {"data.name": "images", "data.path": images}
    return flags


def rate_flags(rates: str | None) -> dict[str, Any]:
    """``--rates 0.4`` is a uniform rate, ``--rates fedhoo`` a strategy, ``--rates rates.toml`` what a search found."""
    if rates is None:
        return {}
    if Path(rates).suffix in (".toml", ".json"):
        return {f"rates.{key}": value for key, value in _read_rates(Path(rates)).items()}
    try:
        return {"rates.name": "uniform", "rates.rate": float(rates)}
    except ValueError:
        return {"rates.name": rates}


def _read_rates(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        section = (tomllib.loads if path.suffix == ".toml" else json.loads)(text)["rates"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedtailError(f"--rates {str(path)!r} is not a file that `fedtail tune` wrote: {error}") from None
    return {"name": section.pop("name", "fixed"), **section}


def split_arguments(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """A config path, if the first argument is not an override, and the overrides."""
    rest = list(arguments or [])
    path = rest.pop(0) if rest and "=" not in rest[0] else None
    return path, rest
