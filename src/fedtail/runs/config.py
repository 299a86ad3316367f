"""The one config schema: TOML files, dotted overrides, one clear line for every bad value."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedtail.data.registry import DATASETS
from fedtail.errors import FedtailError, one_of
from fedtail.methods import METHODS
from fedtail.models import MODELS
from fedtail.rates import RATES
from fedtail.registry import Registry


class Section(BaseModel):
    """A section with a closed list of keys."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


class Named(BaseModel):
    """A section that names a registered entry; its further keys are that entry's options."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class Data(Named):
    """Which data, and how it is split over clients."""

    name: str = "digits"
    clients: int = Field(5, ge=1)
    partition: Literal["auto", "iid", "dirichlet", "per_client", "column"] = "auto"
    """``column`` takes the data's own sites; ``auto`` is ``column`` where there are sites, else ``dirichlet``."""
    alpha: float = Field(0.5, gt=0)
    """Concentration of the Dirichlet partitions; smaller is more uneven."""
    min_samples: int = Field(10, ge=1)
    """Least samples of a client; ``dirichlet`` draws again until all have them."""
    validation: float | None = Field(None, ge=0, lt=1)
    """Share of each client's samples for its private validation split; by default the data set's own (mostly 0.1)."""
    auxiliary: int | None = Field(None, ge=0)
    """Samples per class held out of training for server-side monitors (Ratio Loss); by default 5 where the method
    needs them, else 0."""
    holdout: float = Field(0.0, ge=0, lt=1)
    """Share of every client's data that the server gets to own, for ``run.validate_on = "server"``."""
    augment: str | None = None
    """``crop-flip``, ``flip`` or ``none``; by default what the data set suggests."""
    seed: int | None = None
    """Seed of data choice and split; by default ``run.seed``."""
    dir: str | None = None
    """Folder of data files; by default the environment variable FEDTAIL_DATA, then the user's cache."""


class Model(Named):
    """Which model; ``auto`` is the data set's own."""

    name: str = "auto"


class Method(Named):
    name: str = "fedcgnm"


class Rates(Named):
    name: str = "uniform"


class Local(Section):
    """Local training."""

    epochs: int = Field(1, ge=1)
    batch_size: int = Field(64, ge=1)
    lr: float = Field(0.1, gt=0)
    """Learning rate of the first round; it is constant inside a round."""
    lr_min: float = Field(1e-4, ge=0)
    """Learning rate of the last round under ``cosine``."""
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: int = Field(0, ge=0)
    """Rounds over which the learning rate rises to its schedule."""
    epoch_length: Literal["inflated", "original"] = "inflated"
    """``inflated``: a resampled epoch is longer the higher the rate; ``original``: as long as the client's data."""
    replication: Literal["fractional", "round", "ceil"] = "fractional"
    """Whether a class is repeated exactly as often as the rate says, or a whole number of times."""
    scale: Literal["batch", "group"] = "batch"
    """What a group's gradient is divided by: the samples of the batch, or those of the group."""


class Server(Section):
    """Server optimizer (FedOpt)."""

    optimizer: Literal["none", "momentum", "adam", "yogi", "adagrad"] = "none"
    lr: float = Field(1.0, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0)
    """Added to the root of the second moment (adaptive optimizers)."""


class EngineSection(Section):
    """Where and how clients run."""

    name: Literal["simulator"] = "simulator"
    path: str = "auto"
    """``auto``, ``reference``, ``batched`` (CPU) or ``graph`` (GPU); ``auto`` is the fastest that takes the run."""
    device: str = "cpu"
    precision: Literal["auto", "bf16", "tf32", "fp32"] = "auto"
    """Arithmetic on a GPU; weights are float32 in every mode. ``auto``: bf16 on CUDA, fp32 on the CPU."""
    workers: int = Field(1, ge=1)
    """Clients trained at once on the CPU's reference path. Each computes on one thread, so the bits do not depend on
    it; the batched path trains all clients of a round in one step instead."""
    threads: int = Field(1, ge=1)
    """torch's threads on the batched path. More change the bits, and seldom pay for models this small."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether steps go through torch.compile; ``auto`` where a run is long enough to earn the compile time."""


