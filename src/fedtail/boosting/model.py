"""A forest as a model like any other: one vector, and a module that maps stored samples to logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtail.boosting.bins import Bins, Column, read_columns
from fedtail.boosting.predictor import Forest, Start
from fedtail.models.flat import FlatModel

MOST_BINS = 254


@dataclass(frozen=True)
class Shape:
    """What is known of a forest before it grows: how many bytes hold it, and where."""

    columns: tuple[Column, ...]
    n_classes: int
    rounds: int
    leaves: int

    @property
    def parts(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Name -> type and shape of an array, one after the other in the vector."""
        f, c, trees = len(self.columns), self.n_classes, 1 if self.n_classes == 2 else self.n_classes
        nodes = (self.rounds, trees, 2 * self.leaves - 1)
        return {
            "rounds": (np.int64, (1,)),
            "counts": (np.int64, (c,)),
            "weights": (np.float64, (c,)),
            "scores": (np.float64, (trees,)),
            "checks": (np.int64, (self.rounds, 3 + c * c)),
            "value": (np.float64, nodes),
            "cuts": (np.float32, (f, MOST_BINS)),
            "gain": (np.float32, nodes),
            "kept": (np.int16, (f, MOST_BINS)),
            "column": (np.int16, nodes),
            "child": (np.int16, nodes),
            "left": (np.uint8, (*nodes, 32)),
        }

    @property
    def size(self) -> int:
        return sum(np.dtype(kind).itemsize * int(np.prod(shape)) for kind, shape in self.parts.values())

    def pack(self, forest: Forest) -> Tensor:
        """(size,) uint8 of a forest with at most that many rounds."""
        start, bins, found = forest.start, forest.start.bins, {}
        empty = {"column": -1, "kept": -1, "cuts": np.nan}
        for name, (kind, shape) in self.parts.items():
            found[name] = np.full(shape, empty.get(name, 0), dtype=kind)
        found["rounds"][0] = forest.rounds
        found["counts"][:], found["weights"][:], found["scores"][:] = start.counts, start.weights, start.scores
        for f, (cuts, kept) in enumerate(zip(bins.cuts, bins.kept, strict=True)):
            found["cuts"][f, : len(cuts)], found["kept"][f, : len(kept)] = cuts, kept
        for name, values in forest.arrays().items():
            found[name][: len(values)] = values
        for t, check in enumerate(forest.checks):
            found["checks"][t] = check
        return torch.from_numpy(np.concatenate([found[name].reshape(-1).view(np.uint8) for name in self.parts]))

    def unpack(self, vector: Tensor) -> Forest | None:
        """The forest in a vector; None if it has not begun."""
        raw, at, found = vector.detach().cpu().numpy(), 0, dict[str, np.ndarray]()
        for name, (kind, shape) in self.parts.items():
            n = np.dtype(kind).itemsize * int(np.prod(shape))
            found[name] = raw[at : at + n].copy().view(kind).reshape(shape)
            at += n
        if not found["counts"].any():
            return None
        cuts = tuple(tuple(float(v) for v in row[~np.isnan(row)]) for row in found["cuts"])
        kept = tuple(tuple(int(v) for v in row[row >= 0]) for row in found["kept"])
        start = Start(Bins(self.columns, cuts, kept), found["counts"], found["weights"], found["scores"])
        trees: dict[str, Any] = {name: found[name] for name in Forest.parts}
        return Forest(start, checks=list(found["checks"]), **trees).first(int(found["rounds"][0]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Shape:
        columns = tuple(Column(**column) for column in raw["columns"])
        return cls(columns, int(raw["n_classes"]), int(raw["rounds"]), int(raw["leaves"]))


class TreesModule(nn.Module):
    """(N, width) stored samples -> (N, C) logits. A sample may lack the last feature, its site."""

    forest: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("forest", torch.zeros(shape.size, dtype=torch.uint8))
        self.site = -1
        """The site of samples that do not say theirs, -1 for none."""
        self._read: Forest | None = None

    def read(self) -> Forest:
        """The forest in the buffer."""
        if self._read is None:
            self._read = self.shape.unpack(self.forest)
        if self._read is None:
            raise ValueError("these trees have not begun to grow")
        return self._read

    def load(self, vector: Tensor) -> None:
        self.forest.copy_(vector)
        self._read = None

    def _load_from_state_dict(self, *args: Any, **more: Any) -> None:
        self._read = None
        super()._load_from_state_dict(*args, **more)

    def values(self, x: Tensor) -> np.ndarray:
        """(F, N) what trees see of stored samples."""
        return read_columns(with_site(x, self.shape.columns, self.site).numpy(), self.shape.columns)

    def forward(self, x: Tensor) -> Tensor:
        forest = self.read()
        return torch.from_numpy(forest.logits(forest.scores(forest.start.bins.of(self.values(x.cpu())))))


def with_site(x: Tensor, columns: tuple[Column, ...], sites: np.ndarray | int = -1) -> Tensor:
    """Samples with the number of their site behind, where the columns ask for one and it is not there; -1 is none."""
    asked = [c.at for c in columns if c.code]
    if not asked or x.shape[1] > asked[0]:
        return x
    numbers = torch.as_tensor(np.broadcast_to(np.asarray(sites, dtype=np.float32), len(x)).copy())
    return torch.cat([x.float(), numbers[:, None]], dim=1)


class TreesModel(FlatModel):
    """A forest by its bytes: what the loop carries from round to round, and what a checkpoint holds."""

    def __init__(self, shape: Shape) -> None:
        self.module: TreesModule = TreesModule(shape)
        self.shape = shape
        self.params, self.counters, self.shapes, self.n_params = [], [], [], shape.size
        self.vector = self.module.forest

    def load(self, x: Tensor) -> None:
        self.module.load(x)

    def clone(self) -> TreesModel:
        return self.at(self.module.site)

    def at(self, site: int) -> TreesModel:
        """A copy for the rows of one site."""
        made = TreesModel(self.shape)
        made.load(self.vector)
        made.module.site = site
        return made
