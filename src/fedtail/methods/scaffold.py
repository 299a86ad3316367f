"""SCAFFOLD (Karimireddy et al., 2020): control variates remove client drift.

    x_k <- x_k - lr (g - c_k + c)
    c_k <- c_k - c + (x - x_k) / (steps lr)       (option II; kept by the client)
    c   <- c + sum_k p_k (change of c_k)

so that c = sum_k p_k c_k at all times, also under partial participation; with clients of equal size p_k = 1/K is the
paper's rule. At the start all controls are 0 and the first round is FedAvg's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtail.core.records import Tensors, Update
from fedtail.methods.base import LocalRun, LocalStep, Method, Server
from fedtail.methods.registry import METHODS


@METHODS.add("scaffold")
@dataclass(frozen=True)
class Scaffold(Method):
    """The strong federated baseline for heterogeneous clients; sends twice what FedAvg sends."""

    title = "SCAFFOLD"
    paper = "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020"
    wire = "one more model-sized vector each way (control variates)"
    client_state = "control variate c_k, model-sized"
    plain_steps = "control variates are computed from plain gradient steps"

    # -- client

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        own, common = self._controls(run, client_state)
        return {"correction": common - own}, {}

    def finish(
        self, run: LocalRun, delta: Tensor, const: Tensors, state: Tensors, client_state: Tensors
    ) -> tuple[Tensors, Tensors]:
        own, common = self._controls(run, client_state)
        if not run.steps or not run.lr:  # a model that did not move says nothing about its gradients
            return client_state, {"control_change": torch.zeros_like(own)}
        new = own - common - delta / (run.steps * run.lr)
        return {"control": new}, {"control_change": new - own}

    def direction(self, step: LocalStep) -> tuple[Tensor, Tensors]:
        return step.grads.sum(dim=-2) + step.const["correction"], step.state

    def _controls(self, run: LocalRun, client_state: Tensors) -> tuple[Tensor, Tensor]:
        common = run.message["control"].to(run.device)
        return client_state.get("control", torch.zeros_like(common)).to(run.device), common

    # -- server

    def init_server(self, n_clients: int, n_classes: int, n_params: int) -> Tensors:
        return {"control": torch.zeros(n_params)}

    def broadcast(self, state: Tensors) -> Tensors:
        return {"control": state["control"]}

    def after_round(self, server: Server, updates: Sequence[Update], choice: Sequence[int], state: Tensors) -> Tensors:
        control = state["control"].double()
        for u, probe in zip(updates, choice, strict=True):
            control = control + float(server.weights[u.client]) * u.extras["control_change"][probe].to(control)
        return {"control": control.float()}

    def stats(self, state: Tensors) -> dict[str, Any]:
        return {"control_norm": float(torch.linalg.vector_norm(state["control"]))}
