"""The ClientApp: every message goes to the site's worker as it came, and its answer goes back."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from . import worker_client

app = ClientApp()
RECORD = "fedtail"
PHASES = {
    "train": "train.fedtail",
    "validate": "evaluate.validate",
    "confusion": "evaluate.confusion",
    "measure": "evaluate.measure",
    "hello": "query.hello",
    "statistics": "query.statistics",
}
"""Phase of the round -> Flower's message type."""


def to_content(parts: dict[str, bytes]) -> RecordDict:
    """Parts as Flower arrays of bytes; Flower stores equal parts of different messages once."""
    arrays = {name: Array("uint8", (len(data),), "fedtail.bytes", data) for name, data in parts.items()}
    return RecordDict({RECORD: ArrayRecord(arrays)})


def from_content(content: RecordDict) -> dict[str, bytes]:
    """Inverse of ``to_content``; ``KeyError`` if the message is not one of ours."""
    return {name: array.data for name, array in content.array_records[RECORD].items()}


def _answer(message: Message, context: Context, phase: str) -> Message:
    site = context.node_config.get("site")
    if not site:
        raise worker_client.WorkerError("start this SuperNode with --node-config 'site=\"/path/to/site.toml\"'")
    reply = worker_client.ask(str(site), phase, from_content(message.content))
    return Message(to_content(reply), reply_to=message)


def _register(phase: str, message_type: str) -> None:
    category, action = message_type.split(".")

    @getattr(app, category)(action)
    def answer(message: Message, context: Context) -> Message:
        return _answer(message, context, phase)


for _phase, _type in PHASES.items():
    _register(_phase, _type)
