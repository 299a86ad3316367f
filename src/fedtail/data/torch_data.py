"""Any torch ``Dataset`` of (input, label) pairs as two arrays in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Subset, TensorDataset

from fedtail.errors import FedtailError


def read_dataset(dataset: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(N, ...) inputs and (N,) labels. Map-style and iterable data sets, tensors, arrays, numbers and PIL images
    (which become channels first); labels may be anything sortable."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0].numpy(), dataset.tensors[1].numpy()
    if isinstance(dataset, Subset) and isinstance(dataset.dataset, TensorDataset) and len(dataset.dataset.tensors) == 2:
        x, y = (t[torch.as_tensor(list(dataset.indices))].numpy() for t in dataset.dataset.tensors)
        return x, y
    inputs: list[np.ndarray] = []
    labels: list[Any] = []
    for i, item in enumerate(_items(dataset, name)):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise FedtailError(f"{name}: sample {i} is a {type(item).__name__}, not an (input, label) pair")
        x = _array(item[0], name, i)
        if inputs and x.shape != inputs[0].shape:
            raise FedtailError(
                f"{name}: sample {i} has shape {x.shape}, the first has {inputs[0].shape}; "
                "resize or pad inputs to one shape"
            )
        inputs.append(x)
        labels.append(_label(item[1], name, i))
    if not inputs:
        raise FedtailError(f"{name} has no samples; drop this client")
    return np.stack(inputs), np.array(labels)


def _items(dataset: Any, name: str) -> Iterable[Any]:
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return (dataset[i] for i in range(len(dataset)))
    if hasattr(dataset, "__iter__"):
        return iter(dataset)
    raise FedtailError(f"{name} is a {type(dataset).__name__}; give a torch Dataset or any sequence of (input, label)")


def _array(value: Any, name: str, i: int) -> np.ndarray:
    if isinstance(value, Image.Image):
        pixels = np.asarray(value)
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    try:
        return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(torch.as_tensor(value))
    except (TypeError, ValueError, RuntimeError):
        raise FedtailError(
            f"{name}: the input of sample {i} is a {type(value).__name__}, not a tensor, array, number or image; "
            "add a transform that converts it"
        ) from None


def _label(value: Any, name: str, i: int) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if value.size != 1 if isinstance(value, np.ndarray) else value.numel() != 1:
            raise FedtailError(f"{name}: the label of sample {i} has shape {tuple(value.shape)}, expected one value")
        return value.item()
    return value
