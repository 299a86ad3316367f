"""A model as one flat vector: parameters first, then float buffers, with the layers as views into it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedtail.errors import FedtailError
from fedtail.models.norm import has_batchnorm

__all__ = ["AverageDraws", "FlatModel", "copy_module", "couples_samples", "has_batchnorm"]

TRIED, COUPLED = 8, 1e-4
"""Samples on which it is tried whether they influence each other, and the relative difference that shows it."""
JITTER = 0.1
"""What is added to every weight where something is tried, as a share of its layer's standard deviation (or of 1, where
all are alike): a layer that begins at 0 hides what lies before it."""


class AverageDraws(TorchDispatchMode):
    """Inside, every draw is its mean, so that passes which draw in different order can be compared."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return out
        name = func.overloadpacket.__name__
        if name == "bernoulli_":
            chance = args[1] if len(args) > 1 else 0.5
            return out.copy_(chance) if isinstance(chance, Tensor) else out.fill_(chance)
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(out[1])
        if isinstance(out, Tensor) and name.startswith(("rand", "uniform", "normal")) and out.is_floating_point():
            return out.fill_(0.5)
        return out


def jitter(weights: Iterable[Tensor], draws: torch.Generator) -> None:
    """Move weights at random, in place, so that none is 0."""
    for part in weights:
        spread = float(part.std()) if part.numel() > 1 else 0.0
        part.add_(torch.randn(part.shape, generator=draws).to(part), alpha=JITTER * (spread or 1.0))


def couples_samples(module: nn.Module, sample_shape: Sequence[int]) -> bool:
    """Whether samples of a training batch influence each other, by statistics of the batch or in any other way, or a
    batch changes buffers, which half of it would change otherwise: tried on a few inputs, with weights of which none is
    0."""
    trial, draws = copy_module(module).train(), torch.Generator().manual_seed(0)
    before = [b.clone() for b in trial.buffers()]
    x = torch.rand(TRIED, *sample_shape, generator=draws).to(next(trial.parameters()).device)
    half = TRIED // 2
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), torch.no_grad():
        jitter(trial.parameters(), draws)
        try:
            whole, part = trial(x)[:half], trial(x[:half])
            if not torch.equal(whole, trial(x)[:half]):  # it draws; a mode of torch's loads its compiler, for seconds
                with AverageDraws():
                    whole, part = trial(x)[:half], trial(x[:half])
            if not all(map(torch.equal, before, trial.buffers())):
                return True
        except Exception:  # the user's module: one pass for all samples is right whatever it does
            return True
    return not float((whole - part).norm()) <= COUPLED * float(whole.norm())


def copy_module(module: nn.Module) -> nn.Module:
    """Return a deep copy, also of a module that holds what it has computed (torch's older weight and spectral norms do,
    which refuse to be copied by then)."""
    for layer in module.modules():
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                setattr(layer, name, value.detach())  # the next forward pass computes it anew
    return copy.deepcopy(module)


