"""Flower's SuperLink, closed to other users of the machine (see ``guard``).

Run as a script, by its path, with the arguments of ``flower-superlink``.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from fedtail.federate.flower.guard import OPEN, close_paths


def main() -> None:
    """Run the SuperLink."""
    (program,) = entry_points(group="console_scripts", name="flower-superlink")
    start = program.load()
    close_paths("flwr.superlink.main", OPEN)
    start()


if __name__ == "__main__":
    main()
