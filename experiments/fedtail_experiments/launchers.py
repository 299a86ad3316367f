"""Where cells run: processes on this machine (the default) or a Ray cluster (extra ``ray``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedtail.errors import FedtailError, one_of
from fedtail.models.device import check_device
from fedtail.registry import in_words
from fedtail.study.cells import Cell, Launcher, Outcome, run_packed

LAUNCHERS = ("processes", "ray")


def on_ray(address: str | None = None, *, cpus: float = 1.0, gpus: float = 0.0) -> Launcher:
    """A launcher that sends every cell to a Ray cluster.

    The output folder must be on a file system that all nodes share, since a cell's folder is its result. ``cpus`` and
    ``gpus`` are what Ray reserves per cell. Without ``address`` the cluster of RAY_ADDRESS, else one on this machine.
    """
    try:
        import ray
    except ImportError:
        raise FedtailError("--launcher ray needs Ray; install it with: pip install 'ray>=2.30'") from None

    def launch(cells: Sequence[Cell], base: Path) -> Iterator[Outcome]:
        ours = not ray.is_initialized()
        if ours:
            ray.init(address=address, include_dashboard=False, log_to_driver=False)
        try:
            task = ray.remote(num_cpus=cpus, num_gpus=gpus)(run_packed)
            folder = str(base.resolve())
            share = max(1, int(cpus))
            pending = {task.remote(c.label, c.config.model_dump(), folder, share): c for c in cells}
            while pending:
                done, _ = ray.wait(list(pending), num_returns=1)
                for reference in done:
                    cell = pending.pop(reference)
                    try:
                        error = ray.get(reference)
                    except Exception as failure:  # a lost node or a crashed worker is that cell's outcome
                        error = in_words(failure)
                    yield Outcome(cell, cell.folder(base), error=error)
        finally:
            if ours:
                ray.shutdown()

    return launch


def launcher_for(name: str, cells: Sequence[Cell]) -> Launcher | None:
    """A launcher by name; None is the process pool of this machine, which must then have the cells' devices."""
    if name not in LAUNCHERS:
        raise one_of("launcher", name, LAUNCHERS)
    devices = dict.fromkeys(cell.config.engine.device for cell in cells)
    if name == "ray":
        return on_ray(gpus=1.0 if set(devices) - {"cpu"} else 0.0)
    for device in devices:
        check_device("engine.device", device)
    return None
