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
from typing import Any

import numpy as np
import torch

from fedtail.boosting.model import TreesModule
from fedtail.core.records import Tensors
from fedtail.core.scores import Scores
from fedtail.core.totals import Totals
from fedtail.errors import FedtailError
from fedtail.federate.agreed import FILES, OnWait, What, digest_of, head_of
from fedtail.federate.exchanges import Exchanges, Journal
from fedtail.federate.protocol.agreement import LEAST, AgreementError
from fedtail.federate.protocol.transport import Transport
from fedtail.federate.relay import Relay, RelayTotals
from fedtail.federate.site.prepared import SiteData
from fedtail.files import read_json, write_atomically
from fedtail.runs.judged import Judged
from fedtail.runs.monitor import MOST_INPUTS, Seen, count
from fedtail.runs.saved import SavedModel, load_model


def write_question(
    what: What, folder: Path, names: Sequence[str], trust: str, reference: Seen | None = None
) -> dict[str, Any]:
    """What sites are asked to sign. folder: the run of the model; reference: what a look is compared with."""
    if trust == "private":
        raise FedtailError(f"deploy.trust = 'private': counts to {what} a model carry no noise; use 'blind'")
    if trust == "blind" and len(names) < LEAST:
        raise FedtailError(f"deploy.trust = 'blind' needs at least {LEAST} sites, but there are {len(names)}")
    known = "" if reference is None else digest_of_counts(reference.flat())
    return {**head_of(trust, names, folder.name), "what": what, "model": digest_of(folder), "reference": known}


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
    begun = [(folder, read_json(folder.parent.with_suffix(".json"))) for folder in home.glob("agreements/*/run")]
    agreed = [folder for folder, party in begun if party and party["document"]["trust"] != "server"]
    for folder in sorted([*agreed, *home.glob("models/*")]):
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


def answer_question(
    question: Mapping[str, Any], totals: Exchanges, folder: Path, data: SiteData, name: str, home: Path
) -> str:
    """A site's part under an agreement, with the model in a folder; returns the digest of the sums. That of a reference
    is kept for later looks."""
    model = load_model(folder)
    known = name in model.architecture.get("sites", [])  # a model may know the site
    rows = {totals.here[0]: data.judged(replace(model, site=name) if known else model)}
    found = counted(question["what"], totals, model, rows, read_reference(home, question))
    if isinstance(found, Seen) and question["what"] == "reference":
        write_atomically(reference_file(home, question["model"]), json.dumps(found.to_json()))
    return digest_of_counts(found.flat())


def keep_model(folder: Path, tensors: Tensors) -> None:
    """Keep the model that a server sends along, which is trusted; code it may not name."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).write_bytes(tensors[name].numpy().tobytes())


# -- at the server -------------------------------------------------------------------------------------------------


def ask(
    question: Mapping[str, Any],
    transport: Transport,
    folder: Path,
    timeout: float,
    reference: Seen | None = None,
    on_wait: OnWait | None = None,
) -> Scores | Seen:
    """Have all sites count, and add up."""
    model, names = load_model(folder), list(question["sites"])
    relay = Relay(transport, names, timeout, on_wait=on_wait)
    files = {name: torch.from_numpy(np.fromfile(folder / name, dtype=np.uint8)) for name in FILES}
    agreement, _ = relay.begin(question, tensors=files)
    with tempfile.TemporaryDirectory() as journal:
        totals = RelayTotals(relay, agreement, [range(len(names))], Journal(Path(journal)))
        found = counted(question["what"], totals, model, {}, reference)
        done = totals.finish()
    for client, digest in done.items():
        if digest != digest_of_counts(found.flat()):
            raise FedtailError(f"{names[client]} has come to other counts than this server")
    return found
