"""Before round 0: who is there, with which software and clock, and do all sites mean the same data?"""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedtail.errors import FedtailError
from fedtail.federate.protocol.exchange import exchange
from fedtail.federate.protocol.faults import CODES, Fault, clean
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.limits import Budget, WireError, real, whole
from fedtail.federate.protocol.transport import Phase, Transport
from fedtail.federate.protocol.wire import MOST, Parcel
from fedtail.models.encoders import Encoding
from fedtail.rounds.acceptance import least
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
    """Versions, clocks and schemas of the sites that answered; ``agreed``: what the sites of a run have agreed on, else
    the first site's schema is what the others are held to."""
    out: list[Finding] = []
    here = versions()
    whose = "the run" if agreed is not None else repr(names[min(hellos, default=0)])
    ours = agreed if agreed is not None else _usual(hellos) if hellos else {}
    for client, hello in sorted(hellos.items()):
        name = names[client]
        if hello.site != name:
            out.append(
                Finding("error", name, f"its site.toml says it is {hello.site!r}; give each site its own folder")
            )
        out += compare_versions(name, here["fedtail"], hello.versions.get("fedtail", "?"))
        if here["torch"].split("+")[0] != hello.versions.get("torch", "?").split("+")[0]:
            out.append(
                Finding("warning", name, f"runs torch {hello.versions.get('torch')}, the server {here['torch']}")
            )
        if abs(hello.clock_offset) > CLOCK_SECONDS:
            out.append(Finding("error", name, f"its clock is off by {hello.clock_offset:+.0f} s; enable NTP"))
        for key in sorted({*ours, *hello.schema}) if hello.schema else ():
            if ours.get(key) != hello.schema.get(key):
                said = describe_difference(key, ours.get(key), hello.schema.get(key), whose)
                out.append(Finding("error", name, said))
    return out


def _usual(hellos: Mapping[int, Hello]) -> dict[str, Any]:
    """The schema that most sites have; of several, that of the first."""
    told = {k: json.dumps(hello.schema, sort_keys=True) for k, hello in sorted(hellos.items()) if hello.schema}
    if not told:
        return {}
    most = max(told, key=lambda k: (list(told.values()).count(told[k]), -k))
    return hellos[most].schema


def compare_versions(name: str, mine: str, theirs: str) -> list[Finding]:
    """Server and sites may be one minor version apart, so that they need not all be updated at once; what an older one
    does not know, it refuses."""
    if mine == theirs:
        return []
    (major, minor), (other_major, other_minor) = _minor(mine), _minor(theirs)
    if major != other_major or abs(minor - other_minor) > 1:
        said = (
            f"runs fedtail {theirs}, the server {mine}; they may differ by one minor version at most; update the "
            "older one"
        )
        return [Finding("error", name, said)]
    return [Finding("warning", name, f"runs fedtail {theirs}, the server {mine}; update the older one when you can")]


def _minor(version: str) -> tuple[int, int]:
    """Major and minor; of what is no version, one that is far from all."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (-9, -9)


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


def settle(
    hellos: dict[int, Hello],
    missing: dict[int, str],
    names: Sequence[str],
    quorum: float = 0.0,
    agreed: Mapping[str, Any] | None = None,
    sizes: Sequence[int] = (),
) -> None:
    """Move those sites from ``hellos`` to ``missing`` that mean something else than most do, or than a run has agreed
    on, or have other data than when it began (``sizes``, 0 if not known), if enough are left without them."""
    bad: dict[int, str] = {
        names.index(f.subject): Fault("unexpected", clean(f.message))
        for f in compare(hellos, names, agreed)
        if f.level == "error"
    }
    for k, size in enumerate(sizes):
        if size and k in hellos and hellos[k].n_train != size:
            said = f"it has {hellos[k].n_train} training samples, but had {size} when the run began; start a new run"
            bad[k] = Fault("changed", said)
    if not quorum or sizes or len(hellos) - len(bad) >= least(quorum, len(hellos) + len(missing)):
        for k, reason in bad.items():
            missing[k] = reason
            del hellos[k]


def agree(
    hellos: Mapping[int, Hello],
    missing: Mapping[int, str],
    names: Sequence[str],
    quorum: float = 1.0,
    agreed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The common schema, which is ``agreed`` where a run has one; ``FedtailError`` with every reason why there is none.

    Sites may be missing down to the quorum; those that are there must agree. Who was not asked does not count.
    """
    problems = [f"{f.subject}: {clean(f.message, 400)}" for f in compare(hellos, names, agreed) if f.level == "error"]
    problems += [f"{names[k]}: {CODES['policy-trust']}" for k, hello in hellos.items() if not hello.schema]
    if len(hellos) < least(quorum, len(hellos) + len(missing)):
        problems = [*(f"{names[k]}: {reason}" for k, reason in sorted(missing.items())), *problems]
    if problems:
        raise FedtailError(f"the sites are not ready: {'; '.join(problems)}")
    return _usual(hellos)
