"""fedtail's messages as Flower's records. It travels in the app bundle: the standard library and Flower only.

Flower sends a message as a tree of objects, each with a request of its own that costs its server some 20 ms, and an
array is two of them. So what is small travels together, in one object, and only what is large as arrays, which Flower
cuts into chunks and stores once for all messages that have it.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

RECORD, SMALL = "fedtail", "fedtail.small"
ACTION = "fedtail"
"""All messages are Flower's ``query.fedtail``; what is asked travels inside, as fedtail's ``phase``."""
LARGE_BYTES = 1 << 18


def to_content(parts: dict[str, bytes]) -> RecordDict:
    """Return parts as Flower's records: arrays of bytes for large ones."""
    small = {name: data for name, data in parts.items() if len(data) < LARGE_BYTES}
    large = {
        name: Array("uint8", (len(data),), "fedtail.bytes", data) for name, data in parts.items() if name not in small
    }
    content = RecordDict({SMALL: ConfigRecord({**small})})
    if large:
        content[RECORD] = ArrayRecord(large)
    return content


def from_content(content: RecordDict) -> dict[str, bytes]:
    """Return the parts in Flower's records, the inverse of ``to_content``; ``KeyError`` for a message not of ours."""
    small = {name: _only_bytes(data) for name, data in content.config_records[SMALL].items()}
    if RECORD not in content.array_records:
        return small
    return {**small, **{name: _only_bytes(array.data) for name, array in content.array_records[RECORD].items()}}


def _only_bytes(data: object) -> bytes:
    """Return data that are bytes: ``bytes`` of a number would be as many zeros, and the number is the peer's."""
    if not isinstance(data, bytes):
        raise KeyError(f"a part that is {type(data).__name__}")
    return data
