"""A captured function replays with the bits of the function itself, whatever it does to memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedtail.simulate.batched.capture import CaptureError, Tape, capture, check

Function = Callable[..., list[Tensor]]


def fresh(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, generator=generator) for _ in range(count)]


def assert_replays(function: Function, count: int = 2) -> None:
    """Capture on some inputs, replay three times on others: outputs and inputs must be those of plain calls."""
    held = fresh(count, 0)
    tape = capture(function, held)
    for t, v in zip(held, fresh(count, 1), strict=True):
        t.copy_(v)
    plain = fresh(count, 1)
    for _ in range(3):
        expected = function(*plain)
        tape.replay()
        for a, b in zip([*held, *tape.outputs], [*plain, *expected], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_capture_leaves_its_inputs_unchanged() -> None:
    held = fresh(1, 0)
    capture(lambda x: [x.mul_(2).sum()], held)
    assert torch.equal(held[0], fresh(1, 0)[0])


def test_results_of_autograd_are_captured() -> None:
    def gradient(x: Tensor, y: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            loss = (torch.log_softmax(z, -1) * y).sum()
            return list(torch.autograd.grad(loss, z))

    assert_replays(gradient)


def test_results_of_vmapped_functions_are_captured() -> None:
    assert_replays(lambda x, y: [torch.func.vmap(torch.func.grad(lambda a, b: (a * b).sin().sum()))(x, y)])


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: [b.copy_(a + b), a.copy_(a * 2)],
        lambda a, b: [(t := a + 1), a.copy_(b * 2), b.copy_(t)],
        lambda a, b: [a.copy_(a.lerp(b, 0.5)), a + b],
        lambda a, b: [(n := a.lerp(b, 0.5)), a - n, a.copy_(n)],
        lambda a, b: [(n := a @ b.T @ b), a.copy_(n), n + 1],
        lambda a, b: [(n := a * 2), b.copy_(n), b.add_(1), n + 0],
        lambda a, b: [(n := a * 2), n.add_(b), a.copy_(n), n * 1],
        lambda a, b: [a[1:].copy_(b[:-1] * 2), a.sum(0)],
        lambda a, b: [a.copy_(torch.ones_like(b)), a + b],
        lambda a, b: [a.copy_((b * 2).unsqueeze(0).sum(0)), a + b],
        lambda a, b: [a.copy_(torch.cat([a[:1] * 3, b[1:] + 1]))],
        lambda a, b: [torch.cat([(t := a * 2).add_(b), t + 1]), t],
        lambda a, b: [(t := a * 2), torch.cat([t, b * 3]), t.add_(1)],
        lambda a, b: [torch.cat([(t := a * b), t]).sum(0), torch.cat([t, a], 1)],
        lambda a, b: [(g := a.new_empty(2, 3, 4))[0].copy_(a * b), g[1].copy_(a + b), g.sum(0)],
        lambda a, b: [a.unsqueeze(1).sum(1), a.add_(1)],
        lambda a, b: [(s := (a * b).unsqueeze(1).sum(1)), s.mul_(2)],
        lambda a, b: [a.max(dim=1).values + torch.ones_like(b).sum(), torch.arange(3) + a.argmax(1)],
        lambda a, b: [torch.where(a > 0, a, torch.zeros_like(b)), a.t().contiguous()],
        lambda a, b: [torch.cat([torch.cat([(p := (a @ b.T).sigmoid().split(2, 1))[0] * 2, p[1]], 1), b], 1)],
        lambda a, b: [torch.cat([torch.cat([a, b]), a])],
        lambda a, b: [torch.cat([(a[:, :3] * 2).t(), b[:, :3]])],
        lambda a, b: [torch.cat([a.max(1, keepdim=True).values, b], 1)],
        lambda a, b: [(t := a * 2), torch.cat([t, b.double()]).sum(), t / 3],
        lambda a, b: [(t := a * 2), u := torch.cat([t, b]).sum(), (a + u) * (b - u) + (a @ b.T @ b), t.exp()],
        lambda a, b: [(t := a * 2), b[:2].copy_(a[:2] + 1), b.copy_(t)],
        lambda a, b: [(t := a * 2)[:2], b.copy_(a + 1), b.copy_(t)],
        lambda a, b: [b.copy_(t := a + 1), (u := a * 2), t.exp(), b.copy_(u)],
        lambda a, b: [(t := a * 2), (s := t.unsqueeze(0).sum(0)), b.copy_(t), b.copy_(a + 1), s * 3],
        lambda a, b: [p.copy_(q * 2) for p, q in zip(a.split(2, 1), b.split(2, 1)[::-1], strict=True)],
    ],
)
def test_memory_is_shared_only_where_nobody_can_tell(function: Function) -> None:
    assert_replays(function)


OPERATIONS: Sequence[Callable[[Tensor, Tensor], Tensor]] = (
    lambda a, b: a + b,
    lambda a, b: a * 0.5,
    lambda a, b: a.add_(b * 0.25),
    lambda a, b: a.copy_(b),
    lambda a, b: a.copy_(a * b),
    lambda a, b: a[1:].copy_(b[:-1] * 2),
    lambda a, b: a.view(4, 3).t().reshape(3, 4),
    lambda a, b: torch.cat([a[:1], b[1:]]),
    lambda a, b: torch.cat([a * 2, b.mul_(0.5)]).view(2, 3, 4).sum(0),
    lambda a, b: a.unsqueeze(0).sum(0),
    lambda a, b: torch.tanh(a @ b.t() @ b),
    lambda a, b: a.new_empty(3, 4).copy_(b),
    lambda a, b: torch.cat(a.split(2, 1)[::-1], 1),
    lambda a, b: torch.cat([(p := (a * b).sigmoid().split(2, 1))[0] * p[1].tanh(), p[1]], 1),
    lambda a, b: torch.cat([a, b])[2:5],
    lambda a, b: torch.cat([a.max(1, keepdim=True).values, b[:, 1:]], 1),
    lambda a, b: [p.copy_(q * 0.5) for p, q in zip(a.split(2, 1), b.split(2, 1), strict=True)] and a,
    lambda a, b: [p.copy_(q - 1) for p, q in zip(a.unbind(), b.unbind(), strict=True)] and a,
)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_any_program_of_reads_writes_views_and_copies_replays(program: list[tuple[int, int, int]]) -> None:
    def function(a: Tensor, b: Tensor) -> list[Tensor]:
        values = [a, b]
        for operation, left, right in program:
            result = OPERATIONS[operation](values[left % len(values)], values[right % len(values)])
            values.append(result if result.shape == a.shape else values[left % len(values)])
        return [v * 1 for v in values]

    try:
        function(*fresh(2, 0))
    except RuntimeError:  # torch itself refuses to copy between overlapping views
        assume(False)
    assert_replays(function)


def test_constants_and_views_take_no_calls() -> None:
    tape = capture(lambda a, b: [a + torch.ones_like(a).sum(), b.t()[1:].unsqueeze(0)], fresh(2, 0))
    assert len(tape.calls) == 1


def test_memory_of_results_that_nobody_reads_any_more_is_used_again() -> None:
    def chain(a: Tensor, b: Tensor) -> list[Tensor]:
        for _ in range(6):
            a = (a + b).tanh()
        return [a]

    tape = capture(chain, fresh(2, 0))
    assert len({call.keywords["out"].data_ptr() for call in tape.calls}) == 2


def test_a_result_is_written_where_it_is_asked_for() -> None:
    tape = capture(lambda a, b: [torch.add(a, b, alpha=0.5, out=a).sum()], fresh(2, 0))
    assert len(tape.calls) == 2
    assert_replays(lambda a, b: [torch.add(a[1:], a[:-1], alpha=0.5, out=b[:-1]).sum(), a * b])


def without(tape: Tape, i: int) -> Tape:
    return Tape(tape.inputs, tape.outputs, [c for j, c in enumerate(tape.calls) if j != i])


def step(x: Tensor, lr: Tensor) -> list[Tensor]:
    x.sub_(lr * x.sin())
    return [x.sum()]


def test_a_tape_without_its_update_is_noticed_although_it_was_recorded_on_zeros() -> None:
    def recorded() -> Tape:
        return capture(step, [torch.zeros(3, 4), torch.zeros(())])

    tape, values = recorded(), [*fresh(1, 0), torch.tensor(0.1)]
    check(step, tape, values)
    for i in range(len(tape.calls)):
        with pytest.raises(CaptureError, match="bits"):
            check(step, without(recorded(), i), values)
    assert not any(t.any() for t in tape.inputs), "inputs are left as they were"


def test_a_comparison_that_could_notice_nothing_is_refused() -> None:
    tape = capture(step, [*fresh(1, 0), torch.zeros(())])
    with pytest.raises(CaptureError, match="changes nothing"):
        check(step, tape, [*fresh(1, 0), torch.zeros(())])


def test_attention_draws_only_where_it_drops_something() -> None:
    def attend(dropped: float) -> Function:
        attention = torch.nn.functional.scaled_dot_product_attention
        return lambda q, k: [attention(q[None, None], k[None, None], k[None, None], dropout_p=dropped)]

    assert_replays(attend(0.0))
    with pytest.raises(CaptureError, match="random"):
        capture(attend(0.5), fresh(2, 0))


def test_random_numbers_are_refused() -> None:
    with pytest.raises(CaptureError, match="random"):
        capture(lambda a: [a + torch.rand_like(a)], fresh(1, 0))


def test_branching_on_values_is_refused() -> None:
    with pytest.raises(Exception, match=r"."):
        capture(lambda a: [a if float(a.sum()) > 0 else -a], fresh(1, 0))
