"""One pass over a sorted batch gives the same group gradients as one pass per group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtail.models import build_model
from fedtail.models.registry import with_classifier
from fedtail.simulate.graph.fused import Unsupported, fused_network
from fedtail.simulate.graph.recorder import SideStreams


class Tricky(nn.Module):
    """Biases, a norm with two users, an addition of different shapes, methods, a norm without ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.n1, self.n2, self.n3 = (nn.GroupNorm(2, 8) for _ in range(3))
        self.b = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.c = nn.Conv2d(8, 8, 1, bias=False)
        self.act = nn.ReLU()
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(self.a(x))
        y = self.act(self.n2(self.b(x)) + x)
        z = F.relu(self.n3(self.c(y)) + y.mean(dim=(2, 3), keepdim=True))
        return self.out(torch.flatten(F.adaptive_avg_pool2d(z, 1), 1).relu())


class Sequence(nn.Module):
    """Convolutions along rows of an image, and linear layers on every step and on the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv1d(24, 6, 3, padding=1, stride=2), nn.ReLU(), nn.Conv1d(6, 4, 1, bias=False))
        self.every, self.output = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.blocks(x.flatten(1, 2)).transpose(1, 2)
        return self.output(self.every(steps).relu()[:, -1] + steps.mean(1))


def models() -> dict[str, nn.Module]:
    return {
        "resnet18": build_model("resnet18", (3, 8, 8), 5, width=8, norm_groups=4),
        "small_cnn": build_model("small_cnn", (3, 8, 8), 5),
        "tricky": Tricky(),
        "sequence": Sequence(),
        "etf": with_classifier(build_model("resnet8", (3, 8, 8), 5, width=8, norm_groups=4), "etf"),
        "sparse etf": with_classifier(build_model("resnet8", (3, 8, 8), 5, width=8, norm_groups=4), "sparse_etf"),
    }


@pytest.mark.parametrize("name", ["resnet18", "small_cnn", "tricky", "sequence", "etf", "sparse etf"])
@pytest.mark.parametrize("sizes", [(7,), (4, 3), (7, 0)])
@pytest.mark.parametrize("further", [False, True])
def test_group_gradients_equal_separate_passes(name: str, sizes: tuple[int, ...], further: bool) -> None:
    torch.manual_seed(0)
    module = models()[name].double()
    side = SideStreams()
    side.kernels = further
    run = fused_network(module, side)
    x = torch.randn(7, 3, 8, 8, dtype=torch.float64)
    weights = [{n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()} for _ in sizes]
    out = run(weights, x, sizes)
    torch.testing.assert_close(out, module(x).detach(), rtol=1e-4, atol=1e-5)
    target = torch.randn_like(out)
    loss = (out * target).sum()
    begin = 0
    for size, group in zip(sizes, weights, strict=True):
        got = torch.autograd.grad(loss, list(group.values()), retain_graph=True)
        here = slice(begin, begin + size)
        begin += size
        expected = torch.autograd.grad((module(x[here]) * target[here]).sum(), list(module.parameters()))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max() + 1))


def test_answers_of_two_heads_are_those_of_the_one_that_answers() -> None:
    torch.manual_seed(0)
    module = models()["sparse etf"].double().eval()
    x = torch.randn(7, 3, 8, 8, dtype=torch.float64)
    weights = [{n: p.detach() for n, p in module.named_parameters()} for _ in range(2)]
    out = fused_network(module)(weights, x, (4, 3))
    assert out.shape == (7, 5)
    torch.testing.assert_close(out, module(x).detach(), rtol=1e-4, atol=1e-5)


def test_networks_that_cannot_be_taken_apart_are_refused() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](self[0](x))

    with pytest.raises(Unsupported, match="used twice"):
        fused_network(Twice(nn.Linear(4, 4)))
    frozen = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    frozen[0].weight.requires_grad_(False)
    for module in (
        nn.Sequential(nn.LSTM(3, 2, batch_first=True)),
        nn.Sequential(nn.BatchNorm2d(3)),
        frozen,
    ):
        with pytest.raises(Unsupported):
            fused_network(module)
