"""All local runs of a round side by side: what each step of each run trains on, drawn before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedtail.data.federation import Federation
from fedtail.rounds.plan import LocalPlan, PreparedRun, batch_of
from fedtail.settings import Settings

Span = tuple[int, int]

RARE = 4.0
"""Standard deviations of a group's place in a batch."""
GRAIN = 8
"""Batches and windows of groups are rounded to multiples of it, so that few distinct sizes occur. They depend on the
round alone: another size rounds differently, and a resumed run must give the bits of an uninterrupted one."""


@dataclass(frozen=True)
class Cohort:
    """N runs, longest first, so that the runs still going at step s are always the first ``active[s]``.

    Batches are padded to B columns and, with more than one group, sorted by group; the order of a batch's samples
    changes its gradient only by rounding.
    """

    runs: tuple[PreparedRun, ...]
    active: np.ndarray
    """(S,) runs still going at each step, descending."""
    index: Tensor
    """(S, N, B) pool indices; padding repeats a sample of the batch."""
    labels: Tensor
    """(S, N, 2, B) class and group of each sample; padding has group -1."""
    shares: Tensor
    """(S, N, 2, B) what a sample counts in the batch's mean (1/size), and its weight (1); 0 for padding."""
    windows: tuple[Span, ...]
    """(H,) columns low:high that hold all samples of each group, in all steps."""
    draws: Tensor | None
    """(S, N, B, 3 or 12) augmentation draws."""

    def __len__(self) -> int:
        return len(self.active)


def pack_cohort(runs: Sequence[PreparedRun], labels: np.ndarray, n_groups: int, steps: Span | None = None) -> Cohort:
    """Some runs, longest first, side by side: all their steps, or some. labels: of the whole pool."""
    plans = [r.plan if steps is None else r.plan.part(*steps) for r in runs]
    columns = _columns(plans)
    index, sizes, draws = _pack(plans, columns)
    y = labels[index]
    filled = np.arange(columns) < sizes[:, :, None]
    member: np.ndarray | int = 0
    windows: tuple[Span, ...] = ((0, columns),)
    if n_groups > 1:
        table = np.stack([r.groups for r in runs])
        member = np.where(filled, table[np.arange(len(runs))[:, None], y], n_groups)
        usual = np.stack([_boundaries(r, n_groups)[:-1] for r in runs])
        index, y, filled, member, draws, windows = _sort_by_group(index, y, filled, member, draws, usual)
    both = np.empty((*index.shape[:2], 2, columns), dtype=np.int64)
    both[:, :, 0], both[:, :, 1] = y, member
    shares = np.empty(both.shape, dtype=np.float32)
    shares[:, :, 1] = filled
    np.divide(shares[:, :, 1], np.maximum(sizes, 1)[:, :, None].astype(np.float32), out=shares[:, :, 0])
    lengths = np.array([len(plan.sizes) for plan in plans])
    return Cohort(
        runs=tuple(runs),
        active=(lengths[None, :] > np.arange(len(index))[:, None]).sum(1),
        index=torch.from_numpy(index),
        labels=torch.from_numpy(both),
        shares=torch.from_numpy(shares),
        windows=windows,
        draws=None if draws is None else torch.from_numpy(draws),
    )


