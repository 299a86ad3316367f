"""Flower's SuperLink with less work per request (see ``middleware``).

Run as a script, by its path, with the arguments of ``flower-superlink``.
"""

from __future__ import annotations

from importlib.metadata import entry_points, version

from fedtail.federate.flower import TESTED
from fedtail.federate.flower.middleware import lighten_superlink


def main() -> None:
    """Run the SuperLink; a version that is not known here runs as it is."""
    (program,) = entry_points(group="console_scripts", name="flower-superlink")
    start = program.load()
    if version("flwr") == TESTED:
        lighten_superlink()
    start()


if __name__ == "__main__":
    main()
