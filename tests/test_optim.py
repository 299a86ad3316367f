import copy
import io
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedtail.core.momentum import cgnm_direction
from fedtail.errors import FedtailError
from fedtail.optim import CGNM, class_groups, grouped_losses


def problem(seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(40, 6, generator=g)
    return model, x, torch.randint(0, 4, (40,), generator=g)


GROUPS = torch.tensor([0, 0, 1, 1])


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list:
    return grouped_losses(F.cross_entropy(model(x), y, reduction="none"), y, GROUPS, 2)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_golden_steps() -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = CGNM([p], lr=1.0)
    opt.step([(p * torch.tensor([3.0, 4.0])).sum(), (p * torch.tensor([0.0, 0.1])).sum()])
    torch.testing.assert_close(-p.detach(), torch.tensor([0.576923, 1.102564], dtype=torch.float64), atol=1e-6, rtol=0)
    before = p.detach().clone()
    opt.step([(p * torch.tensor([3.0, 4.0])).sum(), None])
    step = before - p.detach()
    torch.testing.assert_close(step, torch.tensor([0.584416, 0.979221], dtype=torch.float64), atol=1e-6, rtol=0)


def test_optimizer_equals_the_flat_vector_step() -> None:
    model, x, y = problem()
    opt = CGNM(model.parameters(), lr=0.05, beta=0.7, weight_decay=1e-2)
    vector, momentum = flat(model), torch.zeros(2, flat(model).numel())
    for i in range(5):
        batch = slice(8 * i, 8 * i + 8)
        losses = losses_of(model, x[batch], y[batch])
        grads = torch.zeros_like(momentum)
        for h, loss in enumerate(losses):
            if loss is not None:
                g = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                grads[h] = torch.cat([v.reshape(-1) for v in g])
        direction, momentum = cgnm_direction(momentum, grads, 0.7, 0.1)
        vector = vector - 0.05 * (direction + 1e-2 * vector)
        opt.step(losses)
        torch.testing.assert_close(flat(model), vector, atol=1e-6, rtol=1e-5)


def test_norm_is_taken_over_all_parameter_groups_jointly() -> None:
    model, x, y = problem()
    twin, _, _ = problem()
    one = CGNM(model.parameters(), lr=0.1)
    two = CGNM([{"params": twin[0].parameters()}, {"params": [*twin[1].parameters(), *twin[3].parameters()]}], lr=0.1)
    for _ in range(3):
        one.step(losses_of(model, x, y))
        two.step(losses_of(twin, x, y))
    torch.testing.assert_close(flat(model), flat(twin))


def test_parameter_groups_have_their_own_learning_rates() -> None:
    model, x, y = problem()
    opt = CGNM([{"params": model[0].parameters(), "lr": 0.0}, {"params": model[3].parameters()}], lr=0.1)
    first, last = model[0].weight.detach().clone(), model[3].weight.detach().clone()
    opt.step(losses_of(model, x, y))
    assert torch.equal(model[0].weight, first) and not torch.equal(model[3].weight, last)


def test_learning_rate_schedulers_drive_it() -> None:
    model, x, y = problem()
    opt = CGNM(model.parameters(), lr=0.4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)
    for _ in range(10):
        opt.step(losses_of(model, x, y))
        schedule.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_state_dict_round_trip_continues_identically() -> None:
    model, x, y = problem()
    opt = CGNM(model.parameters(), lr=0.1)
    for _ in range(3):
        opt.step(losses_of(model, x, y))
    buffer = io.BytesIO()
    torch.save({"m": model.state_dict(), "o": opt.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert next(iter(saved["o"]["state"].values()))["momentum"].shape[0] == 2
    twin, _, _ = problem(1)
    twin.load_state_dict(saved["m"])
    other = CGNM(twin.parameters(), lr=0.3)
    other.load_state_dict(saved["o"])
    opt.step(losses_of(model, x, y))
    other.step(losses_of(twin, x, y))
    assert torch.equal(flat(model), flat(twin))
    with pytest.raises(FedtailError, match="2 groups"):
        CGNM(twin.parameters(), lr=0.1, n_groups=3).load_state_dict(saved["o"])


def test_one_forward_pass_serves_all_groups_with_batchnorm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    _, x, y = problem()
    opt = CGNM(model.parameters(), lr=0.1)
    before = F.cross_entropy(model(x), y).item()
    for _ in range(30):
        opt.step(losses_of(model, x, y))
    assert F.cross_entropy(model(x), y).item() < before


def test_closures_unused_parameters_and_wrong_counts() -> None:
    model, x, y = problem()
    unused = nn.Parameter(torch.ones(3))
    opt = CGNM([*model.parameters(), unused], lr=0.1)
    total = opt.step(lambda: losses_of(model, x, y))
    assert total is not None and torch.equal(unused, torch.ones(3))
    assert opt.step([None, None]) is None
    with pytest.raises(FedtailError, match="got 1 losses for 2 groups"):
        opt.step([torch.zeros(())])


@pytest.mark.parametrize(
    ("options", "name"),
    [({"lr": -1.0}, "lr"), ({"beta": 1.0}, "beta"), ({"delta": -0.1}, "delta"), ({"n_groups": 0}, "n_groups")],
)
def test_bad_settings_are_named(options: dict, name: str) -> None:
    with pytest.raises(FedtailError, match=name):
        CGNM([nn.Parameter(torch.zeros(1))], **{"lr": 0.1, **options})


def test_class_groups_follow_the_rule_after_resampling() -> None:
    assert class_groups([500, 400, 30, 20]).tolist() == [0, 0, 1, 1]
    assert class_groups([500, 400, 30, 20], rate=1.0).tolist() == [0, 0, 1, 1]


def test_float64_parameters_are_normalized_in_float64() -> None:
    x = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    g = torch.tensor([1.0, 1e-9, 0.0], dtype=torch.float64)
    CGNM([x], lr=1.0, n_groups=1, beta=0.0, delta=0.0).step([(x * g).sum()])
    torch.testing.assert_close(x.detach(), -g / g.norm(), rtol=1e-15, atol=0)


@pytest.mark.parametrize("schedule", [
    lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=8),
    lambda opt: torch.optim.lr_scheduler.CyclicLR(opt, base_lr=0.01, max_lr=0.1, step_size_up=3),
])  # fmt: skip
def test_schedules_that_cycle_lr_and_momentum_cycle_ours(schedule: object) -> None:
    model, x, y = problem()
    opt = CGNM([{"params": model[0].parameters(), "beta": 0.3}, {"params": model[3].parameters()}], lr=0.05)
    assert [group["momentum"] for group in opt.param_groups] == [0.3, 0.5]
    schedule, seen = schedule(opt), set()  # type: ignore[operator]
    for _ in range(6):
        opt.step(losses_of(model, x, y))
        schedule.step()
        seen.add((opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]))
    assert len(seen) > 4 and all(0.8 <= momentum <= 0.95 for _, momentum in seen)
    cycled, plain = flat(model), CGNM(model.parameters(), lr=0.0)
    plain.step(losses_of(model, x, y))
    assert torch.equal(cycled, flat(model))


def test_a_batch_in_parts_makes_the_step_of_the_whole_batch() -> None:
    (one, x, y), (two, _, _) = problem(), problem()
    whole, parts = CGNM(one.parameters(), lr=0.1), CGNM(two.parameters(), lr=0.1)
    for _ in range(3):
        expected = whole.step(losses_of(one, x, y))
        told = [parts.accumulate([None if v is None else v / 4 for v in losses_of(two, x[i : i + 10], y[i : i + 10])])
                for i in range(0, 40, 10)]  # fmt: skip
        assert parts.step() is None
        torch.testing.assert_close(sum(told), expected)
        torch.testing.assert_close(flat(one), flat(two), atol=1e-6, rtol=1e-5)
    with pytest.raises(FedtailError, match="accumulate"):
        parts.step()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused_and_changes_nothing(bad: float) -> None:
    model, x, y = problem()
    opt, before = CGNM(model.parameters(), lr=0.1), flat(model).clone()
    losses = losses_of(model, x, y)
    with pytest.raises(FedtailError, match=r"the loss of group 1 is (nan|inf), so no step was taken"):
        opt.step([losses[0], losses[1] * bad])
    assert torch.equal(flat(model), before) and not opt.state
    opt.step(losses_of(model, x, y))
    assert torch.isfinite(flat(model)).all() and not torch.equal(flat(model), before)


def test_one_loss_for_the_whole_batch_is_explained() -> None:
    model, x, y = problem()
    with pytest.raises(FedtailError, match=r"one loss per class group \(2 here\).*opt.step\(grouped_losses"):
        CGNM(model.parameters(), lr=0.1).step(F.cross_entropy(model(x), y))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_goes_on_as_the_original(copied: object) -> None:
    model, x, y = problem()
    opt = CGNM(model.parameters(), lr=0.1)
    opt.step(losses_of(model, x, y))
    opt.accumulate(losses_of(model, x[:9], y[:9]))
    twin, other = copied((model, opt))  # type: ignore[operator]
    for each, optimizer in ((model, opt), (twin, other)):
        optimizer.step(losses_of(each, x[9:], y[9:]))
    assert torch.equal(flat(model), flat(twin))


def test_settings_of_a_parameter_group_are_checked() -> None:
    with pytest.raises(FedtailError, match=r"lr = -1.0 must be at least 0"):
        CGNM([{"params": [nn.Parameter(torch.zeros(1))], "lr": -1}], lr=0.1)
    opt = CGNM([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(FedtailError, match=r"beta = 2 is outside \[0, 1\)"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "beta": 2})
    assert len(opt.param_groups) == 1


def test_parameters_frozen_after_accumulating_do_not_shift_the_gradients_of_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 4, bias=False))
    _, x, y = problem()
    opt, before = (
        CGNM(model.parameters(), lr=1.0, beta=0.0, n_groups=1),
        [p.detach().clone() for p in model.parameters()],
    )
    loss = F.cross_entropy(model(x), y)
    expected = torch.autograd.grad(loss, [model[1].weight], retain_graph=True)[0]
    opt.accumulate([loss])
    model[0].weight.requires_grad_(False)
    opt.step()
    assert torch.equal(model[0].weight, before[0])
    moved = before[1] - model[1].weight.detach()
    torch.testing.assert_close(moved / moved.norm(), expected / expected.norm())


