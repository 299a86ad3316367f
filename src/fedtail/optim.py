"""``CGNM``: class-grouped normalized momentum as a torch optimizer, for anyone's training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedtail.core.grouping import group_classes
from fedtail.core.resampling import resampled_counts
from fedtail.errors import FedtailError, check_range

Losses = Sequence[Tensor | None] | Tensor
"""One loss per class group; None for a group that is absent."""


class CGNM(torch.optim.Optimizer):
    """Keeps one momentum per group of classes, normalizes each over *all* parameters jointly, and sums.

        m_h <- beta m_h + (1 - beta) g_h
        x   <- x - lr [ sum_h m_h / (||m_h|| + delta) + weight_decay x ]

    ``step`` takes one loss per group: the *sum* over the batch's samples of that group, divided by the size of the
    whole batch; pass ``None`` for a group that is absent from the batch (its momentum decays and is still applied).

    >>> model = torch.nn.Linear(4, 3)
    >>> opt = CGNM(model.parameters(), lr=0.1)
    >>> x, y = torch.randn(8, 4), torch.tensor([0, 0, 0, 0, 0, 1, 1, 2])
    >>> losses = grouped_losses(torch.nn.functional.cross_entropy(model(x), y, reduction="none"), y, [0, 1, 1])
    >>> loss = opt.step(losses)

    ``n_groups`` is H. ``lr``, ``beta``, ``delta`` and ``weight_decay`` may differ between parameter groups, while the
    norm of m_h is always taken over all of them.

    ``step`` computes its own gradients and neither reads nor writes ``.grad``. So clipping ``.grad`` does nothing (and
    is not needed: a group moves the parameters by less than ``lr`` anyway), ``zero_grad`` is not needed, a
    ``GradScaler`` has nothing to unscale (train in float32 or bfloat16, which need no loss scaling), and
    ``DistributedDataParallel`` has nothing to average: docs/optimizer.md shows what does.

    In ``param_groups`` beta is called ``momentum``, the name by which ``OneCycleLR`` and ``CyclicLR`` cycle it.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        n_groups: int = 2,
        beta: float = 0.5,
        delta: float = 0.1,
        weight_decay: float = 0.0,
    ) -> None:
        check_range("n_groups", n_groups, 1)
        self.n_groups = int(n_groups)
        self._waiting: dict[int, dict[Tensor, Tensor]] = {}
        super().__init__(params, {"lr": lr, "momentum": beta, "delta": delta, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own: ``{"params": ..., "lr": 0.01, "beta": 0.9}``."""
        group = _with_momentum(param_group)
        given = {**self.defaults, **group}
        check_range("beta", given["momentum"], 0.0, 1.0, open_high=True)
        for name in ("lr", "delta", "weight_decay"):
            check_range(name, float(given[name]), 0.0)
        super().add_param_group(group)

    def __getstate__(self) -> dict[str, Any]:
        """What ``deepcopy`` and ``pickle`` keep: torch knows of its own attributes only."""
        return {**super().__getstate__(), "n_groups": self.n_groups, "_waiting": self._waiting}

    def step(self, losses: Losses | Callable[[], Losses] | None = None) -> Tensor | None:  # type: ignore[override]
        """Update from H group losses, or a closure that returns them, and what was accumulated. Returns their sum."""
        with torch.enable_grad():
            given = losses() if callable(losses) else losses
        if given is None and not self._waiting:
            raise FedtailError("step() needs one loss per class group, unless accumulate(losses) was called before")
        total = None if given is None else self.accumulate(given)
        grads, self._waiting = self._waiting, {}
        self._apply(self._slots(), grads)
        return total

    def accumulate(self, losses: Losses) -> Tensor | None:
        """Add the gradients of H group losses to those that the next ``step`` applies. Returns the losses' sum."""
        given = self._checked(losses)
        params = [p for _, p in self._slots()]
        present = [h for h, loss in enumerate(given) if loss is not None and loss.requires_grad]
        values = [loss.detach() for loss in given if loss is not None]
        if params and values and not present:
            raise FedtailError("no loss has a gradient; compute the losses outside torch.no_grad()")
        for h in present:
            new = torch.autograd.grad(given[h], params, retain_graph=h != present[-1], allow_unused=True)  # type: ignore[arg-type]
            sums = self._waiting.setdefault(h, {})
            sums.update({p: sums[p] + g if p in sums else g for p, g in zip(params, new, strict=True) if g is not None})
        self._waiting.setdefault(-1, {})  # also where every group is absent
        return torch.stack(values).sum() if values else None

    def _checked(self, losses: Losses) -> list[Tensor | None]:
        if isinstance(losses, Tensor) and losses.ndim == 0:
            raise FedtailError(
                f"CGNM takes one loss per class group ({self.n_groups} here), not one for the whole batch: "
                "opt.step(grouped_losses(losses, y, groups)) with losses = cross_entropy(model(x), y, reduction='none')"
            )
        given = list(losses)
        if len(given) != self.n_groups:
            raise FedtailError(f"step() got {len(given)} losses for {self.n_groups} groups; None is an absent group")
        for h, loss in enumerate(given):
            if loss is not None and getattr(loss, "shape", None) not in ((), (1,)):
                raise FedtailError(f"the loss of group {h} is not a tensor of one number; grouped_losses makes such")
            if loss is not None and not bool(torch.isfinite(loss)):
                said = f"the loss of group {h} is {float(loss.detach()):g}, so no step was taken"
                raise FedtailError(f"{said}; lower lr, or look for inputs that are not finite")
        return given

    def _slots(self) -> list[tuple[dict[str, Any], Tensor]]:
        """Each trained parameter with the group whose settings it has."""
        return [(group, p) for group in self.param_groups for p in group["params"] if p.requires_grad]

    @torch.no_grad()
    def _apply(self, slots: list[tuple[dict[str, Any], Tensor]], grads: dict[int, dict[Tensor, Tensor]]) -> None:
        exact = torch.float64 if any(p.dtype == torch.float64 for _, p in slots) else torch.float32
        squares = [torch.zeros((), dtype=exact, device=p.device) for _, p in slots[:1] for _ in range(self.n_groups)]
        for group, p in slots:
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros((self.n_groups, *p.shape), dtype=p.dtype, device=p.device)
            for h in range(self.n_groups):
                m = state["momentum"][h]
                m.mul_(group["momentum"])
                g = grads.get(h, {}).get(p)
                if g is not None:
                    m.add_(g, alpha=1.0 - group["momentum"])
                squares[h] = squares[h] + m.to(exact).pow(2).sum().to(squares[h].device)
        norms = [s.sqrt() for s in squares]
        for group, p in slots:
            step = group["weight_decay"] * p if group["weight_decay"] else torch.zeros_like(p)
            for m, norm in zip(self.state[p]["momentum"], norms, strict=True):
                size = norm.to(p) + group["delta"]
                step = step + m / torch.where(size > 0, size, torch.ones_like(size))
            p.sub_(group["lr"] * step)

    def reset_momentum(self) -> None:
        """Forget all momentum, as a client does at the start of every round."""
        for state in self.state.values():
            state["momentum"].zero_()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "n_groups": self.n_groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        given = dict(state_dict)
        n_groups = given.pop("n_groups", self.n_groups)
        if n_groups != self.n_groups:
            raise FedtailError(f"the saved state has {n_groups} groups, this optimizer {self.n_groups}")
        super().load_state_dict({**given, "param_groups": [_with_momentum(group) for group in given["param_groups"]]})


def _with_momentum(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group that may call its momentum ``beta``."""
    return {"momentum" if key == "beta" else key: value for key, value in group.items()}


def class_groups(counts: Iterable[int], n_groups: int = 2, rate: float = 0.0) -> Tensor:
    """(C,) group of each class from training counts, after resampling at ``rate``; 0 = majority."""
    return torch.as_tensor(group_classes(resampled_counts(list(counts), rate), n_groups))


def grouped_losses(
    losses: Tensor, y: Tensor, groups: Sequence[int] | Tensor, n_groups: int | None = None
) -> list[Tensor | None]:
    """Per-sample losses (B,) -> what ``CGNM.step`` takes: per group, sum / B, or None if absent."""
    of_class = torch.as_tensor(groups, device=y.device)
    total = int(of_class.max()) + 1 if n_groups is None else n_groups
    if not bool((of_class < total).all()):
        raise FedtailError(f"groups go up to {int(of_class.max())}, which n_groups = {total} leaves out")
    if losses.shape != y.shape:
        raise FedtailError(f"{tuple(losses.shape)} losses for {tuple(y.shape)} labels; compute with reduction='none'")
    member = of_class[y.long()]
    return [losses[inside].sum() / len(losses) if bool((inside := member == h).any()) else None for h in range(total)]