class FlatModel:
    """A module whose parameters and float buffers live in one vector.

    ``vector[:n_params]`` are the trainable parameters, in ``module.parameters()`` order and tied ones once; the rest
    are frozen parameters and float buffers (BatchNorm statistics), which are averaged but never stepped. Integer
    buffers (BatchNorm's ``num_batches_tracked``) stay outside: ``load`` sets them back to where they began, so
    that no client sees how many batches others ran before it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.params = [p for p in module.parameters() if p.requires_grad]
        seen = {id(p) for p in self.params}
        fixed = [p for p in module.parameters() if id(p) not in seen]
        if not self.params:
            raise FedtailError("the model has no trainable parameters")
        buffers = [b for b in module.buffers() if b.is_floating_point()]
        self.counters = [(b, b.clone()) for b in module.buffers() if not b.is_floating_point()]
        parts = [*self.params, *fixed, *buffers]
        self.shapes = [tuple(p.shape) for p in self.params]
        self.n_params = sum(p.numel() for p in self.params)
        self.vector = torch.cat([p.detach().reshape(-1).float() for p in parts])
        views = self.vector.split([part.numel() for part in parts])
        self._places = [(part, view.view(part.shape)) for part, view in zip(parts, views, strict=True)]
        for part, view in self._places:
            part.data = view
        layers = list(module.modules())
        self._buffers = [(m._buffers, name, b) for m in layers for name, b in m._buffers.items() if b is not None]
        self._couples: bool | None = None

    @property
    def size(self) -> int:
        return self.vector.numel()

    def couples(self, sample_shape: Sequence[int]) -> bool:
        """``couples_samples`` of the module, tried once."""
        if self._couples is None:
            self._couples = couples_samples(self.module, sample_shape)
        return self._couples

    def load(self, x: Tensor) -> None:
        """Set the whole model from a vector."""
        self.settle()
        with torch.no_grad():
            self.vector.copy_(x)
            for counter, start in self.counters:
                counter.copy_(start)

    @torch.no_grad()
    def settle(self) -> None:
        """Take over what a forward pass has put in the place of a weight or a buffer, as ``self.weight.data = ...`` and
        ``self.mean = ...`` do: it would stand outside of the vector, out of reach of steps and of ``load``."""
        for part, view in self._places:
            if part.data_ptr() != view.data_ptr():
                view.copy_(part)
                part.data = view
        for owned, name, buffer in self._buffers:
            if (now := owned[name]) is not None and now is not buffer:
                buffer.copy_(now)
                owned[name] = buffer

    def gradient(self, loss: Tensor, *, retain_graph: bool = False) -> Tensor:
        """(d,) gradient with respect to the parameters, flat; unused parameters give zeros."""
        grads = torch.autograd.grad(loss, self.params, retain_graph=retain_graph, allow_unused=True)
        return torch.cat(
            [
                torch.zeros_like(p).reshape(-1) if g is None else g.reshape(-1)
                for g, p in zip(grads, self.params, strict=True)
            ]
        )

    def clone(self) -> FlatModel:
        """An independent copy, for another worker."""
        module = copy_module(self.module)
        for p in [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]:
            p.data = p.data.clone()
        return FlatModel(module)

    def output_linear(self) -> nn.Linear:
        """The last trainable linear layer."""
        layers = [m for m in self.module.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
        if not layers:
            raise FedtailError("the model has no trainable linear output layer, which this method needs")
        return layers[-1]

    def output_layer(self) -> tuple[int, tuple[int, int]]:
        """Offset in the vector and (rows, columns) of the last linear layer's weight."""
        weight = self.output_linear().weight
        return self.offset(weight), (int(weight.shape[0]), int(weight.shape[1]))

    def offset(self, param: Tensor) -> int:
        """Where a trainable parameter begins in the vector."""
        offset = 0
        for p in self.params:
            if p is param:
                return offset
            offset += p.numel()
        raise FedtailError("the output layer is not trainable, which this method needs")

    def classifier(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(C, d) weight and (C,) bias of the output layer inside the model ``x``, as views; the model must answer with
        what that layer says and have a bias."""
        layer = self.output_linear()
        if type(layer) is not nn.Linear or layer.bias is None:
            raise FedtailError(
                "the model's output layer is not a plain linear layer with a bias, which this method needs"
            )
        (rows, columns), at, bias = layer.weight.shape, self.offset(layer.weight), self.offset(layer.bias)
        return x[at : at + rows * columns].view(rows, columns), x[bias : bias + rows]

    @torch.no_grad()
    def features(self, x: Tensor, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """(n, d) inputs of the output layer in the model ``x``, (n, C) logits and (n,) labels."""
        seen: list[Tensor] = []
        self.load(x)
        self.module.eval()
        hook = self.output_linear().register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(1)))
        try:
            logits, labels = zip(*[(self.module(inputs), y) for inputs, y in batches], strict=True)
        finally:
            hook.remove()
        return torch.cat(seen), torch.cat(logits), torch.cat(labels)
