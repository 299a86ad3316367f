"""When torch.compile pays for itself, and how it is set up: a cache that later runs find again."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from fedtail.methods.base import Method
from fedtail.simulate.batched.runner import Step

COMPILE_SECONDS = 60.0
"""What compiling a step costs without a cache (measured: 20 to 60 s for an MLP on one core, 3 s from the cache)."""
SAVED = 0.1
"""Share of a captured step's time that compiling saves where a method has a loss of its own (measured: 10 to 30 %).
Plain cross-entropy has its gradient written out, and there compiling saves nothing."""
SECONDS_PER_CALL, FLOPS_PER_SECOND = 2.5e-6, 4e10
"""What a captured step takes: per operation, and for its arithmetic on one core."""
CALLS = 110
"""Operations in a step of a small network."""


def pays(compile: bool | None, method: Method, rounds: int, steps_per_round: int, flops_per_step: float) -> bool:
    """Whether to compile. None estimates from sizes, not from a clock: compiled steps round differently, and the
    same run must give the same bits whatever else the machine does."""
    if compile is not None:
        return compile
    if not method.traits.own_loss:
        return False
    step = CALLS * SECONDS_PER_CALL + flops_per_step / FLOPS_PER_SECOND
    return rounds * steps_per_round * step * SAVED > COMPILE_SECONDS


def compiled(step: Step) -> Step:
    """The step under torch.compile, with the number of runs left open. Compiles at the first call."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder()))
    return torch.compile(step, fullgraph=True, options={"cpp_wrapper": True})


def cache_folder() -> Path:
    """Where compiled steps are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedtail" / "inductor"
