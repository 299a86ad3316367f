"""The ``fedtail`` command, before anything is imported: torch takes seconds, and Ctrl-C may come in the middle."""

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from fedtail.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(130)
