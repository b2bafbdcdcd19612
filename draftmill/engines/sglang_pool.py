"""Servers that answer together: each row goes to the one with the fewest in flight, and an interrupted row goes again.

A pool never refuses a row because a server is down: it waits for one to serve. Only when the last server is lost do the
rows fail, with the error that lost it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from draftmill.engines.base import Failure, Request, Result, Stamp
from draftmill.engines.sglang_api import ServerHandle
from draftmill.engines.sglang_watch import Asking, Interrupted, Watched
from draftmill.errors import UserError


def _nothing(*_: Any) -> None:
    pass


def _always(_: str) -> bool:
    return True


@dataclass(slots=True)
class Listener:
    """What the pool's user wants to hear: voided rows (era, span), a change, a server lost, and whether one is wanted."""

    voided: Callable[[str, int], None] = _nothing
    changed: Callable[[], None] = _nothing
    lost: Callable[[str, UserError | None], None] = _nothing
    wanted: Callable[[str], bool] = _always


@dataclass(slots=True)
class Rate:
    """Tokens a second over the last minute, from samples a second apart."""

    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque([(monotonic(), 0)], maxlen=61))

    def sample(self, tokens: int) -> float:
        """Note the number of tokens so far; the rate over what is remembered."""
        now = monotonic()
        if now - self._samples[-1][0] >= 1.0:
            self._samples.append((now, tokens))
        then, before = self._samples[0]
        return (tokens - before) / max(now - then, 1e-3)


class Pool:
    """The servers of one process. Everything happens inside one event loop."""

    def __init__(self, asking: Asking, listener: Listener | None = None) -> None:
        self.servers: dict[str, Watched] = {}
        self._asking, self._listener = asking, listener or Listener()
        self._moved = asyncio.Event()
        self._error: UserError | None = None
        self._before = self._retries_before = 0
        self._closing: set[asyncio.Task[None]] = set()

    def add(self, handle: ServerHandle) -> None:
        """Use a server from now on; one that is known stays as it is unless it is another process by now."""
        known = self.servers.get(handle.uuid)
        if known is not None and (known.handle.url == handle.url or known.handle.alive()):
            return
        if known is not None:
            self.leave(handle.uuid)
        self._error = None
        self.servers[handle.uuid] = Watched(handle, self._asking, self)
        self.servers[handle.uuid].start()

    @property
    def capacity(self) -> int:
        """Rows that all serving servers take together."""
        return self._asking.config.in_flight * sum(s.state == "serving" for s in self.servers.values())

    @property
    def tokens(self) -> int:
        """Tokens of good rows so far."""
        return self._before + sum(s.tokens for s in self.servers.values())

    @property
    def retries(self) -> int:
        """Repetitions so far."""
        return self._retries_before + sum(s.retries for s in self.servers.values())

    async def answer(self, request: Request) -> tuple[Result | Failure, Stamp]:
        """A row's answer or failure, and who gave it. Raises UserError when no server is left."""
        while True:
            server = self._freest()
            if server is None:
                if not self.servers:
                    raise self._error or UserError("No SGLang server is there to answer.")
                self._moved.clear()
                await self._moved.wait()
                continue
            try:
                return await server.ask(request)
            except Interrupted:
                continue

    def _freest(self) -> Watched | None:
        most = self._asking.config.in_flight
        free = [s for s in self.servers.values() if s.state == "serving" and s.flying < most]
        return min(free, key=lambda s: s.flying, default=None)

    async def confirm(self, stamps: Iterable[Stamp]) -> None:
        """Have canaries vouch for rows; those of a server that turns sick are voided before this returns.

        Rows of earlier eras stand: their servers ended or were restarted without being found sick.
        """
        latest: dict[str, Stamp] = {}
        for stamp in stamps:
            if stamp.era not in latest or latest[stamp.era].span < stamp.span:
                latest[stamp.era] = stamp
        serving = [(s, stamp) for stamp in latest.values() for s in self.servers.values() if s.serves(stamp.era)]
        await asyncio.gather(*(server.confirm(stamp.span) for server, stamp in serving))

    def describe(self) -> list[dict[str, Any]]:
        """The servers for a heartbeat."""
        return [server.describe() for server in self.servers.values()]

    def leave(self, uuid: str) -> None:
        """Ask a server nothing more; its rows in flight are asked elsewhere."""
        closing = asyncio.create_task(self._forget(uuid).close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Leave all servers; their rows in flight are aborted."""
        for uuid in list(self.servers):
            self.leave(uuid)
        await asyncio.gather(*self._closing)

    def _forget(self, uuid: str) -> Watched:
        server = self.servers.pop(uuid)
        self._before += server.tokens
        self._retries_before += server.retries
        return server

    # Events of the servers -------------------------------------------------------------------------------------------

    def voided(self, era: str, span: int) -> None:
        """Pass on."""
        self._listener.voided(era, span)

    def changed(self) -> None:
        """Wake whoever waits for a place."""
        self._moved.set()
        self._listener.changed()

    def lost(self, server: Watched, error: UserError | None) -> None:
        """Do without the server."""
        uuid = server.handle.uuid
        if self.servers.get(uuid) is server:
            self.leave(uuid)
        self._error = error or self._error
        self._listener.lost(uuid, error)
        self.changed()

    def wanted(self, server: Watched) -> bool:
        """Whether the pool's user still wants it."""
        return self._listener.wanted(server.handle.uuid)
