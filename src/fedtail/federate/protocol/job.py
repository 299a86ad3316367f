"""The work order of a run: everything a site must know to train, sent with every message.

A message that carries its job can be answered by a worker that was started a moment ago, so a site may lose
its worker at any time without the server noticing more than a slower reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from fedtail.data.federation import Transform
from fedtail.errors import FedtailError
from fedtail.federate.protocol.faults import CodedError
from fedtail.methods import METHODS
from fedtail.methods.base import Method
from fedtail.methods.optimizers import with_optimizer
from fedtail.models import build_model
from fedtail.models.encoders.base import Encoding
from fedtail.runs.build import classifier_option
from fedtail.runs.encoding import HEAD, build_encoded
from fedtail.settings import DIAGNOSTICS_OF_UPDATES, LocalSettings, RunSettings, Settings, checked

IDENTITY: dict[str, Any] = {"scale": 1.0, "mean": [], "std": []}
"""A transform that leaves values as they are."""


@dataclass(frozen=True)
class Job:
    """One run, as sites see it. Plain values only: it travels as JSON."""

    run: str
    model: str
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    method: str
    rounds: int
    model_options: dict[str, Any] = field(default_factory=dict)
    method_options: dict[str, Any] = field(default_factory=dict)
    local: LocalSettings = field(default_factory=LocalSettings)
    seed: int = 0
    """Every draw of the run is keyed by it."""
    metric: str = "accuracy"
    """What a client compares its own models by."""
    transform: Transform = field(default_factory=Transform)
    augment: str | None = None
    encoder: dict[str, Any] = field(default_factory=dict)
    """The encoder by which sites turn their images into features, as ``Encoding`` writes it; empty if none."""
    preprocessing: dict[str, Any] = field(default_factory=dict)
    """How sites turn raw columns into features; agreed before round 0, from federated sums."""
    engine: str = ""
    """Which federation runs it; for the sites' logs."""

    @property
    def settings(self) -> Settings:
        """What a client's part of a round reads."""
        return Settings(local=self.local, run=RunSettings(seed=self.seed, metric=self.metric))

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    @property
    def encoding(self) -> Encoding | None:
        return Encoding.from_dict(self.encoder) if self.encoder else None

    def build_model(self, seed: int = 0) -> nn.Module:
        """What is trained and sent; its weights come with every task."""
        if self.encoding is not None:
            return build_encoded(self.encoding, self.model, self.n_classes, seed=seed, **self.model_options)
        return build_model(self.model, self.input_shape, self.n_classes, seed=seed, **self.model_options)

    def build_method(self) -> Method:
        return with_optimizer(METHODS.build(self.method, **self.method_options), self.local.optimizer)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(replace(self, local=None)), "local": self.local.model_dump()}  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Job:
        """Inverse of ``to_json`` after a trip through JSON, which knows no tuples."""
        try:
            given = dict(told)
            local, transform = checked(LocalSettings, given.pop("local")), given.pop("transform")
            made = Transform(float(transform["scale"]), tuple(transform["mean"]), tuple(transform["std"]))
            shape, classes = tuple(given.pop("input_shape")), tuple(given.pop("classes"))
            return cls(local=local, transform=made, input_shape=shape, classes=classes, **given)
        except (KeyError, TypeError, ValueError) as error:
            raise CodedError("malformed", f"malformed job: {type(error).__name__} {error}") from error


def method_of(settings: Settings) -> Method:
    """The method that settings name."""
    return with_optimizer(METHODS.build(settings.method.name, **settings.method.options), settings.local.optimizer)


def job_of(settings: Settings, schema: Mapping[str, Any], run: str, engine: str) -> Job:
    """The work order of settings on data of a schema whose preprocessing is settled."""
    beside = [name for name in settings.run.diagnostics if name not in DIAGNOSTICS_OF_UPDATES]
    if beside:
        raise FedtailError(f"run.diagnostics = {beside[0]!r} needs the simulator: it looks at the sites' data")
    name, options = (
        settings.model.name,
        {**settings.model.options, **classifier_option(settings, METHODS[settings.method.name])},
    )
    encoding = Encoding.from_dict(schema["encoder"]) if schema.get("encoder") else None
    if encoding is not None:
        name = HEAD if name == "auto" else name
    elif name == "auto":
        name, options = schema["model"], {**schema["model_options"], **options}
    transform = IDENTITY if encoding is not None else schema["transform"]
    return Job(
        run=run,
        model=name,
        input_shape=tuple(schema["input_shape"]) if encoding is None else encoding.shape,
        classes=tuple(schema["classes"]),
        method=settings.method.name,
        rounds=settings.run.rounds,
        model_options=options,
        method_options=METHODS.build(settings.method.name, **settings.method.options).config(),
        local=settings.local,
        seed=settings.run.seed,
        metric=settings.run.metric,
        transform=Transform(transform["scale"], tuple(transform["mean"]), tuple(transform["std"])),
        augment=schema["augment"] if encoding is None else None,
        encoder={} if encoding is None else encoding.to_dict(),
        preprocessing=schema["preprocessing"],
        engine=engine,
    )
