"""Server optimizers (FedOpt, Reddi et al., 2021): any method can switch one on.

The round's aggregate is turned into a pseudo-gradient g = x - aggregate, on which the server steps:

    momentum (FedAvgM)   m <- beta1 m + g;                    x <- x - lr m
    adagrad              v <- v + g^2                      }
    adam                 v <- beta2 v + (1 - beta2) g^2    }  m <- beta1 m + (1 - beta1) g
    yogi                 v <- v - (1 - beta2) g^2 sign(v - g^2) }  x <- x - lr m / (sqrt(v) + tau)

with m = 0 and v = tau^2 at the start, and no bias correction, as in the paper's algorithm 2. Float buffers
(BatchNorm statistics) are not optimized: they take the aggregate's values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.settings import Server


def server_step(
    server: Server, x: Tensor, aggregate: Tensor, state: Tensors, n_params: int | None = None
) -> tuple[Tensor, Tensors]:
    """The next global model and the optimizer's moments. x, aggregate: (n,), buffers from ``n_params`` on."""
    if server.optimizer == "none":
        return aggregate, state
    d = x.numel() if n_params is None else n_params
    gradient = x[:d] - aggregate[:d]
    m = state.get("m", torch.zeros_like(gradient))
    if server.optimizer == "momentum":
        m = server.beta1 * m + gradient
        move, state = m, {"m": m}
    else:
        m = server.beta1 * m + (1 - server.beta1) * gradient
        v = _second_moment(server, state.get("v", torch.full_like(gradient, server.tau**2)), gradient**2)
        move, state = m / (v.sqrt() + server.tau), {"m": m, "v": v}
    return torch.cat([x[:d] - server.step * move, aggregate[d:]]), state


def _second_moment(server: Server, v: Tensor, square: Tensor) -> Tensor:
    if server.optimizer == "adagrad":
        return v + square
    if server.optimizer == "adam":
        return server.beta2 * v + (1 - server.beta2) * square
    return v - (1 - server.beta2) * square * torch.sign(v - square)
