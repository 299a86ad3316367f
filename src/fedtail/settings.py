"""Everything a run can be told, declared once.

One class per section. It is the schema of a TOML file, of dotted overrides (``local.lr=0.2``) and of ``fit()``'s
keywords (``lr=0.2``), the source of command-line help and of the table of settings in the docs, and what the code that
uses a setting reads. The ``[policy]`` and ``[worker]`` sections of a site's file are made of the same ``Section``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from fedtail.errors import FedtailError, not_of_kind, one_of, outside

S = TypeVar("S", bound=BaseModel)
FREE: dict[str, Any] = {"free": True}
"""Marks a setting that does not change a run's result, so that a resumed run may have another value."""


class Section(BaseModel):
    """A section with a closed list of keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Named(Section):
    """A section that names a registered entry; its further keys are that entry's options."""

    model_config = ConfigDict(extra="allow")
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


Partition = Literal["auto", "iid", "dirichlet", "labels", "column"]
PARTITIONS: tuple[str, ...] = get_args(Partition)
CLIENTS = 5
"""Number of clients where neither the data nor anybody says."""


class DataSettings(Named):
    """The data, and how it is split across clients."""

    name: str = "digits"
    """Data set; see `fedtail data list`."""
    clients: int | None = Field(None, ge=1, le=10_000_000)
    """Number of clients, for data without sites of its own; 5 unless you say otherwise."""
    partition: Partition = "auto"
    """How samples are split across clients: ``iid``, ``dirichlet``, ``labels`` (two classes each) or
    ``column`` (the data's own sites). ``auto`` is ``column`` if the data has sites, otherwise ``dirichlet``."""
    alpha: float = Field(0.5, gt=0)
    """Concentration of the Dirichlet partitions; smaller is more uneven."""
    min_samples: int = Field(10, ge=1)
    """Least samples per client: ``dirichlet`` redraws until all have so many. The default yields to small data."""
    validation: float | None = Field(None, ge=0, lt=1)
    """Fraction of each client's samples held out as its private validation split; defaults to the data set's own value
    (usually 0.1)."""
    auxiliary: int | None = Field(None, ge=0)
    """Samples per class held out of training for the server (Ratio Loss), capped at a tenth of the class or five
    samples, whichever is more; by default, the number the method asks for."""
    holdout: float = Field(0.0, ge=0, lt=1)
    """Fraction of each client's data given to the server, which then compares a rate search's candidates on it instead
    of the clients on their private splits."""
    augment: str | None = None
    """``crop-flip``, ``flip`` or ``none``; defaults to what the data set suggests."""
    seed: int | None = None
    """Seed for sampling and splitting the data; defaults to ``run.seed``."""
    dir: str | None = Field(None, json_schema_extra=FREE)
    """Folder with data files; defaults to the environment variable FEDTAIL_DATA, then to the user's cache."""


class ModelSettings(Named):
    """The model."""

    name: str = "auto"
    """Model; ``auto`` picks the data set's own. With an encoder, ``auto`` is a ``linear`` head, and any other name
    (``cosine``, ``mlp``) a model trained on the encoder's features."""
    encoder: str = "auto"
    """Pretrained network that encodes images once, before training: ``efficientnet_lite0`` (or 1, 2), ``timm:NAME``,
    ``FILE.onnx`` or your own ``module:callable``, with its
    weights as ``module:callable@FILE.safetensors``. ``none`` trains from scratch; ``auto`` uses ``efficientnet_lite0``
    for image files if ``fedtail[pretrained]`` is installed and no model is named."""
    classifier: Literal["auto", "linear", "etf"] = "auto"
    """Output layer: the model's own ``linear`` layer, or one followed by a fixed simplex (``etf``). ``auto`` is
    whatever the method needs."""
    unfreeze: int = Field(0, ge=0)
    """With an encoder: how many of its last blocks are also trained and sent."""


class MethodSettings(Named):
    """The method."""

    name: str = "fedcgnm"
    """Method; see `fedtail methods`."""


class RatesSettings(Named):
    """The rate strategy."""

    name: str = "uniform"
    """Rate strategy, one rate for all clients, or a file written by `fedtail tune`. ``rates.rate`` is the rate of
    ``uniform``."""


LOCAL_LR = {"sgd": 0.1, "momentum": 0.1, "adam": 1e-3}
"""Learning rate of ``local.optimizer`` where none is set."""


