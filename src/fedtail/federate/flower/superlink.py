"""Flower's SuperLink with less work per request (see ``middleware``), closed to other users (see ``guard``).

Run as a script, by its path, with the arguments of ``flower-superlink``.
"""

from __future__ import annotations

from importlib.metadata import entry_points, version

from fedtail.federate.flower import TESTED
from fedtail.federate.flower.guard import OPEN, close_paths
from fedtail.federate.flower.middleware import lighten_superlink


def main() -> None:
    """Run the SuperLink. Of a version that is not known here, only who may use it is changed."""
    (program,) = entry_points(group="console_scripts", name="flower-superlink")
    start = program.load()
    from flwr.superlink import main as web  # others import this file for its path only

    close_paths(web, OPEN)
    if version("flwr") == TESTED:
        lighten_superlink()
    start()


if __name__ == "__main__":
    main()
