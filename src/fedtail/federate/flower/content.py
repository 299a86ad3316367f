"""fedtail's messages as Flower's records. It travels in the app bundle: the standard library and Flower only."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, RecordDict

RECORD = "fedtail"
ACTION = "fedtail"
"""All messages are Flower's ``query.fedtail``; what is asked travels inside, as fedtail's ``phase``."""


def to_content(parts: dict[str, bytes]) -> RecordDict:
    """Parts as Flower arrays of bytes; Flower stores equal parts of different messages once."""
    arrays = {name: Array("uint8", (len(data),), "fedtail.bytes", data) for name, data in parts.items()}
    return RecordDict({RECORD: ArrayRecord(arrays)})


def from_content(content: RecordDict) -> dict[str, bytes]:
    """Inverse of ``to_content``; ``KeyError`` if the message is not one of ours."""
    return {name: array.data for name, array in content.array_records[RECORD].items()}
