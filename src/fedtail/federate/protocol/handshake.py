"""Before round 0: who is there, with which software and clock, and do all sites mean the same data?"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedtail.errors import FedtailError
from fedtail.federate.protocol.faults import CODES, clean
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.limits import Budget, WireError, real, whole
from fedtail.federate.protocol.transport import Phase, Transport, exchange
from fedtail.federate.protocol.wire import MOST, Parcel
from fedtail.models.encoders import Encoding
from fedtail.settings import ModelSettings
from fedtail.version import VERSION

HELLO = Budget(meta=1 << 23, items=1 << 18)
"""A schema of thousands of columns, with their words."""
CLOCK_SECONDS = 120.0
"""Signed requests and certificates need clocks that agree about this well."""


@dataclass(frozen=True)
class Hello:
    """A site's answer to the handshake."""

    client: int
    site: str
    schema: dict[str, Any]
    """What its data are; empty where the site does not trust the server with them."""
    versions: dict[str, str]
    clock_offset: float
    """Seconds the site's clock is ahead of ours, at most; the time the answer took is taken off."""
    n_train: int = 0
    n_validation: int = 0


@dataclass(frozen=True)
class Finding:
    """One thing ``doctor`` has to say."""

    level: str
    """``ok``, ``warning`` or ``error``."""
    subject: str
    message: str


def versions() -> dict[str, str]:
    """What must be the same everywhere for a federation to mean one thing."""
    return {"fedtail": VERSION, "torch": torch.__version__, "python": platform.python_version()}


def say_hello(
    transport: Transport,
    clients: Iterable[int],
    timeout: float,
    job: Job | None = None,
    model: ModelSettings | None = None,
) -> tuple[dict[int, Hello], dict[int, str]]:
    """Ask sites who they are; with a job, also whether they take part and how many samples they have.

    Without a job, the ``model`` that is wished for lets sites with images say which encoder they would use.
    """
    meta: dict[str, Any] = {} if job is None else {"job": job.to_json()}
    if model is not None:
        meta["model"] = model.model_dump()
    parcels = {k: Parcel({**meta, "client": k}) for k in clients}
    began = time.time()

    def read(client: int, parcel: Parcel) -> Hello:
        said = parcel.meta
        return Hello(
            client=client,
            site=clean(said.get("site")),
            schema=read_schema(said["schema"]) if "schema" in said else {},
            versions={k: clean(v, 40) for k, v in _texts(said.get("versions"), "versions").items()},
            clock_offset=real(said.get("clock"), "clock") - began,
            n_train=whole(said.get("n_train", 0), 0 if job is None else 1, MOST, "n_train"),
            n_validation=whole(said.get("n_validation", 0), 0, MOST, "n_validation"),
        )

    answers = exchange(transport, Phase.HELLO, parcels, read, timeout, HELLO)
    took = time.time() - began
    there = {k: replace(h, clock_offset=ahead(h.clock_offset, took)) for k, h in answers.good.items()}
    return there, dict(answers.reasons)


def read_schema(told: Any) -> dict[str, Any]:
    """A site's schema with the parts that are used here; ``WireError`` where they are something else."""
    if not isinstance(told, dict) or not isinstance(told.get("classes"), list) or not told["classes"]:
        raise WireError("its schema has no classes")
    if not all(isinstance(told.get(key), str) for key in ("kind", "name")):
        raise WireError("its schema has no kind or name")
    shape = told.get("input_shape", [])
    if not isinstance(shape, list) or not all(type(n) is int and 0 < n < 1 << 24 for n in shape):
        raise WireError("its schema has an invalid input shape")
    return told


def _texts(told: Any, name: str) -> dict[str, Any]:
    if not isinstance(told, dict) or any(isinstance(v, (dict, list)) for v in told.values()):
        raise WireError(f"its {name} are not text")
    return told


def ahead(offset: float, took: float) -> float:
    """Seconds a clock is ahead for sure, when its answer came within ``took`` seconds and is ``offset`` after the
    question."""
    return 0.0 if 0 <= offset <= took else min(offset, offset - took, key=abs)


