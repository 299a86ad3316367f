"""Counts of single sites, as they come: checked against what was agreed, and added up fairly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.core.decisions import Decisions
from fedtail.core.robust import capped, fair_share
from fedtail.core.scores import ONE, Scores
from fedtail.federate.asking import Asking
from fedtail.federate.protocol.limits import Kind, WireError
from fedtail.federate.protocol.transport import Phase
from fedtail.federate.protocol.wire import Parcel
from fedtail.federate.replies import read_counts


class OpenCounts:
    """What sites count, where they may tell it of themselves (``reveal`` is ``classes`` or ``totals``)."""

    def __init__(self, asking: Asking, validation_sizes: Sequence[int] | None, real: bool) -> None:
        """``validation_sizes``, ``real``: see ``RemoteEngine``."""
        self.asking, self.validation_sizes, self.real = asking, validation_sizes, real
        self._test_sizes: dict[int, int] = {}

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        """(S, 3, C) counts of the candidates, over clients."""
        job = self.asking.job
        revealed = 1 if job.reveal == "totals" else job.n_classes
        counts = {k: np.zeros((len(candidates), 3, job.n_classes), dtype=np.int64) for k in clients}
        for rows, parcel in self.asking.candidate_messages(candidates):
            # Candidates are compared on the same samples: who misses one message counts in none.
            asked = {k: Parcel(self.asking.about(k), parcel.tensors) for k in counts}
            shape = (len(rows), 3, revealed)
            read = partial(self._read_candidate_counts, shape=shape)
            replies = self.asking.ask(Phase.VALIDATE, asked, read, len(clients), {"counts": Kind(("I64",), shape)})
            counts = {k: v for k, v in counts.items() if k in replies}
            for k, found in replies.items():
                counts[k][rows, :, : found.shape[-1]] = found
        return self.fair_sum(counts)

    def _read_candidate_counts(self, client: int, parcel: Parcel, shape: tuple[int, ...]) -> np.ndarray:
        """Every candidate is counted on the same samples, as many as the handshake says."""
        counts = read_counts(client, parcel, "counts", shape)
        self._check_total(client, "validation", counts[:, 1:].sum(axis=-1))
        if (counts[:, 0] > counts[:, 1:].min(axis=1)).any():
            raise WireError("more samples right than there are", "out-of-range")
        return counts

    def _check_total(self, client: int, split: str, totals: np.ndarray) -> None:
        """The samples of a split are as many as agreed in the handshake or, for tests, as many as the first time."""
        if split == "validation" and self.validation_sizes is None:
            return
        first = int(totals.flat[0]) if totals.size else 0
        known = self.validation_sizes if split == "validation" else self._test_sizes
        assert known is not None
        agreed = int(known.setdefault(client, first) if isinstance(known, dict) else known[client])
        if (totals != agreed).any():
            raise WireError(f"counts of {first} samples of its {split} split, which has {agreed}", "changed")

    def fair_sum(self, counts: Mapping[int, np.ndarray]) -> np.ndarray:
        """The sum, to which nobody adds more than a fair share of the samples: their number is what a site says."""
        held = self.validation_sizes
        if held is not None and self.real:
            sizes = np.array([held[k] for k in counts], dtype=np.float64)
            kept = capped(sizes, fair_share(int((sizes > 0).sum())))
            scale = dict(zip(counts, kept / np.maximum(sizes, 1), strict=True))
            small = {k: np.floor(v * scale[k]).astype(np.int64) for k, v in counts.items() if scale[k] < 1 - 1e-9}
            counts = {**counts, **{k: v for k, v in small.items() if held[k]}}
        return np.asarray(np.sum(list(counts.values()), axis=0))

    def confusions(
        self, x: Tensor, splits: Sequence[str], clients: Sequence[int], wanted: int
    ) -> dict[str, dict[int, np.ndarray]]:
        """Split -> client -> its confusion matrix, or (1, 2) correct and all samples."""
        n = self.asking.job.n_classes
        shape = (2,) if self.asking.job.reveal == "totals" else (n, n)
        asked = {k: Parcel({**self.asking.about(k), "splits": list(splits)}, {"x": x}) for k in clients}

        def read(client: int, parcel: Parcel) -> list[np.ndarray]:
            found = [read_counts(client, parcel, split, shape) for split in splits]
            for split, counts in zip(splits, found, strict=True):
                self._check_total(client, split, counts[1:] if shape == (2,) else counts.sum(keepdims=True))
                if shape == (2,) and counts[0] > counts[1]:
                    raise WireError("more samples right than there are", "out-of-range")
            return found

        kinds = dict.fromkeys(splits, Kind(("I64",), shape))
        replies = self.asking.ask(Phase.CONFUSION, asked, read, wanted, kinds)
        matrix = (1, 2) if shape == (2,) else shape
        return {split: {k: one[i].reshape(matrix) for k, one in replies.items()} for i, split in enumerate(splits)}

    def scores(
        self, x: Tensor, split: str, rules: Decisions, clients: Sequence[int], wanted: int
    ) -> tuple[dict[int, Scores], list[int]]:
        """The counts of each client, and the clients."""
        shapes = score_shapes(self.asking.job.n_classes)
        asked = {
            k: Parcel({**self.asking.about(k), "split": split, "decision": rules.at(k).to_json()}, {"x": x})
            for k in clients
        }

        def read(client: int, parcel: Parcel) -> Scores:
            found = Scores(**{name: read_counts(client, parcel, name, shape) for name, shape in shapes.items()})
            self._check_total(client, split, np.array([found.confusion.sum(), *found.bins.sum(axis=(1, 2)), found.n]))
            most = max(found.sums.max(), found.tempered.max())
            if (found.cells[1] > found.cells[0]).any() or most > 128 * ONE * found.n:
                raise WireError("sums of scores that cannot be", "out-of-range")
            return found

        kinds = {name: Kind(("I64",), shape) for name, shape in shapes.items()}
        replies = self.asking.ask(Phase.SCORES, asked, read, wanted, kinds)
        return replies, list(replies)


def score_shapes(n_classes: int) -> dict[str, tuple[int, ...]]:
    """The parts of ``Scores``."""
    return {name: value.shape for name, value in vars(Scores.of(np.empty((0, n_classes)), np.empty(0))).items()}
