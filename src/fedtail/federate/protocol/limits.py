"""What a message may hold, declared before it is opened: a peer is not believed to be small, shallow or well-formed.

A ``Budget`` names the tensors that can come, with their types and shapes, and how much JSON. What is not in it is
refused by its headers alone; nothing is decoded that was not declared, so that a message never takes more memory than
twice what its budget says (the bytes that came, and what they are read into).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from torch import Tensor

from fedtail.errors import FedtailError
from fedtail.federate.protocol.faults import clean

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of a number, for each type that travels; there are others (float8), which half of torch cannot handle."""
FLOATS = ("F32", "F64")
HEADER, DIMENSIONS, LONGEST_SIDE = 1024, 6, 1 << 40
DEPTH, DIGITS, ITEM_BYTES = 24, 32, 256
"""Of JSON: deepest nesting, longest number, and what an item of a list or an object takes in memory, at most."""
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # one that is never closed, too, or each mark is tried
_LONG_NUMBER = re.compile(rb"[-+.0-9eE]{%d}" % (DIGITS + 1))
_NAME = re.compile(r"[\w./:-]{1,128}")


class WireError(FedtailError):
    """A message that cannot be read, or is not what was asked for. ``code`` is one of ``faults.CODES``."""

    def __init__(self, text: str, code: str = "malformed") -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Kind:
    """What a tensor of a message may be."""

    types: tuple[str, ...] = tuple(SIZES)
    shape: tuple[int | None, ...] | None = None
    """None for any number of dimensions, and in a place for any length there; then ``most`` counts."""
    most: int = 0
    """Numbers in it, where the shape does not say."""
    times: int = 1
    """How many there may be of a prefix."""

    @property
    def values(self) -> int:
        lengths = self.shape
        return self.most if lengths is None or None in lengths else math.prod(n for n in lengths if n is not None)

    @property
    def size(self) -> int:
        return self.times * (self.values * max(SIZES[t] for t in self.types) + HEADER)


@dataclass(frozen=True)
class Budget:
    """A message: tensors by name, or by a prefix that ends in a slash, and so many bytes of JSON."""

    tensors: Mapping[str, Kind] = field(default_factory=dict)
    meta: int = 1 << 16
    items: int = 1 << 12
    """Numbers, texts, lists and objects in the JSON."""

    @property
    def size(self) -> int:
        """Of the whole message, as it travels."""
        return self.meta + sum(kind.size for kind in self.tensors.values())

    @property
    def memory(self) -> int:
        """Of the message while it is read: the bytes that came, or what they become, whichever is more."""
        return self.size + ITEM_BYTES * self.items

    def kind(self, name: str) -> Kind:
        """``WireError`` for a tensor that nobody asked for."""
        found = self.tensors.get(name) or self.tensors.get(f"{name.partition('/')[0]}/") or self.tensors.get("/")
        if found is None or not _NAME.fullmatch(name):
            raise WireError(f"a tensor {clean(name, 40)!r} that was not asked for", "unexpected")
        return found

    def check(self, parts: Mapping[str, bytes]) -> None:
        """Sizes, before anything is looked into."""
        size = sum(map(len, parts.values()))
        if size > self.size:
            said = f"a message of {size / 1e6:.1f} MB, at most {self.size / 1e6:.1f} MB are possible"
            raise WireError(said, "too-large")
        if len(parts) > 1 + sum(kind.times for kind in self.tensors.values()):
            raise WireError(f"{len(parts)} parts in a message", "unexpected")


ANY = Budget({"/": Kind(most=1 << 32, times=20_000)}, meta=1 << 24, items=1 << 20)
"""Whatever fedtail's own messages can be, for whoever does not know more."""


def open_json(data: bytes, budget: Budget = ANY, depth: int = DEPTH) -> dict[str, Any]:
    """The object in some JSON; ``WireError`` for anything else, for nesting, numbers or lists beyond the budget, for
    keys that come twice, for NaN and infinities, and for text that is none."""
    if len(data) > budget.meta:
        raise WireError(f"{len(data)} bytes of JSON, at most {budget.meta} are possible", "too-large")
    outside = _STRINGS.sub(b'""', bytes(data))
    if outside.count(b",") + outside.count(b"[") + outside.count(b"{") > budget.items:
        raise WireError(f"more than {budget.items} items of JSON", "too-large")
    marks = np.frombuffer(outside, dtype=np.uint8)
    level = np.cumsum(np.isin(marks, (91, 123)).astype(np.int32) - np.isin(marks, (93, 125)))
    if level.size and int(level.max()) > depth:
        raise WireError(f"JSON nested {int(level.max())} deep, at most {depth} are possible")
    if _LONG_NUMBER.search(outside):
        raise WireError(f"a number of more than {DIGITS} characters")
    try:
        text = bytes(data).decode("utf-8")
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_finite, parse_float=_finite)
        if b"\\u" in data:
            json.dumps(found, ensure_ascii=False).encode("utf-8")  # halves of characters cannot be written anywhere
    except (ValueError, RecursionError, MemoryError) as error:
        raise WireError(f"its JSON cannot be read ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise WireError("its JSON is not an object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a key twice")
    return out


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def open_tensor(name: str, blob: bytes, kind: Kind) -> Tensor:
    """One tensor, whose header says that it is of the kind and as large as it is."""
    length = int.from_bytes(bytes(blob[:8]), "little")
    if len(blob) < 8 or length > min(HEADER, len(blob) - 8):
        raise WireError(f"tensor {name!r} has no header")
    header = open_json(bytes(blob[8 : 8 + length]), Budget(items=64), depth=3)
    about = header.get("t")
    if set(header) != {"t"} or not isinstance(about, dict) or set(about) != {"dtype", "shape", "data_offsets"}:
        raise WireError(f"tensor {name!r} has a header of another kind")
    dtype, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(dtype, str) or dtype not in kind.types:
        raise WireError(f"tensor {name!r} is of another type than {', '.join(kind.types)}", "unexpected")
    sides = isinstance(shape, list) and all(type(n) is int and 0 <= n <= LONGEST_SIDE for n in shape)
    if not sides or len(shape) > DIMENSIONS:
        raise WireError(f"tensor {name!r} has no shape")
    if kind.shape is not None:
        fits = len(shape) == len(kind.shape) and all(w in (None, n) for n, w in zip(shape, kind.shape, strict=True))
        if not fits:
            raise WireError(f"tensor {name!r} has shape {tuple(shape)}, expected {kind.shape}", "unexpected")
    count = math.prod(shape)
    if count > kind.values or (not count and max(shape, default=0) > max(kind.values, 1)):
        raise WireError(f"tensor {name!r} has {count} numbers, at most {kind.values} are possible", "too-large")
    if offsets != [0, count * SIZES[dtype]] or len(blob) != 8 + length + count * SIZES[dtype]:
        raise WireError(f"tensor {name!r} is not as long as its header says")
    try:
        return safetensors_torch.load(bytes(blob))["t"]
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise WireError(f"tensor {name!r} cannot be read ({type(error).__name__})") from None


def whole(value: Any, low: int, high: float, name: str) -> int:
    """An integer within a range; ``WireError`` for anything else: 1.0, true and "1" are none."""
    if type(value) is not int or not low <= value <= high:
        said = value if type(value) is int else type(value).__name__
        raise WireError(f"{name} is {said}, possible are {low} to {high:g}", "out-of-range")
    return value


def real(value: Any, name: str) -> float:
    """A finite number; ``WireError`` for anything else."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise WireError(f"{name} is no finite number", "out-of-range")
    return float(value)