def pack_parts(runs: Sequence[PreparedRun], labels: np.ndarray, n_groups: int, least: float) -> list[Cohort]:
    """``pack_cohort``, in parts: steps whose batches are all short, as an epoch's last, have fewer columns, where that
    saves a step ``least`` samples."""
    plans = [r.plan for r in runs]
    columns, common = _columns(plans), min(len(plan.sizes) for plan in plans)
    if not common or len(runs) * (columns - GRAIN) < least:
        return [pack_cohort(runs, labels, n_groups)]
    grain = max(columns // 4, GRAIN)
    needed = -(-np.stack([plan.sizes[:common] for plan in plans]).max(0) // grain) * grain
    width = np.full(max(len(plan.sizes) for plan in plans), columns)
    width[:common] = np.where(len(runs) * (columns - needed) >= least, needed, columns)
    edges = [0, *(np.flatnonzero(np.diff(width)) + 1).tolist(), len(width)]
    return [pack_cohort(runs, labels, n_groups, span) for span in pairwise(edges)]


def _columns(plans: Sequence[LocalPlan]) -> int:
    return -(-max(int(plan.sizes.max(initial=1)) for plan in plans) // GRAIN) * GRAIN


def aligned(cohorts: Sequence[Cohort]) -> list[Cohort]:
    """The cohorts of a round with windows in common, and wide ones: then few sizes of a step serve all rounds.

    Narrow windows save products, but differ from round to round, and a step is traced anew for each. They hold what
    batches of such runs hardly ever exceed, and are rounded to quarters of a batch.
    """
    common: dict[int, tuple[Span, ...]] = {}
    for cohort in cohorts:
        columns, n_groups = cohort.index.shape[-1], len(cohort.windows)
        grain = columns if n_groups == 1 else max(columns // 4, GRAIN)
        windows = cohort.windows
        if n_groups > 1:
            usual = np.stack([_boundaries(r, n_groups) for r in cohort.runs])
            reach = RARE * np.sqrt(usual * (1.0 - usual) / columns)
            low, high = ((usual - reach).min(0) * columns).tolist(), ((usual + reach).max(0) * columns).tolist()
            expected = [(max(int(a), 0), min(math.ceil(b), columns)) for a, b in zip(low[:-1], high[1:], strict=True)]
            windows = tuple(map(_union, windows, expected))
        wide = tuple((low // grain * grain, min(-(-high // grain) * grain, columns)) for low, high in windows)
        common[columns] = tuple(map(_union, common.get(columns, wide), wide))
    return [replace(cohort, windows=common[cohort.index.shape[-1]]) for cohort in cohorts]


def _boundaries(run: PreparedRun, n_groups: int) -> np.ndarray:
    """(H + 1,) where the groups of its batches begin and end on average, as shares of a batch."""
    sizes = np.bincount(run.groups, weights=run.plan.resampled, minlength=n_groups)
    return np.concatenate([[0.0], np.cumsum(sizes) / max(sizes.sum(), 1.0)]).clip(max=1.0)


def _union(a: Span, b: Span) -> Span:
    """The columns from the first to the last of two windows, of which one may be empty."""
    if a[0] == a[1] or b[0] == b[1]:
        return max(a, b, key=lambda window: window[1] - window[0])
    return min(a[0], b[0]), max(a[1], b[1])


def _pack(plans: Sequence[LocalPlan], columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(S, N, B) indices, (S, N) batch sizes, (S, N, B, 3 or 12) augmentation draws."""
    n, longest = len(plans), max((len(p.sizes) for p in plans), default=0)
    index = np.zeros((n, longest, columns), dtype=np.int64)
    sizes = np.zeros((n, longest), dtype=np.int64)
    drawn = plans[0].all_draws
    draws = None if drawn is None else np.zeros((n, longest, columns, drawn.shape[1]), dtype=np.int64)
    for i, plan in enumerate(plans):
        lengths, steps = plan.sizes, len(plan.sizes)
        if not steps:
            continue
        sizes[i, :steps] = lengths
        index[i] = plan.index[0]
        starts = np.cumsum(lengths) - lengths
        place = np.arange(len(plan.index)) + np.repeat(np.arange(steps) * columns - starts, lengths)
        index[i].reshape(-1)[place] = plan.index
        if draws is not None:
            draws[i].reshape(-1, draws.shape[-1])[place] = plan.all_draws
    return (
        np.ascontiguousarray(index.transpose(1, 0, 2)),
        np.ascontiguousarray(sizes.T),
        None if draws is None else np.ascontiguousarray(draws.transpose(1, 0, 2, 3)),
    )


def _sort_by_group(
    index: np.ndarray,
    y: np.ndarray,
    filled: np.ndarray,
    member: np.ndarray,
    draws: np.ndarray | None,
    usual: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, tuple[Span, ...]]:
    """Every batch sorted by group, and the columns in which each group is found.

    A short batch leaves gaps, so that its groups lie where those of full ones do: usual, (N, H), is where each group
    begins, as a share of the columns.
    """
    (steps, n, columns), n_groups = index.shape, usual.shape[1]
    kind = np.int16 if (n_groups + 1) * columns < 2**15 else np.int32
    keys = np.sort(member.astype(kind) * np.array(columns, kind) + np.arange(columns, dtype=kind), axis=-1)
    order, member = (keys % columns).astype(np.int64), (keys // columns).astype(np.int64)
    cells = np.arange(steps * n)[:, None] * (n_groups + 1) + member.reshape(-1, columns)
    counts = np.bincount(cells.reshape(-1), minlength=steps * n * (n_groups + 1)).reshape(steps, n, n_groups + 1)
    sizes, ends = columns - counts[..., -1], counts.cumsum(-1)[..., :-1]
    begins = ends - counts[..., :-1]
    starts, end = np.empty_like(begins), np.zeros_like(sizes)
    for h, first in enumerate((usual.T * columns).astype(np.int64)):
        starts[..., h] = np.minimum(np.maximum(first, end), columns - sizes + begins[..., h])
        end = starts[..., h] + counts[..., h]
    member[member == n_groups] = -1
    short = np.flatnonzero((sizes < columns).reshape(-1))
    if short.size:
        order, member = _spread(order, member, short, begins.reshape(-1, n_groups), starts.reshape(-1, n_groups))
    windows = []
    for h in range(n_groups):
        there = counts[..., h] > 0
        low = int(starts[..., h][there].min(initial=columns))
        high = int((starts + counts[..., :-1])[..., h][there].max(initial=0))
        windows.append((low // GRAIN * GRAIN, min(columns, -(-high // GRAIN) * GRAIN)) if there.any() else (0, 0))
    if draws is not None:
        draws = np.take_along_axis(draws, order[..., None], 2)
    index, y, filled = (np.take_along_axis(a, order, -1) for a in (index, y, filled))
    return index, y, filled, member, draws, tuple(windows)


def _spread(
    order: np.ndarray, member: np.ndarray, short: np.ndarray, begins: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Move the samples of the batches ``short`` from where their groups begin to where they shall start."""
    columns = order.shape[-1]
    flat_order, flat_member = order.reshape(-1, columns), member.reshape(-1, columns)
    groups = flat_member[short]
    rows, column = np.nonzero(groups >= 0)
    h = groups[rows, column]
    place = column + (starts - begins)[short[rows], h]
    moved_order = np.repeat(flat_order[short][:, -1:], columns, axis=1)  # padding: the last column is always some
    moved_member = np.full_like(groups, -1)
    moved_order[rows, place] = flat_order[short][rows, column]
    moved_member[rows, place] = h
    flat_order[short], flat_member[short] = moved_order, moved_member
    return order, member


Shard = list[Cohort]
"""The steps of some runs, part by part."""

MAX_ROWS = 64
"""Most runs in one step. With more, the overhead per run hardly falls any further, and a step no longer fits the
cache."""
SHARD_FLOPS = 1.1e8
"""Operations of a step that fill a core: some milliseconds, of which overhead is a tenth. A shard has as many runs as
that takes."""
SHORT_PAYS = 2e7
"""Operations that a step with fewer columns must save: it is captured apart, or called, if it is rare."""
SHARD_VALUES = 2**26
"""Most parameters, and most values of a batch, of the runs of a shard whose chunks workers share."""
STRETCH = 32
"""Most steps that are taken in one call: whoever waits for progress, or for Ctrl-C, waits for them."""


def largest_batch(federation: Federation, settings: Settings) -> int:
    """Samples in a batch of the largest client."""
    return min(batch_of(settings.local), int(federation.sizes.max()))


def runs_in_a_shard(federation: Federation, settings: Settings, sample_flops: float) -> int:
    """Most runs in one step of a model with so many operations a sample."""
    step = 3.0 * largest_batch(federation, settings) * sample_flops
    return max(1, min(MAX_ROWS, int(SHARD_FLOPS / max(step, 1.0))))


def runs_in_chunks(federation: Federation, settings: Settings, n_params: int) -> int:
    """Most runs in one step where workers share chunks: all go side by side, as far as memory goes."""
    values = max(n_params, largest_batch(federation, settings) * math.prod(federation.input_shape))
    return max(1, min(MAX_ROWS, SHARD_VALUES // values))


def short_batches_pay(sample_flops: float) -> float:
    """Samples that a step with fewer columns must save."""
    return SHORT_PAYS / max(3.0 * sample_flops, 1.0)


def cut_round(runs: Sequence[PreparedRun], labels: np.ndarray, n_groups: int, most: int, least: float) -> list[Shard]:
    """The round's shards of at most ``most`` runs, the longest first; ``least``: see ``pack_parts``."""
    cuts = equal_parts(len(runs), most)
    shards = [pack_parts(runs[cut], labels, n_groups, least) for cut in cuts]  # short calls of numpy
    if len(shards) > 1:
        wide = iter(aligned([part for shard in shards for part in shard]))
        shards = [[next(wide) for _ in shard] for shard in shards]
    return shards


def equal_parts(n: int, most: int) -> list[slice]:
    """0..n in equal slices of at most ``most``."""
    count = -(-n // most)
    return [slice(n * i // count, n * (i + 1) // count) for i in range(count)]


def stretches(active: np.ndarray) -> list[tuple[int, int, int]]:
    """(first, last, runs) of steps in which as many runs go on, at most ``STRETCH`` of them."""
    edges = [0, *(np.flatnonzero(np.diff(active)) + 1).tolist(), len(active)]
    return [
        (first, min(first + STRETCH, end), int(active[begin]))
        for begin, end in pairwise(edges)
        for first in range(begin, end, STRETCH)
    ]


@cache
def ladder(n: int, most: int) -> int:
    """The rows a step is run with when n are needed: few distinct sizes, at most a third more than needed."""
    size = 1
    while size < n:
        size = size + max(1, size // 3)
    return min(size, most)
