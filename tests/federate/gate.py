"""A network that can be cut."""

from __future__ import annotations

import select
import socket
import threading


class Gate:
    """Passes TCP connections on to a port, or closes each at once: a TLS handshake that is cut off."""

    def __init__(self, port: int) -> None:
        self.port, self.open = port, True
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.pairs: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def shut(self) -> None:
        self.open = False
        for connection in self.pairs:
            connection.close()
        self.pairs.clear()

    def _accept(self) -> None:
        while True:
            outside, _ = self.listener.accept()
            if not self.open:
                outside.recv(1 << 16)  # closed with its hello unread, it would be reset, which Flower retries
                outside.close()
                continue
            try:
                inside = socket.create_connection(("127.0.0.1", self.port))
            except OSError:  # the server is away
                outside.close()
                continue
            self.pairs += [outside, inside]
            threading.Thread(target=self._pass_on, args=(outside, inside), daemon=True).start()

    def _pass_on(self, *ends: socket.socket) -> None:
        try:
            while True:
                for ready in select.select(ends, [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    ends[1 - ends.index(ready)].sendall(data)
        except (OSError, ValueError):
            return
        finally:
            for end in ends:
                end.close()
