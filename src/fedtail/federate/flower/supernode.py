"""Flower's SuperNode as a process that ends when it is of no more use, and leaves a sign of every answer it gets.

In flwr 1.41 an error that is not retried (a TLS handshake that is cut off, a certificate that has expired) ends the
loop that asks for work, but a thread keeps the process alive, and nobody notices. Run as a script, by its path, with
the arguments of ``flower-supernode``: the standard library and Flower only.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path

CONTACT = "FEDTAIL_CONTACT"
"""Environment variable: the file that is touched whenever the server has answered."""


class Contact(logging.Handler):
    """httpx logs every answer; a heartbeat is due some three times a minute, also while the site trains."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.INFO)
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        if re.search(r'/v1/fleet/\S+ "\S+ 200', record.getMessage()):
            self.file.touch()


def main() -> int:
    """Run the SuperNode; returns when it has ended, whatever threads it leaves."""
    (program,) = entry_points(group="console_scripts", name="flower-supernode")
    start = program.load()
    if CONTACT in os.environ:
        answers = logging.getLogger("httpx")
        answers.setLevel(logging.INFO)
        answers.propagate = False
        answers.addHandler(Contact(Path(os.environ[CONTACT])))
    try:
        start()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