class Run(Section):
    """The run itself."""

    name: str | None = Field(None, coerce_numbers_to_str=True)
    folder: str = "runs"
    rounds: int = Field(50, ge=1)
    seed: int = Field(0, ge=0)
    participation: float = Field(1.0, gt=0, le=1)
    """Share of the clients sampled for a round."""
    metric: Literal["accuracy", "balanced_accuracy", "macro_f1", "defect_score"] = "accuracy"
    """What rate search and model selection compare by, on private validation splits; ``defect_score`` where the data
    name a class that means "nothing found"."""
    validate_on: Literal["clients", "server"] = "clients"
    """Where a rate search validates its candidates: private splits of the clients, or the server's ``data.holdout``."""
    search_only: bool = False
    """Stop when the rate search ends: what ``fedtail tune`` does."""
    select: Literal["last", "best"] = "last"
    """Keep the last model, or the one with the best validation metric."""
    quorum: float = Field(1.0, gt=0, le=1)
    """Least share of the sampled clients whose update must arrive and be valid; below it the run stops."""
    evaluate_every: int = Field(1, ge=1)
    """Test the global model every so many rounds, and after the last."""
    checkpoint_every: int = Field(1, ge=1)
    """What ``--resume`` goes on from is written every so many rounds."""
    trackers: tuple[str, ...] = ()
    """Where else to log: ``tensorboard``, ``mlflow``, ``wandb``."""
    diagnostics: list[Literal["alignment", "losses", "sgd_alignment", "assumption"]] = ["alignment"]
    """What to log beside metrics; all but ``alignment`` (of client updates) cost time and need the simulator."""

    @field_validator("trackers", "diagnostics", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """On the command line ``run.trackers=tensorboard,mlflow`` is easier to type than a TOML list."""
        return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


class Deploy(Section):
    """Real federations only (``fedtail deploy``); the simulator ignores it."""

    timeout: float = Field(600.0, gt=0)
    """Seconds to wait for the replies of one exchange; who is late is left out of the round."""
    wait: float = Field(120.0, gt=0)
    """Seconds to wait for all sites before round 0."""
    reveal: Literal["totals", "classes"] = "totals"
    """What sites send back from validation: totals, or counts per class (their policy must allow it)."""
    candidates: Literal["affine", "models"] = "affine"
    """How FedHOO's candidates travel: K + 1 vectors, or whole models built by the server."""
    models_per_message: int = Field(8, ge=1)
    """With ``models``: how many travel at a time."""
    validate_every: int = Field(1, ge=0)
    """Validate the global model at the sites every so many rounds, an exchange of its own; 0 is never."""


class PrivacySection(Section):
    """Gaussian noise on updates, with the method's own norm bound as sensitivity (see ``core.privacy``)."""

    mode: Literal["none", "central", "local"] = "none"
    """Who adds it: nobody, the server to the aggregate, or every site to its updates."""
    noise: float = Field(1.0, gt=0)
    """Noise multiplier: standard deviation over sensitivity."""
    delta: float = Field(1e-5, gt=0, lt=1)


class Config(Section):
    """Everything a run depends on."""

    data: Data = Field(default_factory=Data)
    model: Model = Field(default_factory=Model)
    method: Method = Field(default_factory=Method)
    rates: Rates = Field(default_factory=Rates)
    local: Local = Field(default_factory=Local)
    server: Server = Field(default_factory=Server)
    engine: EngineSection = Field(default_factory=EngineSection)
    run: Run = Field(default_factory=Run)
    deploy: Deploy = Field(default_factory=Deploy)
    privacy: PrivacySection = Field(default_factory=PrivacySection)

    @property
    def data_seed(self) -> int:
        return self.run.seed if self.data.seed is None else self.data.seed

    def to_toml(self) -> str:
        return tomli_w.dumps(_without_none(self.model_dump()))


REGISTRIES: dict[str, Registry[Any]] = {"data": DATASETS, "model": MODELS, "method": METHODS, "rates": RATES}
FREE = (
    "data.dir", "run.name", "run.folder", "run.checkpoint_every", "run.trackers", "engine.workers",
    "deploy.timeout", "deploy.wait",
)  # fmt: skip
"""Keys that may differ when a run is resumed: they do not change its result."""


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> Config:
    """A checked config from a TOML file, dotted overrides (``method.beta=0.7``) and flags (``{"method.name": ...}``).

    Later sources win. Naming another entry in a section keeps only those options the new entry has too.
    """
    raw: dict[str, Any] = _read(Path(path)) if path is not None else {}
    for key, value in (flags or {}).items():
        if value is not None:
            set_key(raw, key, value)
    for key, value in parse_overrides(overrides).items():
        set_key(raw, key, value)
    return check_config(raw)


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """``["method.beta=0.7"]`` as ``{"method.beta": 0.7}``."""
    found = {}
    for item in overrides:
        key, sign, text = item.partition("=")
        if not sign or "." not in key:
            raise FedtailError(f"override {item!r} is not of the form section.key=value, e.g. method.beta=0.7")
        found[key.strip()] = parse_value(text.strip())
    return found


def check_config(raw: Mapping[str, Any]) -> Config:
    """A ``Config`` from nested dictionaries; every bad value is one clear line."""
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, raw) from None
    for section, registry in REGISTRIES.items():
        part: Named = getattr(config, section)
        if _settled_later(section, part.name):
            continue
        checked = registry.check(part.name, part.options)
        config = config.model_copy(update={section: part.model_copy(update=checked)})
    return config


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """The same config with other values, by dotted key."""
    raw = config.model_dump()
    for key, value in values.items():
        set_key(raw, key, value)
    return check_config(raw)


