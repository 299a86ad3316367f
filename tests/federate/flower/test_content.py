"""A message as Flower's records: the same parts, in as few objects as can be."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from flwr.app import RecordDict

from fedtail.federate.flower.content import LARGE_BYTES, from_content, to_content


@pytest.mark.parametrize("sizes", [(3,), (3, 0, 40), (3, LARGE_BYTES), (LARGE_BYTES + 1, 7, LARGE_BYTES)])
def test_parts_come_back_as_they_were(sizes: tuple[int, ...]) -> None:
    parts = {f"tensor/{i}": bytes([i]) * size for i, size in enumerate(sizes)}
    content = to_content(parts)
    assert from_content(content) == parts
    assert len(content.array_records) == any(size >= LARGE_BYTES for size in sizes)


def test_what_is_not_ours_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        from_content(RecordDict())
