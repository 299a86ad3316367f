"""The clock that rounds of all simulators are timed with."""

import os
import time


def now():
    """Seconds on the wall or, with BENCHMARK_CLOCK=cpu, of this process on its processors."""
    return time.process_time() if os.environ.get("BENCHMARK_CLOCK") == "cpu" else time.perf_counter()
