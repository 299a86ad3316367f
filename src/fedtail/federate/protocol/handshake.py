"""Before round 0: who is there, with which software, and do all sites mean the same data?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedtail.errors import FedtailError
from fedtail.federate.protocol.faults import CODES, clean
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.limits import Budget, WireError, whole
from fedtail.federate.protocol.transport import Phase, Transport, exchange
from fedtail.federate.protocol.wire import MOST, Parcel
from fedtail.settings import ModelSettings
from fedtail.version import VERSION

HELLO = Budget(meta=1 << 23, items=1 << 18)
"""A schema of thousands of columns, with their words."""


@dataclass(frozen=True)
class Hello:
    """A site's answer to the handshake."""

    client: int
    site: str
    schema: dict[str, Any]
    """What its data are; empty where the site does not trust the server with them."""
    version: str
    """Of fedtail."""
    n_train: int = 0
    n_validation: int = 0


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

    def read(client: int, parcel: Parcel) -> Hello:
        said = parcel.meta
        return Hello(
            client=client,
            site=clean(said.get("site")),
            schema=read_schema(said["schema"]) if "schema" in said else {},
            version=clean(said.get("version", "?"), 40),
            n_train=whole(said.get("n_train", 0), 0 if job is None else 1, MOST, "n_train"),
            n_validation=whole(said.get("n_validation", 0), 0, MOST, "n_validation"),
        )

    answers = exchange(transport, Phase.HELLO, parcels, read, timeout, HELLO)
    return answers.good, dict(answers.reasons)


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


def faults_of(hello: Hello, name: str, agreed: Mapping[str, Any], whose: str) -> Iterator[str]:
    """What keeps a site from taking part: its name, version, or data that are not as ``agreed``."""
    if hello.site != name:
        yield f"its site.toml says it is {hello.site!r}; give each site its own folder"
    if hello.version.split(".")[:2] != VERSION.split(".")[:2]:
        yield f"runs fedtail {hello.version}, the server {VERSION}; install the same everywhere"
    if not hello.schema:
        yield CODES["policy-trust"]
        return
    for key in sorted({*agreed, *hello.schema}):
        if agreed.get(key) != hello.schema.get(key):
            yield describe_difference(key, agreed.get(key), hello.schema.get(key), whose)


def describe_difference(key: str, ours: Any, other: Any, whose: str) -> str:
    """One line that names what a site disagrees about with ``whose`` schema."""
    if key == "encoder":
        named = [f"{e['name']} ({str(e['digest'])[:12]})" if isinstance(e, dict) else "none" for e in (other, ours)]
        return (
            f"its encoder is {named[0]}, but at {whose} it is {named[1]}; install the same one "
            "(fedtail[pretrained]), or set model.encoder = 'none'"
        )
    if key == "table" and isinstance(ours, dict) and isinstance(other, dict):
        known = {str(c["name"]): c for c in ours.get("columns", [])}
        differing = [str(c["name"]) for c in other.get("columns", []) if known.get(str(c["name"])) != c]
        return f"its schema file differs from that of {whose} (columns {differing[:5] or 'the same, other settings'})"
    if isinstance(ours, list) and isinstance(other, list):
        missing, extra = ([v for v in one if v not in rest][:5] for one, rest in ((ours, other), (other, ours)))
        words = [f"lacks {missing}"] * bool(missing) + [f"also has {extra}"] * bool(extra)
        return f"{key} differ from {whose}: {' and '.join(words) or 'another order'}"
    return f"{key} is {other!r}, but at {whose} it is {ours!r}"


def agree(
    hellos: Mapping[int, Hello],
    missing: Mapping[int, str],
    names: Sequence[str],
    agreed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The common schema: ``agreed``, or the one that most sites have; ``FedtailError`` with every reason why there is
    none. All sites must be there, so that it is known who takes part and with how many samples."""
    problems = [f"{names[k]}: {reason}" for k, reason in sorted(missing.items())]
    told = [json.dumps(hello.schema, sort_keys=True) for _, hello in sorted(hellos.items()) if hello.schema]
    usual = json.loads(max(told, key=told.count)) if told else {}  # of several, that of the first
    whose = "the run" if agreed is not None else repr(names[min(hellos, default=0)])
    for k, hello in sorted(hellos.items()):
        found = faults_of(hello, names[k], usual if agreed is None else agreed, whose)
        problems += [f"{names[k]}: {clean(fault, 400)}" for fault in found]
    if problems:
        raise FedtailError(f"the sites are not ready: {'; '.join(problems)}")
    return usual
