"""A round cut into shards: which runs take their steps together, with how many rows, and what that pads.

The larger the model, the fewer runs fill a core. Shards depend on the model and the data alone, so that a run's bits
are those of any number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from fedtail.data.federation import Federation
from fedtail.rounds.plan import PreparedRun, batch_of
from fedtail.settings import Settings
from fedtail.simulate.batched.cohort import Cohort, aligned, pack_parts

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
    """The same where workers share chunks: all runs go side by side, as far as memory goes."""
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


def sizes(active: np.ndarray, n_runs: int) -> list[int]:
    """The rows that each step is run with."""
    return [ladder(n, n_runs) for n in active.tolist()]


@cache
def ladder(n: int, most: int) -> int:
    """The rows a step is run with when n are needed: few distinct sizes, at most a third more than needed."""
    size = 1
    while size < n:
        size = size + max(1, size // 3)
    return min(size, most)


def padding(shards: Sequence[Shard]) -> dict[str, float]:
    """Return the work for nothing, in units of the rest: samples in steps (those of runs that are over, and of
    short batches), and samples in the products of groups, whose windows hold more than the group."""
    real = max(sum(len(run.plan.index) for shard in shards for run in shard[0].runs), 1)
    slots = products = 0
    for part in (part for shard in shards for part in shard):
        rows = sum(sizes(part.active, len(part.runs)))
        slots += rows * part.index.shape[-1]
        products += rows * sum(high - low for low, high in part.windows)
    return {"samples": slots / real - 1.0, "products": products / real - 1.0}
