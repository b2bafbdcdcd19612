"""Rows that were in flight when their server died, and how they go out again, so that one that kills servers is found.

A row that its server dies of looks like any other until it is asked alone. Every row in flight at a death is a suspect
from then on. Suspects go out in groups that shrink to an eighth with each death they were in, the most suspect first,
and all to one server, so that the others go on with rows that never met a death. A first group has fresh rows beside
it, because most deaths come from outside and must cost no throughput. Later groups have the server to themselves. A row is
refused when it has met `REFUSED_AFTER` deaths and was alone at the last, and with it the other samples of its prompt; a
row that is answered is a suspect no more.

Of 512 in flight, one such row is found by five deaths (512, 64, 8, 1, 1), which one server's restarts allow. A server that
is killed from outside again and again would have to be killed four times more under the same row to have it refused.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from draftmill.engines.base import Failure, Key
from draftmill.engines.sglang_watch import Watched

# One fewer than the restarts that a server has in an hour by default.
REFUSED_AFTER = 5
_SHRINKS_BITS, _ALONE_FROM = 3, 2


@dataclass(slots=True)
class _Held:
    rank: tuple[int, int]
    key: Key
    go: asyncio.Future[Watched | None]

    def __lt__(self, other: _Held) -> bool:
        return self.rank < other.rank


class Suspects:
    """Deaths of servers by row, the suspects that wait, and those that are out at the one server that takes them."""

    def __init__(self, in_flight: int) -> None:
        """`in_flight` is how many rows a server takes at once."""
        self.held = 0
        self._in_flight = in_flight
        self._deaths: Counter[Key] = Counter()
        self._guilty: dict[str, int] = {}
        self._waiting: list[_Held] = []
        self._out: set[Key] = set()
        self._server: Watched | None = None
        self._turn = itertools.count()

    def __contains__(self, key: Key) -> bool:
        """Whether a row has to wait for its place here."""
        return key in self._deaths

    @property
    def reserved(self) -> Watched | None:
        """The server that takes suspects and nothing else now."""
        first = self._first()
        keys = self._out if first is None else {*self._out, first.key}
        return self._server if any(self._deaths[key] >= _ALONE_FROM for key in keys) else None

    def load(self, server: Watched) -> int:
        """Rows in flight at a server, and those let out to it that are not there yet."""
        return len(self._out | server.rows) if server is self._server else server.flying

    def died(self, server: Watched) -> None:
        """Count a death for every row that was in flight at the server."""
        self._deaths.update(server.rows)
        if len(server.rows) == 1:
            (row,) = server.rows
            if self._deaths[row] >= REFUSED_AFTER:
                self._guilty[row[0]] = self._deaths[row]

    def refusal(self, key: Key) -> Failure | None:
        """The end of a row of whose prompt servers die; None as long as it may be asked."""
        if (deaths := self._guilty.get(key[0])) is None:
            return None
        self.acquit(key)
        return Failure(
            key, "server_death", f"servers died {deaths} times under it, at last with nothing else in flight"
        )

    def acquit(self, key: Key) -> None:
        """The row is over."""
        self._deaths.pop(key, None)

    async def place(self, key: Key, servers: Collection[Watched]) -> Watched | None:
        """Wait for the row's turn; the server that has a place for it, or None when there is no server any more."""
        waiting = _Held((-self._deaths[key], next(self._turn)), key, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, waiting)
        self.held += 1
        self.admit(servers)
        try:
            return await waiting.go
        except asyncio.CancelledError:
            self.held -= waiting.go.cancelled()
            self.landed(key)
            raise

    def landed(self, key: Key) -> bool:
        """The row has left its server; whether it was out as a suspect."""
        was_out = key in self._out
        self._out.discard(key)
        return was_out

    def admit(self, servers: Collection[Watched]) -> None:
        """Let out as many as may go. To be called whenever a server's state or number of rows has changed."""
        while (first := self._first()) is not None:
            server = self._room_for(first.key, servers)
            if server is None and servers:
                return
            heapq.heappop(self._waiting)
            self.held -= 1
            if server is not None:
                self._out.add(first.key)
            first.go.set_result(server)

    def _first(self) -> _Held | None:
        while self._waiting and self._waiting[0].go.done():
            heapq.heappop(self._waiting)
        return self._waiting[0] if self._waiting else None

    def _room_for(self, key: Key, servers: Collection[Watched]) -> Watched | None:
        most = max(self._deaths[other] for other in {*self._out, key})
        if len(self._out) >= max(1, self._in_flight >> _SHRINKS_BITS * most):
            return None
        alone = most >= _ALONE_FROM
        server = self._choose(servers, alone)
        if server is None or server.state != "serving" or self.load(server) >= self._in_flight:
            return None
        return None if alone and server.rows - self._out else server

    def _choose(self, servers: Collection[Watched], alone: bool) -> Watched | None:
        """All that are out have one server; a new group may have another."""
        if self._out or (alone and self._server in servers):
            return self._server if self._server in servers else None
        # One that is just being started again has no rows to wait for.
        able = servers if alone else [s for s in servers if s.state == "serving"]
        self._server = min(able, key=lambda s: s.flying, default=None)
        return self._server
