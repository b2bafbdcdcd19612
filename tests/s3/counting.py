"""A door in front of an S3 service that counts what goes through: one line for each request."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress
from types import TracebackType

_REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) (/\S*) HTTP/1\.1\r\n")
_PIECE = 1 << 16


class Door:
    """Forwards a port of loopback to another one, byte for byte. `requests` are (method, path) in order of arrival."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.requests: list[tuple[str, str]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Door:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def counts(self) -> dict[str, int]:
        """Requests so far by kind: LIST, HEAD, GET, PUT, POST, DELETE."""
        kinds = ["LIST" if "list-type=2" in path else method for method, path in self.requests]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, count: bool) -> None:
        # A request begins a piece: clients wait for the reply before the next one.
        try:
            while piece := source.recv(_PIECE):
                found = _REQUEST.match(piece) if count else None
                if found:
                    self.requests.append((found[1].decode(), found[2].decode()))
                sink.sendall(piece)
        except OSError:  # one end has gone
            return
        finally:
            for end in (source, sink):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
