"""FedHOO over clusters of clients: the way to 20 or 100 clients and to partial participation.

The paper names clusters as the way to scale (appendix B) and leaves it there. All clients of a cluster share a
rate, so the search has C axes instead of K, and 2^C candidates. A client that is absent from a round is stood in
for by the others of its cluster; a cluster wholly absent keeps its interval (see FedHOO).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.random import generator, torch_seed
from fedtail.errors import FedtailError, check_range, one_of
from fedtail.rates.base import RATES, Present, Rewards, Setting
from fedtail.rates.fedhoo import MAX_AXES, FedHOO

SKETCH = 256
"""Length of the sketch kept of each client's update: cosines are right to about 1/sqrt(256)."""
BY = ("updates", "size", "labels")


@RATES.add("fedhoo_clusters")
@dataclass(eq=False)
class ClusteredFedHOO(FedHOO):
    """FedHOO with one axis per cluster of clients; all of FedHOO's options apply.

    ``by``: what clients are clustered by, all of it known to the server anyway.
    ``updates``: the direction of their updates in the cold rounds (clients with like data move alike); a client
    that was not there joins the nearest cluster after its first update.
    ``size``: their number of samples. ``labels``: given by the user, one per client, in ``labels`` or as
    a column of the data.
    """

    title = "FedHOO (clusters)"

    _: KW_ONLY
    reward: str = "drift"
    """Unlike in FedHOO: which clients validate changes from round to round, and so does the level of rewards."""
    clusters: int = 4
    least: int = 1
    """Fewest clients of a cluster; smaller ones join the nearest. Masked sums need 3."""
    by: str = "updates"
    labels: Sequence[int | str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.by not in BY:
            raise one_of("rates.by", self.by, BY)
        self._axes = np.arange(self.n_clients)
        self._settled = False
        """The clusters are final, but for clients not seen yet."""
        self._sketches = np.zeros((self.n_clients, SKETCH))
        self._seen = np.zeros(self.n_clients, dtype=bool)
        self._centroids = np.zeros((0, SKETCH))
        self.clusters = min(self.clusters, self.n_clients)
        if self.labels is not None:
            self.by = "labels"
            self._settle_by(self.labels)
        check_range("rates.clusters", self.clusters, 1, MAX_AXES)
        check_range("rates.least", self.least, 1)
        if self.by == "updates":
            check_range("rates.cold_rounds (whose updates the clusters come from)", self.cold_rounds, 1)
        self._axes %= self.clusters
        super().__post_init__()

    @property
    def axes(self) -> np.ndarray:
        return self._axes

    @property
    def n_axes(self) -> int:
        return self.clusters

    def begin(self, setting: Setting) -> None:
        """Cluster by what is known before the first round. Partial participation is fine here."""
        if self._settled or self._round:
            return
        if self.by == "labels":
            if not setting.labels:
                raise FedtailError(
                    "rates.by = 'labels' needs a label per client; set rates.labels = [...], one per client"
                )
            self._settle_by(setting.labels)
        else:
            # Until updates are known, size stands in: in the cold rounds all clients get the same probes anyway.
            points = np.log(np.maximum(setting.sizes, 1.0))[:, None]
            self._axes = merge_small(k_means(points, self.clusters, self.seed), points, self.least)
            if self.by == "size":
                self._settled = True
                self.clusters = int(self._axes.max()) + 1  # fewer where sizes coincide
        if self._settled:
            self._reset()

    @property
    def placed(self) -> np.ndarray:
        """(K,) bool, clients that have a cluster; once clusters come from updates, not those never seen."""
        return self._seen if self._settled and self.by == "updates" else np.ones(self.n_clients, dtype=bool)

    def ask(self) -> np.ndarray:
        """A client without a cluster runs both probes at one rate: its direction is zero, and the rewards compare
        what the clusters do. Its update then tells where it belongs."""
        probes = super().ask()
        return np.where(self.placed[:, None], probes, self.rates[:, None])

    @property
    def rates(self) -> np.ndarray:
        """A client without a cluster takes the mean rate of those that have one."""
        rates = super().rates
        return np.where(self.placed, rates, rates[self.placed].mean()) if not self.placed.all() else rates

    def weights(self, p: np.ndarray, present: np.ndarray) -> np.ndarray:
        """A cluster keeps its share of all samples, however many of its clients are there."""
        w = np.array(p[present], dtype=np.float64)
        labels = np.where(self.placed, self._axes, -1)
        for a in np.unique(labels[present]):
            w[labels[present] == a] *= p[labels == a].sum() / w[labels[present] == a].sum()
        return np.asarray(w / w.sum())

    def observe(self, clients: np.ndarray, deltas: Sequence[Tensor]) -> None:
        """Keep a sketch of each client's direction, until it has a cluster."""
        if self.by != "updates" or self.done:
            return
        for k, delta in zip(clients, deltas, strict=True):
            if not (self._settled and self._seen[k]):
                self._sketches[k] += sketch(delta[0], self.seed)

    def tell(self, rewards: Rewards = None, *, present: Present = None, **more: Any) -> int:
        here = np.ones(self.n_clients, dtype=bool) if present is None else np.asarray(present, dtype=bool)
        winner = super().tell(rewards, present=here & self.placed, **more)
        if self.by == "updates" and self._settled:
            self._place_new_clients()
        elif self.by == "updates" and self._round >= self.cold_rounds:
            self._cluster_updates()
        return winner

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "clusters": np.where(self.placed, self._axes, -1).tolist()}

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "axes": self._axes.tolist(),
            "settled": self._settled,
            "seen": self._seen.tolist(),
            "sketches": {str(k): self._sketches[k].tolist() for k in np.flatnonzero(self._moved)},
            "centroids": self._centroids.tolist(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.clusters = state["n_axes"]
        super().load_state(state)
        self._axes, self._settled = np.array(state["axes"]), state["settled"]
        self._seen = np.array(state["seen"], dtype=bool)
        self._sketches[:] = 0.0
        for k, values in state["sketches"].items():
            self._sketches[int(k)] = values
        self._centroids = np.array(state["centroids"]).reshape(-1, SKETCH)

    @property
    def _moved(self) -> np.ndarray:
        """(K,) bool, clients without a cluster of which there is an update."""
        return np.asarray(np.abs(self._sketches).sum(axis=1) > 0)

    def _settle_by(self, labels: Sequence[int | str]) -> None:
        if len(labels) != self.n_clients:
            raise FedtailError(
                f"rates.labels has {len(labels)} labels for {self.n_clients} clients; give one per client"
            )
        names = sorted({str(v) for v in labels})
        if len(names) > MAX_AXES:
            raise FedtailError(
                f"rates.labels has {len(names)} different labels, at most {MAX_AXES} are allowed; merge some"
            )
        self._axes = np.array([names.index(str(v)) for v in labels])
        sizes = np.bincount(self._axes)
        if sizes.min() < self.least:
            few = int(sizes.argmin())
            raise FedtailError(
                f"rates.labels: {names[few]!r} has {sizes[few]} clients, at least {self.least} are needed "
                "(rates.least); merge it with another"
            )
        self.clusters, self._settled = len(names), True

    def _cluster_updates(self) -> None:
        seen = self._moved
        if not seen.any():
            return
        directions = _unit(self._sketches[seen])
        labels = merge_small(k_means(directions, self.clusters, self.seed), directions, self.least)
        self._centroids = _unit(np.stack([directions[labels == a].mean(axis=0) for a in range(labels.max() + 1)]))
        before, searched = self._point[self._axes], self._round
        self._axes = np.zeros(self.n_clients, dtype=np.int64)
        self._axes[seen] = labels
        self._seen, self._settled = seen, True
        self._sketches[:] = 0.0
        self.clusters = int(labels.max()) + 1  # fewer where updates coincide
        self._reset()
        self._round = searched
        self._point = np.array([before[seen][labels == a].mean() for a in range(self.clusters)])

    def _place_new_clients(self) -> None:
        new = np.flatnonzero(self._moved & ~self._seen)
        if new.size:
            self._axes[new] = (_unit(self._sketches[new]) @ self._centroids.T).argmax(axis=1)
            self._seen[new] = True
            self._sketches[new] = 0.0


def sketch(delta: Tensor, seed: int) -> np.ndarray:
    """(256,) random projection of an update's direction: coordinates with random signs, summed modulo 256.

    Inner products survive on average; the same seed gives every client the same signs. delta: (n,).
    """
    flat = delta.detach().double().cpu()
    signs = torch.randint(0, 2, (flat.numel(),), generator=torch.Generator().manual_seed(torch_seed(seed, "sketch")))
    signed = torch.zeros(-(-flat.numel() // SKETCH) * SKETCH, dtype=torch.float64)
    signed[: flat.numel()] = flat * (2.0 * signs - 1.0)
    return np.asarray(_unit(signed.view(-1, SKETCH).sum(dim=0).numpy()[None])[0])


def k_means(points: np.ndarray, n_clusters: int, seed: int = 0, *, restarts: int = 50, steps: int = 50) -> np.ndarray:
    """(N,) cluster of each point, numbered by first appearance; fewer clusters where points coincide.

    Plain k-means++ with restarts, here so that clusters depend on nothing but the points and the seed.
    """
    best, best_cost = np.zeros(len(points), dtype=np.int64), np.inf
    for attempt in range(restarts):
        rng = generator(seed, "clusters", attempt)
        centres = points[[int(rng.integers(len(points)))]]
        while len(centres) < n_clusters:
            gap = ((points[:, None] - centres) ** 2).sum(-1).min(axis=1)
            if gap.sum() <= 1e-12:
                break
            centres = np.concatenate([centres, points[[int(rng.choice(len(points), p=gap / gap.sum()))]]])
        labels = np.full(len(points), -1)
        for _ in range(steps):
            distance = ((points[:, None] - centres) ** 2).sum(-1)
            moved = distance.argmin(axis=1)
            if np.array_equal(moved, labels):
                break
            labels = moved
            for a in np.unique(labels):
                centres[a] = points[labels == a].mean(axis=0)
        cost = float(((points - centres[labels]) ** 2).sum())
        if cost < best_cost - 1e-12:
            best, best_cost = labels, cost
    _, first, inverse = np.unique(best, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[inverse])


def merge_small(labels: np.ndarray, points: np.ndarray, least: int) -> np.ndarray:
    """(N,) labels without clusters of fewer than ``least`` points: the smallest joins the one with the nearest
    centre."""
    out = labels.copy()
    while True:
        names, sizes = np.unique(out, return_counts=True)
        if sizes.min() >= least or len(names) == 1:
            return np.asarray(np.searchsorted(names, out))
        small = names[sizes.argmin()]
        centres = {a: points[out == a].mean(axis=0) for a in names}
        gaps = {a: float(np.linalg.norm(centres[a] - centres[small])) for a in names if a != small}
        out[out == small] = min(gaps, key=lambda a: gaps[a])


def _unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30))