class LocalSettings(Section):
    """Local training."""

    epochs: int = Field(1, ge=1, le=10_000)
    """Passes over a client's resampled data in each round."""
    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] | Literal["auto"] = 64
    """Samples per local step. ``auto`` depends on the size of the sites: 16 if the median site is small, 64 if it has
    500 training samples or more."""
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    """How a local step uses the method's direction: directly, as a running mean (momentum), or through Adam. Weight
    decay is added afterwards. SCAFFOLD and Ratio Loss require ``sgd``."""
    lr: Annotated[float, Field(gt=0)] | Literal["auto"] = 0.1
    """Learning rate of the first round, constant within a round. ``auto`` races several learning rates in the first
    rounds, each with its own model, on the clients' private validation splits. ``auto`` is the default for your own
    data; with ``adam`` the default is 0.001."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """How the learning rate decays over rounds."""
    warmup: int = Field(0, ge=0)
    """Rounds of learning-rate warm-up."""
    epoch_length: Literal["inflated", "original"] = "inflated"
    """``inflated``: higher rates make a resampled epoch longer; ``original``: an epoch has as many samples as the
    client's data."""

    @model_validator(mode="before")
    @classmethod
    def _usual(cls, raw: Any) -> Any:
        """The learning rate that goes with an optimizer, where none is set."""
        usual = LOCAL_LR.get(str(raw.get("optimizer"))) if isinstance(raw, Mapping) else None
        return raw if usual is None else {"lr": usual, **raw}


SERVER_LR = {"none": 1.0, "momentum": 1.0, "adam": 0.03, "yogi": 0.03, "adagrad": 0.1}
"""Server learning rate where none is set. Their authors' searches of the adaptive ones mostly end in 0.01 to 0.1."""


class ServerSettings(Section):
    """How the server aggregates updates, some of which may be hostile, and its optimizer (FedOpt)."""

    aggregate: Literal["auto", "mean", "bounded", "krum"] = "auto"
    """How updates are combined: their weighted ``mean``; the mean after outliers are pulled towards the others
    (``bounded``); or the mean without the sites that agree least with their neighbours (``krum``). ``auto``:
    ``bounded`` in a real federation, ``mean`` in the simulator and with SCAFFOLD. Needs three sites or more."""

    optimizer: Literal["none", "momentum", "adam", "yogi", "adagrad", "auto"] = "none"
    """How the server applies a round's aggregate: directly, or with FedAvgM, FedAdam, FedYogi or FedAdagrad. ``auto``:
    ``adam`` for many small sites (20 or more, of which the median has fewer than 512 training samples), else
    ``none``."""
    lr: float | None = Field(None, gt=0)
    """The server's learning rate; defaults to 1 (``momentum``), 0.03 (``adam``, ``yogi``) or 0.1 (``adagrad``)."""

    @property
    def step(self) -> float:
        """The learning rate in force. Adaptive steps have a length of about lr per coordinate, whatever the aggregate:
        1 would throw every weight of a network to and fro."""
        if self.lr is not None:
            return self.lr
        return SERVER_LR[self.optimizer]


class EngineSettings(Section):
    """How the simulator runs clients."""

    path: Literal["auto", "reference", "batched", "graph"] = "auto"
    """``reference``, ``batched`` (all clients in one step, on a CPU) or ``graph`` (recorded graphs, on a GPU); ``auto``
    picks the fastest one that supports the run, and that does on a few samples what ``reference`` does."""
    device: str = "cpu"
    """Device: cpu, cuda or cuda:1."""
    precision: Literal["auto", "bf16", "tf32", "fp32"] = "auto"
    """Arithmetic on a GPU; weights are float32 in every mode. ``auto``: bf16 on the graph path on CUDA, otherwise
    fp32."""
    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = Field("auto", json_schema_extra=FREE)
    """Cores that train and evaluate clients in parallel, each with one torch thread; results are bit-identical for any
    number. ``auto``: the cores available to this process (affinity, container limit), shared with concurrent runs, at
    most eight, where the work is large enough. 1 on a GPU."""


DIAGNOSTICS_OF_UPDATES = ("alignment", "influence")


