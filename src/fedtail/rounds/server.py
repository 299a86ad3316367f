"""Server optimizers (FedOpt, Reddi et al., 2021): any method can switch one on.

The round's aggregate is turned into a pseudo-gradient g = x - aggregate, on which the server steps:

    momentum (FedAvgM)   m <- beta1 m + g;                    x <- x - lr m
    adagrad              v <- v + g^2                      }
    adam                 v <- beta2 v + (1 - beta2) g^2    }  m <- beta1 m + (1 - beta1) g
    yogi                 v <- v - (1 - beta2) g^2 sign(v - g^2) }  x <- x - lr m / (sqrt(v) + tau)

with m = 0 and v = tau^2 at the start, and no bias correction, as in the paper's algorithm 2. Float buffers
(BatchNorm statistics) are not optimized: they take the aggregate's values.

``auto`` is Adam for many small sites. Each takes a dozen steps in a round, and the mean over fifty of them moves the
model no farther than one does; a step that does not depend on the length of the mean gets on (docs/evidence.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.errors import FedtailError
from fedtail.rounds.plan import median
from fedtail.settings import ServerSettings

BETA1, BETA2, TAU = 0.9, 0.99, 1e-3
"""Those of the authors' experiments."""
MANY = 20
"""Sites from which on ``auto`` is Adam, if they are small ..."""
SMALL = 512
"""... that is, if the median one has fewer training samples than this."""
FOUND = "server_optimizer"
"""What ``auto`` chose, among the settings that a run has found."""


def follow_sites(sizes: Sequence[int] | np.ndarray) -> str:
    """Return what ``server.optimizer = "auto"`` means for sites with so many training samples; 0 of one that is not
    there."""
    return "adam" if np.count_nonzero(sizes) >= MANY and median(sizes) < SMALL else "none"


def in_force(server: ServerSettings, settled: Mapping[str, Any]) -> ServerSettings:
    """The same with an optimizer in place of ``auto``."""
    if server.optimizer != "auto":
        return server
    if FOUND not in settled:
        raise FedtailError("server.optimizer = 'auto' depends on the sites, which are not known here; name one")
    return server.model_copy(update={"optimizer": settled[FOUND]})


def server_notes(server: ServerSettings, chosen: str, sizes: Sequence[int] | np.ndarray) -> tuple[str, ...]:
    """Return a note that ``auto`` chose an optimizer, for the run folder and the screen; none where it chose
    nothing."""
    if server.optimizer != "auto" or chosen == "none":
        return ()
    about = f"{np.count_nonzero(sizes)} sites, of which the median one has {median(sizes):,.0f} training samples"
    return (f"the server applies updates with Adam (server.optimizer=auto): {about}",)


def server_step(
    server: ServerSettings, x: Tensor, aggregate: Tensor, state: Tensors, n_params: int | None = None
) -> tuple[Tensor, Tensors]:
    """The next global model and the optimizer's moments. x, aggregate: (n,), buffers from ``n_params`` on."""
    if server.optimizer == "none":
        return aggregate, state
    d = x.numel() if n_params is None else n_params
    gradient = x[:d] - aggregate[:d]
    m = state.get("m", torch.zeros_like(gradient))
    if server.optimizer == "momentum":
        m = BETA1 * m + gradient
        move, state = m, {"m": m}
    else:
        m = BETA1 * m + (1 - BETA1) * gradient
        v = _second_moment(server, state.get("v", torch.full_like(gradient, TAU**2)), gradient**2)
        move, state = m / (v.sqrt() + TAU), {"m": m, "v": v}
    return torch.cat([x[:d] - server.step * move, aggregate[d:]]), state


def _second_moment(server: ServerSettings, v: Tensor, square: Tensor) -> Tensor:
    if server.optimizer == "adagrad":
        return v + square
    if server.optimizer == "adam":
        return BETA2 * v + (1 - BETA2) * square
    return v - (1 - BETA2) * square * torch.sign(v - square)
