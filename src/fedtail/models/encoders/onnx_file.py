"""An encoder from an ONNX file, run by onnxruntime: (N, 3, size, size) scaled pixels -> features or maps.

Its metadata may hold ``image_size``, ``mean`` and ``std`` as JSON; otherwise the size is that of the graph's input and
the scaling ImageNet's.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.errors import FedtailError
from fedtail.models.encoders.base import SIZE, Encoder


class OnnxNetwork(nn.Module):
    """A graph as a module; torch can neither train nor trace it."""

    def __init__(self, path: Path, session: Any) -> None:
        super().__init__()
        self.path, self.session, self.input = path, session, session.get_inputs()[0].name

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.session.run(None, {self.input: row.contiguous().numpy()})[0] for row in x.cpu().split(1)]
        return torch.cat([torch.from_numpy(row) for row in rows])


def open_onnx(name: str) -> Encoder:
    """The encoder in an ONNX file."""
    path = Path(name)
    if not path.is_file():
        raise FedtailError(f"encoder {name!r}: there is no such file")
    try:
        import onnxruntime
    except ImportError:
        raise FedtailError(f"encoder {name!r} needs onnxruntime: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # more change the bits of sums
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        first = str(error).splitlines()[0]
        raise FedtailError(f"encoder {name!r} is not an ONNX file that onnxruntime can run: {first}") from None
    more: dict[str, Any] = {}
    metadata = session.get_modelmeta().custom_metadata_map
    try:
        more = {key: json.loads(metadata[key]) for key in ("mean", "std") if key in metadata}
        shape = session.get_inputs()[0].shape
        side = shape[-1] if isinstance(shape[-1], int) else SIZE
        more["size"] = json.loads(metadata["image_size"]) if "image_size" in metadata else side
    except (ValueError, IndexError) as error:
        raise FedtailError(f"encoder {name!r}: its metadata cannot be read: {error}") from None
    digest = hashlib.sha256(path.read_bytes() + json.dumps(more, sort_keys=True).encode()).hexdigest()
    return Encoder.of(name, OnnxNetwork(path, session), digest=digest, **more)
