"""What clients keep between rounds, where the simulator holds it for them."""

from __future__ import annotations

import torch

from fedtail.core.records import Tensors


class ClientStates:
    """The part of an engine that keeps each client's state: a round offers one per probe, ``commit`` takes one."""

    device: torch.device
    takes_rivals = True

    def __init__(self) -> None:
        self.client_states: dict[int, Tensors] = {}
        self._pending: dict[int, list[Tensors]] = {}

    def commit(self, choice: dict[int, int]) -> None:
        for k, probe in choice.items():
            if k in self._pending and self._pending[k][probe]:
                self.client_states[k] = self._pending[k][probe]
        self._pending.clear()

    def state(self) -> dict[int, Tensors]:
        return self.client_states

    def load_state(self, state: dict[int, Tensors]) -> None:
        self.client_states = {k: {n: t.to(self.device) for n, t in v.items()} for k, v in state.items()}
