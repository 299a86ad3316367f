"""Flower's SuperExec at a site, which starts the app for a message from a process that has Flower imported already.

In flwr 1.41 every message is answered by a process of its own, ``flwr-clientapp``, which spends more than a second of
CPU on imports before it does anything. Here a process that has done that, and nothing else, waits and is forked for
every message; what is forked is a process of its own as before. Run as a script, by its path, with the arguments of
``flower-superexec``: the standard library and Flower only.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
from importlib.metadata import entry_points
from typing import Any

import httpx

from fedtail.federate.flower.guard import private

EXECUTOR = "flwr.supercore.superexec.executor.subprocess_executor"


def main() -> None:
    """Run the SuperExec; what it launches comes from the process that waits."""
    executor = private(EXECUTOR, "subprocess.Popen", "subprocess.DEVNULL", loses="a message costs seconds")
    (program,) = entry_points(group="console_scripts", name="flower-superexec")
    start = program.load()
    if executor is None:
        start()
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:  # before the SuperExec has threads
        ours.close()
        wait(theirs)
        os._exit(0)
    theirs.close()
    launch_by(ours, executor)
    start()


def wait(orders: socket.socket) -> None:
    """Fork for every command line that comes; until nobody is left who could send one."""
    (program,) = entry_points(group="console_scripts", name="flwr-clientapp")
    answer = program.load()
    httpx.Client().close()  # what it imports with its first client takes longer than an answer
    gc.freeze()  # no page of what is imported is touched, and copied, by a collection
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while order := orders.recv(1 << 16):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have ended
                pass
        if os.fork() == 0:
            orders.close()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            sys.argv = json.loads(order)
            code = 0
            try:
                answer()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException as error:
                sys.stderr.write(f"flwr-clientapp: {type(error).__name__}: {error}\n")
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def launch_by(orders: socket.socket, executor: Any) -> None:
    """Have Flower's executor send what it would start; what is not a ClientApp it starts itself."""
    real = executor.subprocess

    class Processes:
        DEVNULL = real.DEVNULL

        @staticmethod
        def Popen(command: list[str], **options: Any) -> Any:
            if command[0] != "flwr-clientapp":
                return real.Popen(command, **options)
            try:
                return orders.send(json.dumps(command).encode())
            except OSError:  # the process that waits is gone: as Flower does it
                return real.Popen(command, **options)

    executor.subprocess = Processes


if __name__ == "__main__":
    main()
