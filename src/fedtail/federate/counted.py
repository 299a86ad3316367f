"""Counts of a trained model at all sites, without training: what ``deploy evaluate`` and ``deploy monitor`` ask.

Under ``blind`` the question is a document that all sites sign, and the counts are masked sums. A site answers for a
model that it has come to by an agreement of its own, or that its operator has put into its ``models`` folder: for no
other, since whoever chooses the model chooses what is counted. Where the server is trusted, it sends the model.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedtail.boosting.model import TreesModule
from fedtail.core.scores import Scores
from fedtail.core.totals import LIMIT, Part, Reach, Totals
from fedtail.errors import FedtailError
from fedtail.federate.agreed import FORMAT, QUESTION
from fedtail.federate.journal import Journal
from fedtail.federate.protocol.agreement import LEAST, AgreementError, canonical
from fedtail.federate.protocol.exchange import exchange
from fedtail.federate.protocol.limits import Budget, Kind
from fedtail.federate.protocol.transport import Phase, Transport
from fedtail.federate.protocol.wire import Parcel
from fedtail.federate.relay import OnWait, Relay, RelayTotals
from fedtail.federate.site.prepared import SiteData
from fedtail.files import write_atomically
from fedtail.runs.judged import Judged
from fedtail.runs.monitor import MOST_INPUTS, Seen, count
from fedtail.runs.saved import SavedModel, load_model
from fedtail.version import VERSION

What = Literal["evaluate", "reference", "look"]
WHATS: tuple[What, ...] = ("evaluate", "reference", "look")
FILES = ("model.safetensors", "model.json")


def write_question(
    what: What, folder: Path, names: Sequence[str], trust: str, reference: Seen | None = None
) -> dict[str, Any]:
    """What sites are asked to sign. folder: the run of the model; reference: what a look is compared with."""
    if trust == "private":
        raise FedtailError(f"deploy.trust = 'private': counts to {what} a model carry no noise; use 'blind'")
    if trust == "blind" and len(names) < LEAST:
        raise FedtailError(f"deploy.trust = 'blind' needs at least {LEAST} sites, but there are {len(names)}")
    return {
        "format": FORMAT,
        "fedtail": VERSION,
        "run": folder.name,
        "trust": trust,
        "sites": list(names),
        "what": what,
        "model": digest_of(folder),
        "reference": "" if reference is None else digest_of_counts(reference.flat()),
    }


def check_question(told: Mapping[str, Any]) -> None:
    """``AgreementError`` unless a document has the form of a question."""
    texts = all(isinstance(told.get(name), str) for name in ("run", "trust", "model", "reference"))
    if set(told) != QUESTION or told["format"] != FORMAT or told["what"] not in WHATS or not texts:
        raise AgreementError("a question of another form; install the same fedtail everywhere")


def digest_of(folder: Path) -> str:
    """Return the hash of a model: its weights and all that leads from rows to answers, but no site's own decision."""
    about = json.loads((folder / "model.json").read_text())
    told = {name: value for name, value in about.items() if name not in ("sites", "data")}
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return hashlib.sha256(canonical({**told, "weights": weights})).hexdigest()


def digest_of_counts(counts: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(counts, dtype=np.int64).tobytes()).hexdigest()


def watched(model: SavedModel) -> int:
    """Return how many inputs of a model are watched."""
    if isinstance(model.module, TreesModule):
        width = max((column.at for column in model.module.shape.columns if column.code), default=-1) + 1
        return width or model.input_shape[0]
    return model.input_shape[0] if len(model.input_shape) == 1 and model.input_shape[0] <= MOST_INPUTS else 0


def counted(
    what: What, totals: Totals, model: SavedModel, rows: Mapping[int, Judged], reference: Seen | None = None
) -> Scores | Seen:
    """Count all sites' rows. rows: of the clients in this process; a relay has none."""
    n_classes = len(model.classes)
    if what == "evaluate":
        scores = Scores.of(np.empty((0, n_classes)), np.empty(0))
        labelled = {k: judged.labelled for k, judged in rows.items()}
        return scores.like(totals.total(scores.flat().size, lambda k: labelled[k].scores.flat()))
    none = Seen.none(n_classes, watched(model))
    if what == "look":
        if reference is None:
            raise FedtailError("there is no reference to compare with; begin with --reference")
        known = reference.inputs
    else:
        rows = {k: judged.labelled for k, judged in rows.items()}
        first = totals.total(none.inputs.size, lambda k: count(rows[k]).inputs.ravel())
        known = first.reshape(none.inputs.shape)
    among = what == "reference"
    return none.like(totals.total(none.flat().size, lambda k: count(rows[k], known, among=among).flat()))


# -- at a site -----------------------------------------------------------------------------------------------------


def find_model(home: Path, digest: str) -> Path:
    """Return the run folder of a model that this site has agreed on, or that its operator has put into ``models``."""
    for folder in sorted([*home.glob("agreements/*/run"), *home.glob("models/*")]):
        if all((folder / name).is_file() for name in FILES) and digest_of(folder) == digest:
            return folder
    raise AgreementError(
        f"the question is about a model that this site has not agreed on ({digest[:12]}); to have it answered, put the "
        f"model's run folder into {home / 'models'}"
    )


def reference_file(home: Path, model: str) -> Path:
    """Where a site keeps the counts of reference rows that its looks at a model are compared with."""
    return home / "agreements" / f"reference-{model[:24]}.json"


