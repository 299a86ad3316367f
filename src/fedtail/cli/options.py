"""Arguments and flags that several commands share, each declared once, and what they mean in the config."""

from __future__ import annotations

import functools
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from fedtail.cli.flags import Json as Json
from fedtail.errors import FedtailError
from fedtail.runs.config import load_config
from fedtail.settings import Settings

Command = Callable[..., None]

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [SECTION.KEY=VALUE]...", help="A TOML file or run folder, then overrides."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Hide progress; warnings and notes are still printed.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Number of parallel runs; by default as many as the cores allow, or one on a GPU."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Discard the results of earlier calls and run everything again.")]
RunFolder = Annotated[Path, typer.Option("--run", "--model", help="Run folder of the trained model.")]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Allow importing the model's module:callable.")]


@dataclass(frozen=True)
class Flag:
    """A flag that sets a config value; ``key`` is empty where several flags make one value together."""

    kind: type
    key: str
    help: str
    panel: str = "Training"


def of_setting(key: str, panel: str = "Training") -> Flag:
    """The flag of a setting, with the type and the first sentence of its declaration."""
    section, name = key.split(".")
    field = getattr(Settings(), section).__class__.model_fields[name]
    sentence = re.split(r"\.(?:\s|$)", " ".join((field.description or "").split()), maxsplit=1)[0].replace("``", "`")
    kinds = {kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)}
    kind = str if str in kinds or get_origin(field.annotation) is Literal else next(iter(kinds & {int, float}), str)
    return Flag(kind, key, f"{sentence} ({key}).", panel)


FLAGS = {
    "dataset": Flag(str, "", "Data set by name; see `fedtail data list`.", "Data"),
    "table": Flag(str, "", "Your own table: CSV, TSV or Parquet; needs --label or --schema.", "Data"),
    "tables": Flag(str, "", "Folder or glob of tables, one per site; needs --label or --schema.", "Data"),
    "images": Flag(str, "", "Your own images: DIR/site/class/* or DIR/class/*.", "Data"),
    "label": Flag(str, "", "Column that holds the class.", "Data"),
    "site": Flag(str, "", "Column that names the site; one client per value.", "Data"),
    "schema": Flag(str, "", "Schema file: columns, levels, classes, label; see `fedtail data schema`.", "Data"),
    "data_dir": of_setting("data.dir", "Data"),
    "clients": of_setting("data.clients", "Data"),
    "partition": of_setting("data.partition", "Data"),
    "alpha": of_setting("data.alpha", "Data"),
    "method": of_setting("method.name"),
    "rates": Flag(
        str, "", "Rate strategy (rates.name), one rate for all clients, or a file written by `fedtail tune`."
    ),
    "model": of_setting("model.name"),
    "encoder": of_setting("model.encoder"),
    "rounds": of_setting("run.rounds"),
    "lr": of_setting("local.lr"),
    "epochs": of_setting("local.epochs"),
    "optimizer": of_setting("local.optimizer"),
    "seed": of_setting("run.seed"),
    "device": of_setting("engine.device"),
    "name": of_setting("run.name", "Options"),
    "out": of_setting("run.folder", "Options"),
}
SOURCES = {"dataset": None, "table": "table", "tables": "site_tables", "images": "images"}
"""Flags that name the data, of which one may be given, and the data set that reads what they name."""
SOURCE = (*SOURCES, "label", "site", "schema")
"""Flags that together name the data."""
TRAINING = ("rates", "model", "encoder", "rounds", "lr", "epochs", "optimizer")
"""Flags of training that every command with runs has."""
ONE_RUN = (*SOURCE, "data_dir", "clients", "method", *TRAINING, "seed", "device", "name", "out")
"""Flags of the commands that make one run."""
DataDir = Annotated[str | None, typer.Option("--data-dir", help=FLAGS["data_dir"].help)]
Device = Annotated[str | None, typer.Option("--device", help=FLAGS["device"].help)]


def config_flags(*names: str, **helps: str) -> Callable[[Command], Command]:
    """Give a command the named flags of ``FLAGS`` in place of its keyword ``flags``, which receives what they set in
    the config, by dotted key. ``said`` replaces the help text of single flags."""

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            parameters += [_parameter(n, helps.get(n)) for n in names] if parameter.name == "flags" else [parameter]

        @functools.wraps(command)
        def wrapped(**given: Any) -> None:
            command(flags=config_values({n: given.pop(n) for n in names}), **given)

        wrapped.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def _parameter(name: str, text: str | None) -> inspect.Parameter:
    flag = FLAGS[name]
    panel = None if flag.panel == "Options" else flag.panel
    option = typer.Option(f"--{name.replace('_', '-')}", help=text or flag.help, rich_help_panel=panel)
    kind = Annotated[flag.kind | None, option]  # type: ignore[name-defined]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def config_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """What flags set in the config, by dotted key; flags that were not given set nothing."""
    values = {FLAGS[name].key: value for name, value in given.items() if FLAGS[name].key and value is not None}
    return {**data_flags(given), **rate_flags(given.get("rates")), **values}


def data_flags(given: Mapping[str, str | None]) -> dict[str, Any]:
    """Settings values that name the data; at most one source may be given."""
    named = [name for name in SOURCES if given.get(name) is not None]
    if len(named) > 1:
        raise FedtailError(f"--{named[0]} and --{named[1]} both name the data; give only one")
    source = named[0] if named else ""
    for name, needs in (("label", ("table", "tables")), ("schema", ("table", "tables")), ("site", ("table",))):
        if given.get(name) is not None and source not in needs:
            raise FedtailError(f"--{name} {given[name]!r} needs {' or '.join(f'--{n}' for n in needs)}")
    values = {f"data.{name}": given.get(name) for name in ("label", "schema", "site")}
    if source:
        reader = SOURCES[source]
        values |= {"data.name": reader or given[source], "data.path": given[source] if reader else None}
    return {key: value for key, value in values.items() if value is not None}


def rate_flags(rates: str | None) -> dict[str, Any]:
    """``--rates 0.4`` is a uniform rate, ``fedhoo`` a strategy, ``rates.toml`` what a search found."""
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
        return {"name": section.pop("name", "fixed"), **section}
    except OSError as error:
        wrong = f"cannot be read: {error.strerror}; `fedtail tune` writes one"
    except (ValueError, KeyError, TypeError, AttributeError):
        wrong = "was not written by `fedtail tune`: it has no table 'rates'"
    raise FedtailError(f"--rates {str(path)!r} {wrong}")


def run_config(arguments: list[str] | None, flags: Mapping[str, Any], *, resume: bool) -> Settings:
    """The config of a command that makes one run; ``fedtail run runs/x --resume`` goes on in that very folder, whatever
    name its config has."""
    path, overrides = split_arguments(arguments)
    if resume and path is not None and Path(path).is_dir():
        flags = {**flags, "run.folder": str(Path(path).parent), "run.name": Path(path).name}
    return load_config(path, overrides, flags, suggest=True)


def split_arguments(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """A config path, if the first argument is not an override, and the overrides."""
    rest = list(arguments or [])
    path = rest.pop(0) if rest and "=" not in rest[0] else None
    return path, rest
