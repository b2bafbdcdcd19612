"""A proxy before an S3 server that breaks it in the ways services break: away, slow, overloaded, credentials expired."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

MODES = ("pass", "down", "slow", "overloaded", "expired")
_REPLIES = {
    "overloaded": ("503 Service Unavailable", "SlowDown", "Please reduce your request rate."),
    "expired": ("400 Bad Request", "ExpiredToken", "The provided token has expired."),
}
_PIECE, _WATCHED_S = 1 << 16, 60
# What a slow service lets through: bytes a second, and seconds before a connection is served.
_SLOW_RATE, _SLOW_START_S = 400_000, 0.3


class Proxy:
    """Listens on a port of its own; `mode` may be changed at any time and holds for open connections too."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._mode, self._open, self._lock = "pass", set[socket.socket](), threading.Lock()
        self.refused = 0
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        assert mode in MODES
        self._mode = mode
        if mode == "pass":
            return
        # Whoever is in the middle of a request is cut off, as by a service that goes down.
        with self._lock:
            doomed = list(self._open)
        for connection in doomed:
            _reset(connection)

    @contextlib.contextmanager
    def outage(self, mode: str) -> Iterator[None]:
        self.mode = mode
        try:
            yield
        finally:
            self.mode = "pass"

    def back_once_refused(self, times: int = 3) -> threading.Thread:
        """Pass again as soon as an outage has turned somebody away so often; the thread that looks."""

        def watch(before: int) -> None:
            end = time.monotonic() + _WATCHED_S
            while self.refused < before + times and time.monotonic() < end:
                time.sleep(0.01)
            self.mode = "pass"

        thread = threading.Thread(target=watch, args=(self.refused,))
        thread.start()
        return thread

    def close(self) -> None:
        self._listener.close()
        self.mode = "down"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client, self._mode), daemon=True).start()

    def _serve(self, client: socket.socket, mode: str) -> None:
        with contextlib.suppress(OSError):
            if mode == "down":
                self.refused += 1
                return _reset(client)
            if mode in _REPLIES:
                self.refused += 1
                return _refuse(client, *_REPLIES[mode])
            if mode == "slow":
                time.sleep(_SLOW_START_S)
            self._tunnel(client, slow=mode == "slow")

    def _tunnel(self, client: socket.socket, slow: bool) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._upstream), timeout=10)
        except OSError:
            return _reset(client)
        server.settimeout(None)
        pair = {client, server}
        with self._lock:
            self._open |= pair
        back = threading.Thread(target=_copy, args=(server, client, slow), daemon=True)
        back.start()
        _copy(client, server, slow)
        back.join()
        with self._lock:
            self._open -= pair
        for each in pair:
            each.close()


def _copy(source: socket.socket, sink: socket.socket, slow: bool) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_PIECE):
            sink.sendall(data)
            if slow:
                time.sleep(len(data) / _SLOW_RATE)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def _refuse(client: socket.socket, status: str, code: str, message: str) -> None:
    """Read one request to its end and answer it with an S3 error."""
    client.settimeout(10)
    stream = client.makefile("rb")
    method = stream.readline().partition(b" ")[0]
    length, expects = 0, False
    while (line := stream.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        length = int(value) if name.lower() == "content-length" else length
        expects = expects or name.lower() == "expect"
    if length and not expects:
        stream.read(length)
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode() if method != b"HEAD" else b""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    client.sendall(head.encode() + body)
    client.shutdown(socket.SHUT_WR)
    client.close()


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        connection.close()