def takes(config: Config, key: str) -> bool:
    """Whether a dotted key means anything to what a config names: ``rates.rate`` does to uniform, not to FedHOO."""
    section = key.partition(".")[0]
    part = getattr(config, section, None)
    if not isinstance(part, Named) or _settled_later(section, part.name) or part.name not in REGISTRIES[section]:
        return True  # nothing is chosen there yet; the key is checked when it is set, or when the model is built
    return key in options_of(config, section)


def _settled_later(section: str, name: str) -> bool:
    """Whether options can only be checked once the data is there: a model chosen by its shape, or the user's own."""
    return section == "model" and (name == "auto" or ":" in name)


def options_of(config: Config, section: str) -> list[str]:
    """The dotted keys of a section that names a registered entry: its own and that entry's options."""
    part = getattr(config, section)
    own = REGISTRIES[section].options(part.name) if part.name in REGISTRIES[section] else {}
    return [f"{section}.{name}" for name in (*type(part).model_fields, *own)]


def layered(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Nested dictionaries from layers of dotted keys, later ones on top."""
    raw: dict[str, Any] = {}
    for layer in layers:
        for key in sorted(layer, key=lambda k: not k.endswith(".name")):  # names first: they clear options
            set_key(raw, key, layer[key])
    return raw


def parse_value(text: str) -> Any:
    """A TOML value, or else the text itself; ``[a,b]`` is a list of names, since a shell takes the quotes away."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        if text.startswith("[") and text.endswith("]"):
            return [parse_value(part.strip()) for part in text[1:-1].split(",") if part.strip()]
        return text


def result_keys(config: Config) -> dict[str, Any]:
    """Dotted key -> value of everything a run's result depends on."""
    return {k: v for k, v in _flatten(config.model_dump()).items() if k not in FREE}


def first_difference(a: Config, b: Config) -> str | None:
    """The first key, apart from ``FREE``, in which two configs differ, with both values."""
    one, two = result_keys(a), result_keys(b)
    for key in sorted({*one, *two}):
        if one.get(key) != two.get(key):
            before, now = (repr(v[key]) if key in v else "not set" for v in (one, two))
            return f"{key} ({before} before, {now} now)"
    return None


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = path / "config.toml"
    if not path.is_file():
        raise FedtailError(f"config file {str(path)!r} does not exist; give a TOML file or a run folder, e.g. runs/x")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "; a table of yours goes with --table" if path.suffix in (".csv", ".tsv", ".parquet") else ""
        raise FedtailError(f"config file {str(path)!r} is not valid TOML: {error}{hint}") from None


def set_key(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key. Another ``name`` in a section keeps only those options the new entry has too."""
    section, _, name = key.partition(".")
    if section not in Config.model_fields:
        raise one_of("config section", section, Config.model_fields)
    part = raw.setdefault(section, {})
    if not isinstance(part, dict):
        raise FedtailError(f"config section {section!r} must be a table, got {part!r}")
    if name == "name" and section in REGISTRIES:
        default = getattr(Config(), section)
        registry = REGISTRIES[section]
        if part.get("name", default.name) != value:
            keep = set(type(default).model_fields) | (set(registry.options(value)) if value in registry else set())
            for old in [k for k in part if k not in keep]:
                del part[old]
    part[name] = value


def _explain(error: ValidationError, raw: Mapping[str, Any]) -> FedtailError:
    first = error.errors()[0]
    where = [str(p) for p in first["loc"]]
    key = ".".join(where)
    if first["type"] == "extra_forbidden":
        fields: Mapping[str, Any] = Config.model_fields
        if len(where) > 1:
            fields = type(getattr(Config(), where[0])).model_fields
        kind = f"key in section {where[0]!r}" if len(where) > 1 else "config section"
        return one_of(kind, where[-1], fields)
    if first["type"] == "literal_error":
        allowed = [v.strip(" '") for v in str(first["ctx"]["expected"]).replace(" or ", ", ").split(",")]
        return one_of(key, first["input"], allowed)
    if first["type"] == "model_type":
        return FedtailError(f"config section {key!r} must be a table, got {first['input']!r}; e.g. [{key}]")
    return FedtailError(f"{key} = {first['input']!r} is not allowed: {first['msg'][0].lower()}{first['msg'][1:]}")


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            out.update(_flatten(item, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = list(item) if isinstance(item, tuple) else item
    return out


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(v) for v in value]
    return value
