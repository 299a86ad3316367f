"""Updates that wait on disk: how a server takes a hundred large ones without holding them.

Weights are known only when it is known who has answered, and sums are made in the order of clients, so that a
federation has the simulator's bits. Until then an update waits in a file, and is looked at through a mapping that lasts
as long as somebody uses it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.records import Tensors, Update
from fedtail.errors import writing


class StoredTensor:
    """A tensor in a file without a name, which goes when this object does, also after a crash."""

    def __init__(self, values: Tensor, folder: Path) -> None:
        array = values.detach().cpu().contiguous().numpy()
        self.shape, self.dtype = array.shape, array.dtype
        self.file: IO[bytes] | None = None
        if array.size:  # nothing cannot be mapped
            with writing(folder):
                self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
                array.tofile(self.file)
                self.file.flush()

    def load(self) -> Tensor:
        """The tensor, in memory as far and as long as it is used; what is written to it is not kept."""
        if self.file is None:
            return torch.from_numpy(np.empty(self.shape, self.dtype))
        return torch.from_numpy(np.memmap(self.file, self.dtype, "c", shape=self.shape))


class StoredUpdate(Update):
    """An ``Update`` whose tensors wait in files of ``folder``."""

    def __init__(self, update: Update, folder: Path) -> None:
        self.client, self.n_samples = update.client, update.n_samples
        self.steps, self.loss, self.reports = update.steps, update.loss, update.reports
        self._delta = StoredTensor(update.delta, folder)
        self._extras = {name: StoredTensor(value, folder) for name, value in update.extras.items()}

    @property
    def delta(self) -> Tensor:
        return self._delta.load()

    @delta.setter
    def delta(self, value: Any) -> None:
        raise AttributeError("an update on disk is read-only")

    @property
    def extras(self) -> Tensors:
        return {name: value.load() for name, value in self._extras.items()}

    @extras.setter
    def extras(self, value: Any) -> None:
        raise AttributeError("an update on disk is read-only")
