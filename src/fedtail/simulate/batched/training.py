"""A shard trained from its first step to its last, by one worker."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedtail.core.records import Task, Tensors
from fedtail.data.federation import Federation
from fedtail.data.images.augment import apply_augment
from fedtail.rounds.plan import PreparedRun
from fedtail.simulate.base import End
from fedtail.simulate.batched.cohort import Cohort
from fedtail.simulate.batched.programs import Programs, Runner
from fedtail.simulate.batched.script import Feed
from fedtail.simulate.batched.shards import Shard, ladder, stretches


def train_shard(programs: Programs, federation: Federation, worker: int, shard: Shard, task: Task) -> list[End]:
    """How each of a shard's runs ends."""
    runs = shard[0].runs
    n_runs, start = len(runs), task.x[: programs.model.n_params]
    const, state = _stack([r.const for r in runs]), _stack([r.state for r in runs])
    searched = programs.signature(shard[0], task).searched
    rows = {
        "x0": start.unsqueeze(0),
        "lr": torch.tensor([r.hyper["lr"] for r in runs]).unsqueeze(1),
        **{f"hyper.{k}": torch.tensor([r.hyper[k] for r in runs]) for k in searched},
        **{f"const.{k}": v for k, v in const.items()},
    }
    carried = {"x": start.expand(n_runs, -1), **{f"state.{k}": v for k, v in state.items()}}
    delta = torch.empty(n_runs, programs.model.n_params)
    delta[int(shard[0].active[0]) if len(shard[0]) else 0 :] = 0.0  # runs without a step
    means, coming = [], [int(part.active[0]) if len(part) else 0 for part in shard[1:]] + [0]
    for part, after in zip(shard, coming, strict=True):
        signature, runner = programs.signature(part, task), None
        loss = torch.zeros(len(part), n_runs, signature.columns)
        for first, last, n in stretches(part.active):
            size = ladder(n, n_runs)
            if runner is None or size < runner.rows:
                runner = programs.runner(worker, (signature, size), runs[0])
                runner.follow()
                _set(runner.inputs, {**rows, **carried})
                rows |= {k: runner.inputs[k] for k in rows}
                carried = {k: runner.inputs[k] for k in carried}
                feed = Feed(
                    part.index[:, :size].flatten(1), part.labels[:, :size], part.shares[:, :size], loss[:, :size]
                )
            if runner.stretch is not None:
                runner.stretch(feed, first, last)
            else:
                _one_by_one(programs, federation, runner, feed, part, first, last)
            task.advance(n * (last - first))
            left = int(part.active[last]) if last < len(part) else after
            if left < n:
                torch.sub(carried["x"][left:n], start, out=delta[left:n])
                for k, final in state.items():
                    final[left:n] = carried[f"state.{k}"][left:n]
        means.append(loss.mul_(part.shares[:, :, 0]).sum(-1))
    each = torch.cat(means).T.contiguous().numpy()
    return [End(delta[i], each[i, : r.local.steps], _row(const, i), _row(state, i)) for i, r in enumerate(runs)]


def _one_by_one(
    programs: Programs, federation: Federation, runner: Runner, feed: Feed, cohort: Cohort, first: int, last: int
) -> None:
    """The steps from one to another: their batches go into the runner's tensors, their losses where they belong."""
    rows, pool, transform = runner.rows, federation.pool.x, federation.transform
    inputs, labels, shares = runner.inputs["inputs"], runner.packed["labels"], runner.packed["shares"]
    flat = inputs.view(-1, *pool.shape[1:])
    for s in range(first, last):
        if programs.pool is not None:
            torch.index_select(pool, 0, feed.rows[s], out=flat)
        else:
            x = transform(pool.index_select(0, feed.rows[s]))
            if cohort.draws is not None:
                x = apply_augment(x, cohort.draws[s, :rows].flatten(0, 1))
            inputs.copy_(x.reshape(inputs.shape))
        labels.copy_(feed.labels[s])
        shares.copy_(feed.shares[s])
        feed.loss[s].copy_(runner.run())


def alike(runs: Sequence[PreparedRun]) -> bool:
    """Whether the method's tensors are of the same shapes in all runs, so that they can be stacked."""

    def shapes(run: PreparedRun) -> list[dict[str, torch.Size]]:
        return [{k: v.shape for k, v in tensors.items()} for tensors in (run.const, run.state)]

    return all(shapes(run) == shapes(runs[0]) for run in runs)


def _stack(each: list[Tensors]) -> Tensors:
    return {k: torch.stack([e[k] for e in each]) for k in each[0]} if each else {}


def _row(tensors: Tensors, i: int) -> Tensors:
    return {k: v[i] for k, v in tensors.items()}


def _set(place: Tensors, values: Tensors) -> None:
    """Copy the rows that fit, where they are not there already."""
    for name, value in values.items():
        if value is not place[name]:
            place[name].copy_(value[: len(place[name])])
