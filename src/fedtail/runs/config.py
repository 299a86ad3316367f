"""Settings from TOML files, dotted overrides and flags; one clear line for every bad value."""

from __future__ import annotations

import tomllib
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtail.core.metrics import METRICS
from fedtail.data.registry import DATASETS, FROM_SCRATCH, FROZEN, HEAD, OWN_TABLES, SUGGESTED, TREES
from fedtail.errors import FedtailError, one_of
from fedtail.files import read_toml
from fedtail.methods import METHODS
from fedtail.methods.optimizers import check_optimizer
from fedtail.models import MODELS
from fedtail.models.encoders.opening import default_encoder
from fedtail.rates import RATES
from fedtail.registry import Registry
from fedtail.rounds.state import DIAGNOSTICS
from fedtail.settings import (
    CLIENTS,
    DIAGNOSTICS_OF_UPDATES,
    FREE_KEYS,
    LOCAL_LR,
    NETWORKS_ONLY,
    RETIRED,
    Named,
    Settings,
    check_effects,
    checked,
    current,
    flatten,
    retired,
)

REGISTRIES: dict[str, Registry[Any]] = {"data": DATASETS, "model": MODELS, "method": METHODS, "rates": RATES}
BY_VALIDATION = ("local.lr", "run.select", "run.patience", "decision.goal")
"""Suggestions that need private validation."""


def load_config(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    *,
    suggest: bool = False,
) -> Settings:
    """A checked config from a TOML file, dotted overrides (``method.beta=0.7``) and flags (``{"method.name": ...}``).

    Later sources win. Naming another entry in a section keeps only those options the new entry has too. With
    ``suggest``, what nobody said is what the data suggests (``SUGGESTED``); the config of a run folder says all.
    """
    raw: dict[str, Any] = read_config(Path(path)) if path is not None else {}
    complete = path is not None and Path(path, "config.toml").is_file()
    everything = complete or Settings.model_fields.keys() <= raw.keys()  # written by ``to_toml``, not by a person
    raw = current(raw, strict=not everything)
    written = () if everything else frozenset(flatten(raw))
    given = {key: value for key, value in (flags or {}).items() if value is not None} | parse_overrides(overrides)
    if everything:
        _follow_optimizer(raw, given)
        data = raw.get("data")
        if isinstance(data, dict) and data.get("clients") == CLIENTS:  # earlier versions wrote it for any data
            del data["clients"]
    for key, value in given.items():
        if key in RETIRED:
            raise retired(key, value)
        set_key(raw, key, value)
    config = check_config(raw)
    if suggest and not complete:
        validates = config.data.validation != 0
        config = changed(config, suggestions(config.data.name, config, flatten(raw), validates=validates))
    check_fixed(config, {**({} if everything else flatten(raw)), **given})
    check_effects(config, given)
    check_effects(config, written, given)
    return config


