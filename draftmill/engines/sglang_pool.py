"""Servers that answer together: each row goes to the one with the fewest in flight, and an interrupted row goes again.

A pool never refuses a row because a server is down: it waits for one to serve. Only when the last server is lost do the
rows fail, with the error that lost it. Rows whose server died under them go out again with care (sglang_suspects.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from draftmill.engines.base import Failure, Key, Request, Result, Stamp
from draftmill.engines.sglang_api import ServerHandle
from draftmill.engines.sglang_suspects import Suspects
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
        self._moved, self._suspects = asyncio.Event(), Suspects(asking.config.in_flight)
        self._error: UserError | None = None
        self._before = self._retries_before = 0
        self._closing: set[asyncio.Task[None]] = set()

    def add(self, handle: ServerHandle) -> None:
        """Use a server from now on; one that is known stays as it is unless it is another process by now."""
        known = self.servers.get(handle.uuid)
        # The port says nothing: a new keeper takes the lowest that is free, which may be its predecessor's.
        same = known is not None and (known.handle.url, known.handle.epoch) == (handle.url, handle.epoch)
        if known is not None and (same or known.handle.alive()):
            return
        if known is not None:
            self.leave(handle.uuid)
        self._error = None
        self.servers[handle.uuid] = Watched(handle, self._asking, self)
        self.servers[handle.uuid].start()

    @property
    def capacity(self) -> int:
        """Rows that are of use now: what the serving servers take together, and those that wait as suspects."""
        most, reserved = self._asking.config.in_flight, self._suspects.reserved
        serving = (s for s in self.servers.values() if s.state == "serving")
        return sum(s.flying if s is reserved else most for s in serving) + self._suspects.held

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
            server = await self._place(request.key)
            try:
                if (refused := self._suspects.refusal(request.key)) is not None:
                    # Of no era: a canary has no say in it.
                    return refused, Stamp(server.handle.uuid, server.handle.epoch, "", 0)
                found = await server.ask(request)
                self._suspects.acquit(request.key)
                return found
            except Interrupted:
                continue
            finally:
                if self._suspects.landed(request.key):
                    self.changed()

    async def _place(self, key: Key) -> Watched:
        """Wait for a server that takes the row now."""
        while self.servers:
            if key in self._suspects:
                server = await self._suspects.place(key, self.servers.values())
                if server is not None and server.state == "serving":
                    return server
                # It went down after the row was let out.
                self._suspects.landed(key)
            elif (server := self._freest()) is not None:
                return server
            else:
                self._moved.clear()
                await self._moved.wait()
        raise self._error or UserError("No SGLang server is there to answer.")

    def _freest(self) -> Watched | None:
        most, suspects = self._asking.config.in_flight, self._suspects
        serving = (s for s in self.servers.values() if s.state == "serving" and s is not suspects.reserved)
        return min((s for s in serving if suspects.load(s) < most), key=suspects.load, default=None)

    async def confirm(self, stamps: Iterable[Stamp]) -> None:
        """Have canaries vouch for rows; those of a server that turns sick are voided before this returns.

        Rows of earlier eras stand: a canary vouched for them before a planned restart, or their server died, which is no
        sign that it was sick before.
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

    def died(self, server: Watched) -> None:
        """Suspect the rows that were in flight at the server."""
        self._suspects.died(server)

    def changed(self) -> None:
        """Wake whoever waits for a place."""
        self._suspects.admit(self.servers.values())
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