def read_reference(home: Path, question: Mapping[str, Any]) -> Seen | None:
    """Return the reference that a look names, as this site has it."""
    if question["what"] != "look":
        return None
    file = reference_file(home, question["model"])
    found = Seen.from_json(json.loads(file.read_text())) if file.is_file() else None
    if found is None or digest_of_counts(found.flat()) != question["reference"]:
        raise AgreementError("a look is compared with another reference than this site has counted; begin anew")
    return found


def answer_question(question: Mapping[str, Any], totals: Totals, data: SiteData, name: str, home: Path) -> str:
    """A site's part under an agreement; returns the digest of the sums. That of a reference is kept for later looks."""
    model = load_model(find_model(home, question["model"]))
    rows = {totals.here[0]: judged_at(data, name, model)}
    found = counted(question["what"], totals, model, rows, read_reference(home, question))
    if isinstance(found, Seen) and question["what"] == "reference":
        write_atomically(reference_file(home, question["model"]), json.dumps(found.to_json()))
    return digest_of_counts(found.flat())


def answer_plainly(parcel: Parcel, data: SiteData, name: str) -> np.ndarray:
    """The part of a site that trusts its server: the same program, up to the sum that is not there yet."""
    question, model = parcel.meta["question"], unpack_model(parcel.tensors)
    check_question(question)
    sums = [parcel.tensors[f"sum/{i}"].numpy() for i in range(int(parcel.meta["sums"]))]
    reference = None
    if question["what"] == "look":
        none = Seen.none(len(model.classes), watched(model))
        reference = none.like(parcel.tensors["reference"].numpy())
    totals = UpTo(sums)
    try:
        counted(question["what"], totals, model, {0: judged_at(data, name, model)}, reference)
    except StopIteration:
        return totals.part
    raise AgreementError("all sums of the question are there already")


class UpTo:
    """``core.totals.Totals`` of which the first sums are known; at the next one it stops, with this site's part."""

    n_clients, here, groups = 1, (0,), ((0,),)

    def __init__(self, sums: Sequence[np.ndarray]) -> None:
        self.sums, self.part = list(sums), np.empty(0, dtype=np.int64)

    def total(self, size: int, part: Part, *, limit: int = LIMIT, reach: Reach = np.inf) -> np.ndarray:
        if self.sums:
            return self.sums.pop(0)
        self.part = np.asarray(part(0), dtype=np.int64)
        raise StopIteration

    group_totals = total


def judged_at(data: SiteData, name: str, model: SavedModel) -> Judged:
    """The rows that a site has to judge, by a model that may know the site."""
    known = model.architecture.get("sites", [])
    return data.judged(replace(model, site=name) if name in known else model)


def unpack_model(tensors: Mapping[str, torch.Tensor]) -> SavedModel:
    """Return the model that a server sends along, which is trusted; code it may not name."""
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            (Path(folder) / name).write_bytes(tensors[name].numpy().tobytes())
        return load_model(folder)


# -- at the server -------------------------------------------------------------------------------------------------


class PlainTotals:
    """``core.totals.Totals`` at a server that sites trust with their counts."""

    here: Sequence[int] = ()

    def __init__(self, transport: Transport, parcel: Parcel, names: Sequence[str], timeout: float) -> None:
        self.transport, self.parcel, self.names, self.timeout = transport, parcel, names, timeout
        self.n_clients, self.groups = len(names), [range(len(names))]
        self.sums: list[np.ndarray] = []

    def total(self, size: int, part: Part, *, limit: int = LIMIT, reach: Reach = np.inf) -> np.ndarray:
        tensors = {f"sum/{i}": torch.from_numpy(each) for i, each in enumerate(self.sums)}
        parcel = Parcel({**self.parcel.meta, "sums": len(self.sums)}, {**self.parcel.tensors, **tensors})
        told = exchange(
            self.transport,
            Phase.COUNT,
            dict.fromkeys(range(self.n_clients), parcel),
            lambda k, reply: reply.tensors["counts"].numpy(),
            self.timeout,
            Budget({"counts": Kind(("I64",), (size,))}),
        )
        if told.reasons:
            why = "; ".join(f"{self.names[k]}: {reason}" for k, reason in told.reasons.items())
            raise FedtailError(f"not all sites have counted ({why})")
        self.sums.append(np.asarray(sum(told.good.values()), dtype=np.int64))
        return self.sums[-1]

    def group_totals(self, size: int, part: Part, *, limit: int = LIMIT, reach: Reach = np.inf) -> np.ndarray:
        return self.total(size, part)[None]


def ask(
    question: Mapping[str, Any],
    transport: Transport,
    folder: Path,
    timeout: float,
    reference: Seen | None = None,
    on_wait: OnWait | None = None,
) -> Scores | Seen:
    """Have all sites count, and add up: under the masks of an agreement, or from plain counts of sites that trust."""
    model, names = load_model(folder), list(question["sites"])
    if question["trust"] == "server":
        tensors = {name: torch.from_numpy(np.fromfile(folder / name, dtype=np.uint8)) for name in FILES}
        if reference is not None:
            tensors["reference"] = torch.from_numpy(reference.flat())
        plain = PlainTotals(transport, Parcel({"question": dict(question)}, tensors), names, timeout)
        return counted(question["what"], plain, model, {}, reference)
    relay = Relay(transport, names, timeout, on_wait=on_wait)
    agreement, _ = relay.agree(question)
    totals = RelayTotals(relay, agreement, [range(len(names))], Journal(None))
    found = counted(question["what"], totals, model, {}, reference)
    for client, digest in totals.finish().items():
        if digest != digest_of_counts(found.flat()):
            raise FedtailError(f"{names[client]} has come to other counts than this server")
    return found