def test_losses_that_cannot_be_meant_are_explained() -> None:
    model, x, y = problem()
    opt, each = CGNM(model.parameters(), lr=0.1), F.cross_entropy(model(x), y, reduction="none")
    with pytest.raises(FedtailError, match=r"no loss has a gradient"):
        opt.step([loss.detach() for loss in losses_of(model, x, y)])
    for wrong in ([each, each], [0.5, 0.5]):
        with pytest.raises(FedtailError, match=r"the loss of group 0 is not a tensor of one number"):
            opt.step(wrong)
    with pytest.raises(FedtailError, match=r"\(\) losses for \(40,\) labels; .*reduction='none'"):
        grouped_losses(each.mean(), y, GROUPS)
    with pytest.raises(FedtailError, match=r"groups go up to 2, which n_groups = 2 leaves out"):
        grouped_losses(each, y, [0, 1, 2, 0], n_groups=2)
    assert not opt.state


def test_labels_of_a_binary_loss_may_be_floats_or_booleans() -> None:
    y = torch.tensor([0, 1, 0, 1, 1])
    each = torch.arange(5.0)
    for labels in (y.float(), y.bool(), y.to(torch.uint8)):
        assert [float(v) for v in grouped_losses(each, labels, [0, 1])] == pytest.approx([0.4, 1.6])


def _process(rank: int, meeting: str, folder: str) -> None:
    """One of two processes: the page's example on its half of the batch."""
    page = (Path(__file__).parents[1] / "docs" / "optimizer.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(import torch.distributed.*?)```", page, re.S)
    assert example
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    model, x, y = problem()
    half = slice(0, 20) if rank == 0 else slice(20, 40)
    names = {"torch": torch, "F": F, "model": model, "x": x[half], "y": y[half], "groups": GROUPS}
    names["y"] = names["y"].clamp(max=1) if rank else names["y"]  # the second process has no sample of group 1
    exec(example[1], {**names, "optimizer": CGNM(model.parameters(), lr=0.1)})
    torch.save(flat(model), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without processes")
def test_two_processes_take_the_step_of_the_whole_batch(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_process, ((tmp_path / "meeting").as_uri(), str(tmp_path)), nprocs=2)
    model, x, y = problem()
    y[20:] = y[20:].clamp(max=1)
    CGNM(model.parameters(), lr=0.1).step(losses_of(model, x, y))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, flat(model), atol=1e-6, rtol=1e-5)