class RunSettings(Section):
    """The run itself."""

    name: str | None = Field(None, coerce_numbers_to_str=True, json_schema_extra=FREE)
    """Name of the run folder."""
    folder: str = Field("runs", json_schema_extra=FREE)
    """Folder for run folders."""
    rounds: int = Field(50, ge=1, le=1_000_000)
    """Number of rounds."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Random seed."""
    participation: float = Field(1.0, gt=0, le=1)
    """Fraction of clients sampled each round."""
    metric: str = "accuracy"
    """Metric for rate search and model selection, on private validation splits: ``accuracy``, ``balanced_accuracy``,
    ``macro_f1``, ``weighted_f1``, ``defect_score`` (if the data has a class that means "nothing found"); on
    probabilities ``pr_auc``, ``roc_auc``, ``log_loss``, ``balanced_loss`` (all classes weighted equally), ``brier`` or
    ``calibration_error``; across sites ``worst_site`` (selection only); or your own, ``file.py:name``."""
    validate_every: int = Field(1, ge=0)
    """Validate the global model on private splits every this many rounds, and after the last; 0 means never."""
    select: Literal["last", "best"] = "last"
    """Keep the last model, or the best one by the validation metric: the latest within half a standard error of the top
    score. ``best`` is the default for your own data."""
    patience: int = Field(0, ge=0)
    """Stop if the validation metric has not improved for this many rounds; 0 means never."""
    quorum: float = Field(1.0, gt=0, le=1)
    """Minimum fraction of sampled clients whose update must arrive and be valid; below it the run stops."""
    evaluate_every: int = Field(1, ge=1)
    """Test the global model every this many rounds, and after the last."""
    checkpoint_every: int = Field(1, ge=1, json_schema_extra=FREE)
    """Write a checkpoint for ``--resume`` every this many rounds."""
    diagnostics: tuple[str, ...] = ("alignment",)
    """What to log besides metrics: ``alignment`` of client updates, ``influence`` of each client on the model (always
    logged in a real federation), or a function of your own, ``file.py:name``, in the simulator (docs/reports.md)."""

    @field_validator("diagnostics", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """On the command line ``run.diagnostics=alignment,influence`` is easier to type than a TOML list."""
        return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if self.select == "best" and not self.validate_every:
            raise ValueError("{select} = 'best' needs validation; set {validate_every} to 1 or more")
        if self.patience and not self.validate_every:
            raise ValueError("{patience} needs validation; set {validate_every} to 1 or more")
        return self


class DeploySettings(Section):
    """Real federations only (``fedtail deploy``); the simulator ignores it."""

    timeout: float = Field(600.0, gt=0, json_schema_extra=FREE)
    """Seconds to wait for replies in one exchange; sites that are late are left out of the round."""
    trust: Literal["server", "blind", "private"] = "server"
    """Who need not be trusted: ``server`` trusts the server with the data; under ``blind`` it relays sums that it
    can neither look into nor alter, of a job that the sites have signed; ``private`` adds noise to all that is
    learned."""
    after: str = ""
    """Under ``blind`` and ``private``: the name of an earlier run that this one goes on from, with its model and
    preprocessing; sites may have come or gone since."""


class DecisionSettings(Section):
    """How probabilities become answers. Chosen after training, without retraining, on private validation splits."""

    calibrate: Literal["none", "temperature", "vector"] = "none"
    """How to calibrate probabilities: one temperature for all classes, or a temperature plus a bias per class
    (``vector``)."""
    goal: Literal["argmax", "macro_f1", "balanced_accuracy", "recall", "cost"] = "argmax"
    """What answers are optimized for: the likeliest class; macro F1 (one weight per class); all classes equally,
    however rare in training (``balanced_accuracy``); finding a given share of one class (``find``, ``recall``) with a
    given ``confidence`` and as few false alarms as possible; or the lowest expected cost (``costs``)."""
    scope: Literal["global", "site"] = "global"
    """One decision for all sites, or one per site: probabilities corrected for the site's own class mix, and weights or
    a threshold fitted on its private split, shrunk towards the shared ones if it has few samples."""
    find: str | None = Field(None, coerce_numbers_to_str=True)
    """With ``recall``: the class that must not be missed."""
    recall: float = Field(0.95, gt=0, lt=1)
    """With ``recall``: the share of its samples to find."""
    confidence: float = Field(0.9, gt=0, lt=1)
    """With ``recall``: how sure the promise is that this share of new samples will be found."""
    costs: tuple[tuple[float, ...], ...] | None = None
    """With ``cost``: row i, column j is the cost of calling a sample of class i class j, with classes in the data's
    order."""


class PrivacySettings(Section):
    """Gaussian noise on updates, with the method's own norm bound as the sensitivity (see ``core.privacy``)."""

    mode: Literal["none", "central", "local", "shares"] = "none"
    """Who adds the noise: nobody; the server, to the aggregate; each site, to its updates; or each site a share of it,
    under masks: no more noise than with ``central``, without trusting the server (real federations with
    ``deploy.trust = "private"``)."""
    noise: float = Field(1.0, gt=0)
    """Noise multiplier: standard deviation divided by sensitivity."""
    clip: float | None = Field(None, gt=0)
    """With ``shares``: norm to which each site clips its update; defaults to the method's bound for an epoch without
    resampling."""


class Settings(Section):
    """Everything a run depends on."""

    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    method: MethodSettings = MethodSettings()
    rates: RatesSettings = RatesSettings()
    local: LocalSettings = LocalSettings()
    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()
    run: RunSettings = RunSettings()
    deploy: DeploySettings = DeploySettings()
    privacy: PrivacySettings = PrivacySettings()
    decision: DecisionSettings = DecisionSettings()

    @property
    def data_seed(self) -> int:
        return self.run.seed if self.data.seed is None else self.data.seed

    def replaced(self, values: Mapping[str, Any]) -> Self:
        """Return the settings with other values, by dotted key, which are known to be sound."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        return self.model_copy(update={s: getattr(self, s).model_copy(update=part) for s, part in sections.items()})

    def to_toml(self) -> str:
        """The whole of it as a file."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    @classmethod
    def of(cls, **keywords: Any) -> Settings:
        """Settings by their short names: ``Settings.of(rounds=3, lr=0.2, server={"optimizer": "adam"})``.

        Every key of ``model`` (but its name), ``local``, ``run`` and ``engine`` is a keyword; ``server`` and
        ``privacy`` are given whole.
        """
        raw: dict[str, Any] = {section: {} for section in KEYWORD_SECTIONS}
        for name, value in keywords.items():
            if name in WHOLE_SECTIONS:
                raw[name] = value.model_dump() if isinstance(value, Section) else value
            elif name in KEYWORDS:
                raw[KEYWORDS[name]][name] = value
            elif gone := [key for key in RETIRED if key.endswith(f".{name}")]:
                raise retired(gone[0], value)
            else:
                raise one_of("setting", name, [*KEYWORDS, *WHOLE_SECTIONS])
        raw = current(raw, strict=True)
        return checked(cls, raw, lambda *path: ".".join(path) if path[0] in WHOLE_SECTIONS else path[-1])


class Retired(NamedTuple):
    """A setting that is gone."""

    value: Any
    """What it always is now; configs that say so are read as they are."""
    instead: str
    """What holds now, in words that end a line."""
    harmless: bool = False
    """Whether run folders may have any value, since another one does not make another run."""


RETIRED: dict[str, Retired] = {
    "data.bad_rows": Retired("error", "a row with too many or too few fields is an error; mend or drop it"),
    "data.labels_per_client": Retired(2, "'labels' deals two classes to every client"),
    "local.lr_min": Retired(1e-4, "a cosine schedule ends at 0.0001, or where it began if that is lower"),
    "local.replication": Retired("fractional", "classes are repeated by exactly the factor that the rate asks for"),
    "local.scale": Retired("batch", "a group's gradient is divided by the number of samples in the batch"),
    "data.template": Retired(None, "give data with sites of their own, or draw them by data.partition"),
    "model.views": Retired(1, "an image is encoded once, as it is; model.unfreeze trains the encoder's last blocks"),
    "model.head": Retired("linear", "name the head by model.name = 'cosine' or 'mlp', beside model.encoder"),
    "model.encoder_weights": Retired(None, "write model.encoder = 'my_encoder.py:encoder@weights.safetensors'"),
    "server.reach": Retired(1.5, "'bounded' draws updates to within 1.5 median distances"),
    "server.suspects": Retired(0.2, "'krum' allows for a fifth of the sites"),
    "server.max_weight": Retired(None, "set server.aggregate to 'mean' for weights that are not limited"),
    "server.beta1": Retired(0.9, "the decay of the first moment is 0.9"),
    "server.beta2": Retired(0.99, "the decay of the second moment is 0.99"),
    "server.tau": Retired(1e-3, "0.001 is added to the root of the second moment"),
    "run.validate_on": Retired("clients", "data.holdout alone has the server compare candidates", True),
    "run.trackers": Retired((), "pass on_round to fit() or run(), which gets every record (docs/reports.md)", True),
    "run.search_only": Retired(False, "`fedtail tune` stops when the search ends", True),
    "privacy.delta": Retired(1e-5, "the delta of epsilon is 1e-5"),
    "deploy.wait": Retired(120.0, "a run waits a fifth of deploy.timeout for sites before round 0", True),
    "deploy.memory_mb": Retired(256.0, "updates of a round are held in memory", True),
    "deploy.compress": Retired("none", "updates are sent as they are"),
    "deploy.metrics_port": Retired(0, "`fedtail deploy status --json` says how a run goes", True),
    "engine.compile": Retired("auto", "steps are captured where that pays", True),
    "engine.kernels": Retired("auto", "kernels are checked against the library, and used where they pay", True),
    "engine.threads": Retired(1, "a worker has one torch thread; use engine.workers", True),
    "deploy.reveal": Retired("auto", "set deploy.trust", True),
    "deploy.updates": Retired("plain", "set deploy.trust = 'blind' for sums under masks"),
    "deploy.candidates": Retired("affine", "candidates are sent as K + 1 vectors", True),
    "deploy.models_per_message": Retired(8, "candidates are sent as K + 1 vectors", True),
    "privacy.dropouts": Retired(0.25, "set deploy.trust = 'private', which waits for all sites", True),
}
"""Settings of version 0.2 that are gone, by dotted key."""
RETIRED_01: dict[str, Retired] = {"engine.name": Retired("simulator", "there is one simulator")}
"""Settings of version 0.1 that are gone, by dotted key."""
MOVED = {"deploy.validate_every": "run.validate_every", "rates.groups": "rates.labels", "data.group": "data.cluster"}
"""Settings of version 0.1 that have another name now."""


def retired(key: str, value: Any) -> FedtailError:
    """Return the line that says what became of a setting."""
    gone = {**RETIRED, **RETIRED_01}[key]
    return FedtailError(f"{key} = {value!r}: this is no longer a setting, leave it out; {gone.instead}")


def current(raw: Mapping[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """Return a config of an earlier version under today's names.

    Settings that are gone are left out where they have the value that holds now; with ``strict``, which is for what a
    person has written, they are refused.
    """
    out = {section: dict(part) if isinstance(part, Mapping) else part for section, part in raw.items()}
    for old, new in MOVED.items():
        (section, key), (there, name) = old.split("."), new.split(".")
        if isinstance(part := out.get(section), dict) and key in part:
            out.setdefault(there, {}).setdefault(name, part.pop(key))
    for old, gone in {**RETIRED, **RETIRED_01}.items():
        section, key = old.split(".")
        if isinstance(part := out.get(section), dict) and key in part:
            if (strict and old in RETIRED) or not (gone.harmless or part[key] == gone.value):
                raise retired(old, part[key])
            del part[key]
    return out


EFFECTS: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("data.alpha",), "data.partition", ("auto", "dirichlet")),
    (("data.min_samples",), "data.partition", ("auto", "dirichlet")),
    (("server.lr",), "server.optimizer", ("momentum", "adam", "yogi", "adagrad", "auto")),
    (("privacy.noise",), "privacy.mode", ("central", "local", "shares")),
    (("privacy.clip",), "privacy.mode", ("shares",)),
    (("decision.find", "decision.recall"), "decision.goal", ("recall",)),
    (("decision.costs",), "decision.goal", ("cost",)),
)
"""Settings that have an effect only where another setting has one of these values."""

NETWORKS_ONLY = ("local", "server")
"""Sections of which trees need nothing."""


def check_effects(settings: Settings, given: Container[str], decided: Container[str] = ()) -> None:
    """Refuse a setting that was given and has no effect beside the others.

    ``given``: the dotted keys given. ``decided``: keys given after them, whose value may take effect away.
    """
    for section in NETWORKS_ONLY if settings.method.name == "trees" and "method.name" not in decided else ():
        for key in (f"{section}.{name}" for name in type(getattr(settings, section)).model_fields):
            if key in given:
                raise FedtailError(
                    f"{key} has no effect with method.name = 'trees', which trains no network; leave it out. Trees "
                    "have method.lr, method.leaves, method.depth and run.rounds"
                )
    for keys, other, values in EFFECTS:
        section, name = other.split(".")
        value = getattr(getattr(settings, section), name)
        for key in keys if value not in values and other not in decided else ():
            if key in given:
                allowed = " or ".join(repr(v) for v in values if v != "auto")
                raise FedtailError(
                    f"{key} has no effect with {other} = {value!r}; leave it out, or set {other} to {allowed}"
                )


KEYWORD_SECTIONS = ("model", "local", "run", "engine")
WHOLE_SECTIONS = ("server", "privacy", "decision")
KEYWORDS = {
    key: section
    for section in KEYWORD_SECTIONS
    for key in type(getattr(Settings(), section)).model_fields
    if (section, key) != ("model", "name")
}
"""Short name of a setting -> its section."""


def checked(schema: type[S], raw: Mapping[str, Any], name: Callable[..., str] = lambda *path: ".".join(path)) -> S:
    """``schema`` filled from plain values; a bad value is one clear line. ``name`` makes a key's name of its path."""
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        raise explain(error, schema, name) from None


def explain(error: ValidationError, schema: type[BaseModel], name: Callable[..., str]) -> FedtailError:
    """The first fault in one line: the value, what is allowed, the fix."""
    first = error.errors()[0]
    path, kind, value, words = tuple(map(str, first["loc"])), first["type"], first["input"], ""
    if len(path) > 2 and (either := _either(fields_at(schema, path[:1])[path[1]])):
        path, words = path[:2], f" or {either!r}"  # pydantic names the part of a union behind it
    fields = fields_at(schema, path[:-1])
    if kind == "extra_forbidden":
        return one_of("key", path[-1], fields, lead=f"[{path[-2]}] has no" if len(path) > 1 else "")
    if kind == "literal_error":
        allowed = [v.strip(" '") for v in str(first["ctx"]["expected"]).replace(" or ", ", ").split(",")]
        return one_of(name(*path), value, allowed)
    if kind in ("model_type", "model_attributes_type"):
        key = ".".join(path)
        return FedtailError(f"config section {key!r} must be a table, got {value!r}; e.g. [{key}]")
    if kind == "value_error":  # a rule over several keys of a section, which it names in braces
        names = {key: name(*path, key) for key in fields_at(schema, path)}
        return FedtailError(str(first["ctx"]["error"]).format(**names))
    if bounds := interval(fields[path[-1]]) if kind.startswith(("greater_than", "less_than")) else "":
        return FedtailError(f"{name(*path)} = {value!r} {outside(bounds)}{words}")
    return not_of_kind(name(*path), value, first, words)


def fields_at(schema: type[BaseModel], path: Sequence[str]) -> dict[str, FieldInfo]:
    """The fields of a section of a schema."""
    fields = schema.model_fields
    for part in path:
        fields = getattr(fields[part].annotation, "model_fields", fields) if part in fields else fields
    return fields


def _either(field: FieldInfo) -> str:
    """The one word that a number's setting takes too, ``auto`` say; empty if it takes none."""
    parts = get_args(field.annotation)
    return next((str(word) for part in parts for word in get_args(part) if get_origin(part) is Literal), "")


def interval(field: FieldInfo) -> str:
    """The range of a number as ``[0, 1)``; empty if it has none."""
    marks = [*field.metadata, *(m for part in get_args(field.annotation) for m in getattr(part, "__metadata__", ()))]
    marks = [m for mark in marks for m in getattr(mark, "metadata", (mark,))]
    rules = {name: getattr(m, name) for m in marks for name in ("ge", "gt", "le", "lt") if hasattr(m, name)}
    if not rules:
        return ""
    left = f"[{rules['ge']:g}" if "ge" in rules else f"({rules['gt']:g}" if "gt" in rules else "(-inf"
    right = f"{rules['le']:g}]" if "le" in rules else f"{rules['lt']:g})" if "lt" in rules else "inf)"
    return f"{left}, {right}"


FREE_KEYS = frozenset(
    f"{section}.{key}"
    for section, part in Settings.model_fields.items()
    for key, field in getattr(part.annotation, "model_fields", {}).items()
    if field.json_schema_extra == FREE
)
"""The dotted keys of settings that leave a run's result alone."""


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys; tuples as the lists that TOML and JSON have."""
    out: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            out.update(flatten(item, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = list(item) if isinstance(item, tuple) else item
    return out