def compare(
    hellos: Mapping[int, Hello], names: Sequence[str], agreed: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Versions, clocks and schemas of the sites that answered; ``agreed``: what they have agreed on before, else the
    schema that most sites have is what the others are held to."""
    out: list[Finding] = []
    whose = "the run" if agreed is not None else repr(names[min(hellos, default=0)])
    here, ours = versions(), _usual(hellos) if agreed is None else agreed
    for client, hello in sorted(hellos.items()):
        name, theirs = names[client], {"fedtail": "?", "torch": "?", **hello.versions}

        def find(level: str, message: str, name: str = name) -> None:
            out.append(Finding(level, name, message))

        if hello.site != name:
            find("error", f"its site.toml says it is {hello.site!r}; give each site its own folder")
        if theirs["fedtail"].split(".")[:2] != here["fedtail"].split(".")[:2]:
            find(
                "error", f"runs fedtail {theirs['fedtail']}, the server {here['fedtail']}; install the same everywhere"
            )
        if theirs["torch"].split("+")[0] != here["torch"].split("+")[0]:
            find("warning", f"runs torch {theirs['torch']}, the server {here['torch']}")
        if abs(hello.clock_offset) > CLOCK_SECONDS:
            find("error", f"its clock is off by {hello.clock_offset:+.0f} s; enable NTP")
        for key in sorted({*ours, *hello.schema}) if hello.schema else ():
            if ours.get(key) != hello.schema.get(key):
                find("error", describe_difference(key, ours.get(key), hello.schema.get(key), whose))
    return out


def _usual(hellos: Mapping[int, Hello]) -> dict[str, Any]:
    """The schema that most sites have; of several, that of the first."""
    told = {k: json.dumps(hello.schema, sort_keys=True) for k, hello in sorted(hellos.items()) if hello.schema}
    if not told:
        return {}
    most = max(told, key=lambda k: (list(told.values()).count(told[k]), -k))
    return hellos[most].schema


def describe_schema(schema: Mapping[str, Any]) -> str:
    """What the sites agreed on, in a few words."""
    columns, shape, classes = schema.get("columns"), schema.get("input_shape"), [str(c) for c in schema["classes"]]
    what = f"{len(columns)} columns" if columns else f"inputs of shape {'x'.join(map(str, shape))}" if shape else ""
    named = ", ".join(classes[:6]) + (", ..." if len(classes) > 6 else "")
    encoder = f", encoder {Encoding.from_dict(schema['encoder'])}" if schema.get("encoder") else ""
    return f"{schema['name']}, {what}, {len(classes)} classes ({named}){encoder}"


def describe_difference(key: str, ours: Any, other: Any, whose: str) -> str:
    """One line that names what a site disagrees about with ``whose`` schema."""
    if key == "encoder":
        named = [f"{e['name']} ({str(e['digest'])[:12]})" if isinstance(e, dict) else "none" for e in (other, ours)]
        return (
            f"its encoder is {named[0]}, but at {whose} it is {named[1]}; install the same one "
            "(fedtail[pretrained]), or "
            "set model.encoder = 'none'"
        )
    if key == "table" and isinstance(ours, dict) and isinstance(other, dict):
        mine = {str(c["name"]): c for c in ours.get("columns", [])}
        differing = [str(c["name"]) for c in other.get("columns", []) if mine.get(str(c["name"])) != c]
        return f"its schema file differs from that of {whose} (columns {differing[:5] or 'the same, other settings'})"
    if isinstance(ours, list) and isinstance(other, list):
        missing = [v for v in ours if v not in other]
        extra = [v for v in other if v not in ours]
        if missing or extra:
            lacks = f"lacks {missing[:5]}" if missing else ""
            has = f"also has {extra[:5]}" if extra else ""
            return f"{key} differ from {whose}: {' and '.join(p for p in (lacks, has) if p)}"
        return f"{key} match {whose} but in a different order"
    return f"{key} is {other!r}, but at {whose} it is {ours!r}"


def agree(
    hellos: Mapping[int, Hello],
    missing: Mapping[int, str],
    names: Sequence[str],
    agreed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The common schema, which is ``agreed`` where there is one; ``FedtailError`` with every reason why there is none.
    All sites must be there, so that it is known who takes part and with how many samples."""
    problems = [f"{names[k]}: {reason}" for k, reason in sorted(missing.items())]
    problems += [f"{f.subject}: {clean(f.message, 400)}" for f in compare(hellos, names, agreed) if f.level == "error"]
    problems += [f"{names[k]}: {CODES['policy-trust']}" for k, hello in hellos.items() if not hello.schema]
    if problems:
        raise FedtailError(f"the sites are not ready: {'; '.join(problems)}")
    return _usual(hellos)