def _follow_optimizer(raw: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Drop the usual learning rate of another optimizer from a complete config: nobody asked for it."""
    local = raw.get("local")
    if "local.optimizer" in given and "local.lr" not in given and isinstance(local, dict):
        before = str(local.get("optimizer", "sgd"))
        if given["local.optimizer"] != before and local.get("lr") == LOCAL_LR.get(before):
            del local["lr"]


def suggestions(data: str, config: Settings, given: Container[str], *, validates: bool) -> dict[str, Any]:
    """What a kind of data suggests for a run, by dotted key, but for what the user has said.

    What needs private validation, or a look at several models, is left out where the config has no room for it.
    """
    wanted = dict(SUGGESTED.get(data, {}))
    if wanted == OWN_TABLES and (
        config.method.name == "trees" if "method.name" in given else not of_networks(config, given)
    ):
        wanted = dict(TREES)
    if data == "images" and config.model.name == "auto":
        encoder = default_encoder() if config.model.encoder == "auto" else config.model.encoder
        if encoder not in (None, "none"):
            linear = config.method.name == "logistic" if "method.name" in given else not of_networks(config, given)
            wanted = wanted if config.model.unfreeze else dict(HEAD if linear else FROZEN)
        elif config.engine.device == "cpu" and not config.model.options:
            wanted |= FROM_SCRATCH
    if "run.metric" in given and config.run.metric != wanted.get("run.metric"):
        goal = wanted.pop("decision.goal", None)  # answers are to be good for what models are compared by
        if goal is not None and config.run.metric == "balanced_accuracy":
            wanted["decision.goal"] = "balanced_accuracy"
    if not validates or not config.run.validate_every:
        wanted = {key: value for key, value in wanted.items() if key not in BY_VALIDATION}
    if config.privacy.mode != "none":  # Adam gives coordinates that are mostly noise steps as long as the others
        wanted.pop("server.optimizer", None)
    if config.privacy.mode != "none" or config.rates.options.get("searches") == "lr":
        wanted.pop("local.lr", None)
    return {key: value for key, value in wanted.items() if key not in given}


def of_networks(config: Settings, given: Container[str]) -> bool:
    """Whether somebody has set what only networks have."""
    named = config.model.name != "auto" or config.rates.name != "uniform" or config.privacy.mode != "none"
    options = config.model.options or config.rates.options or config.method.options
    keys = [f"{section}.{name}" for section in NETWORKS_ONLY for name in type(getattr(config, section)).model_fields]
    return bool(named or options) or any(key in given for key in (*keys, "engine.path", "run.participation"))


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """``["method.beta=0.7"]`` as ``{"method.beta": 0.7}``."""
    values = {}
    for item in overrides:
        key, sign, text = item.partition("=")
        if not sign or "." not in key:
            raise FedtailError(f"override {item!r} is not of the form section.key=value, e.g. method.beta=0.7")
        values[key.strip()] = parse_value(text.strip())
    return values


def check_config(raw: Mapping[str, Any]) -> Settings:
    """A ``Settings`` from nested dictionaries; every bad value is one clear line."""
    settings = checked(Settings, current(raw))
    METRICS[settings.run.metric]
    for name in sorted(set(settings.run.diagnostics) - set(DIAGNOSTICS_OF_UPDATES)):
        if name not in DIAGNOSTICS:
            raise one_of("run.diagnostics", name, [*DIAGNOSTICS_OF_UPDATES, *DIAGNOSTICS])
        DIAGNOSTICS[name]
    for section, registry in REGISTRIES.items():
        part: Named = getattr(settings, section)
        if (known := registry.canonical(part.name)) != part.name:
            settings = settings.replaced({f"{section}.name": known})
        if not settled_later(section, known):
            options = registry.check(known, part.options)
            settings = settings.replaced({f"{section}.{key}": value for key, value in options.items()})
    settings = settings.replaced(METHODS[settings.method.name].fixed)
    check_optimizer(METHODS[settings.method.name], settings.local.optimizer)
    return settings


def check_fixed(settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse what is given otherwise than the method needs it. ``given``: values by dotted key."""
    method = METHODS[settings.method.name]
    for key, value in method.fixed.items():
        if given.get(key, value) != value:
            raise FedtailError(
                f"{key} = {given[key]!r} has no effect with method {method.name!r}, which has no such choice; leave it "
                "out, or choose another method"
            )


def changed(config: Settings, values: Mapping[str, Any]) -> Settings:
    """Return the config with other values, by dotted key."""
    raw = config.model_dump()
    _follow_optimizer(raw, values)
    for key, value in values.items():
        set_key(raw, key, value)
    return check_config(raw)


def settled_later(section: str, name: str) -> bool:
    """Whether options can only be checked once the data is there: a model chosen by its shape, or the user's own."""
    return section == "model" and (name == "auto" or ":" in name)


def parse_value(text: str) -> Any:
    """A TOML value, or else the text itself; ``[a,b]`` is a list of names, since a shell takes the quotes away."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        if text.startswith("[") and text.endswith("]"):
            return [parse_value(part.strip()) for part in text[1:-1].split(",") if part.strip()]
        return text


def result_keys(config: Settings) -> dict[str, Any]:
    """Dotted key -> value of everything a run's result depends on."""
    keys = {k: v for k, v in flatten(config.model_dump()).items() if k not in FREE_KEYS}
    return {**keys, "data.clients": config.data.clients or CLIENTS}


def first_difference(a: Settings, b: Settings) -> str | None:
    """The first key, apart from free ones, in which two configs differ, with both values."""
    one, two = result_keys(a), result_keys(b)
    for key in sorted({*one, *two}):
        if one.get(key) != two.get(key):
            before, now = (repr(v[key]) if key in v else "not set" for v in (one, two))
            return f"{key} ({before} before, {now} now)"
    return None


def read_config(path: Path) -> dict[str, Any]:
    """A config file, or that of a run folder, as it is written."""
    if path.is_dir():
        path = path / "config.toml"
    if not path.is_file():
        raise FedtailError(f"config file {str(path)!r} does not exist; give a TOML file or a run folder, e.g. runs/x")
    return read_toml(path, "; for your own table, use --table" if path.suffix in (".csv", ".tsv", ".parquet") else "")


def set_key(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key. Another ``name`` in a section keeps only those options the new entry has too."""
    section, _, name = key.partition(".")
    if section not in Settings.model_fields:
        raise one_of("config section", section, Settings.model_fields)
    part = raw.setdefault(section, {})
    if not isinstance(part, dict):
        raise FedtailError(f"config section {section!r} must be a table, got {part!r}")
    if name == "name" and section in REGISTRIES:
        default = getattr(Settings(), section)
        registry = REGISTRIES[section]
        if part.get("name", default.name) != value:
            known = value in registry and not settled_later(section, value)
            keep = set(type(default).model_fields) | (set(registry.options(value)) if known else set())
            for old in [k for k in part if k not in keep]:
                del part[old]
            before = part.get("name", default.name)
            for there, _, old in (key.partition(".") for key in (METHODS[before].fixed if section == "method" else ())):
                raw.get(there, {}).pop(old, None)  # which nobody but the method has asked for
    part[name] = value
