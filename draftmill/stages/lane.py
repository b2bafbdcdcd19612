"""The lane: one process a build that asks the servers, so that no server waits between two shards.

Snakemake runs one job a GPU, and a shard's last rows take long: a server that had only one shard's rows would run half
empty at the end of each, and idle while the next job starts. A job that sent rows of the next shard as well would have
to wait for them or throw them away when its own shard is done. So jobs send nothing. They hand their shard, and the
shards that are planned behind it, to the lane, which outlives them, and wait until their shard's journal is full. The
lane keeps every server full: first with rows of shards that jobs wait for, then with rows of coming shards, up to a
bound. A job that starts later finds most of its rows answered. The bound is one of time: however fast the servers are, the
seconds between two jobs must not drain them.

One lane has all servers of the build on this host. So no row is asked twice on one host, a server that falls is made up
for by the others, and shards are finished one after another. A lane that is killed costs what it had not flushed: the
jobs start another. Results go to the journal of their shard under their key, and a shard is handed over only when a
canary behind its last row was good (rows.py, engines/sglang_watch.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftmill.config import GenerateConfig
from draftmill.engines.base import Result, Stamp
from draftmill.engines.chores import Chores
from draftmill.engines.sglang_api import ServerHandle
from draftmill.engines.sglang_pool import Listener, Pool, Rate
from draftmill.engines.sglang_watch import Asking
from draftmill.errors import UserError
from draftmill.stages.lane_shard import LaneShard, Loaded
from draftmill.stages.lane_watch import Look, Timeline
from draftmill.stages.rows import Asked

_BEAT_S, _FLUSH_LOOK_S, _LOOK_S, _AGAIN_S = 1.0, 0.25, 1.0, 5.0
# What is taken ahead and what is read before it is needed, in seconds of the servers' rate, and at least so many times
# what they take at once.
_AHEAD_S, _AHEAD_LOADS = 120.0, 8
_READ_S, _READ_LOADS = 30.0, 2


# Reads a shard and its journal, off the event loop, and whether it is a coming one; None if there is nothing to do.
Load = Callable[[str, bool], Loaded | None]
# Publishes a shard from its journal, off the event loop: its name, and what the job says about its outputs.
Write = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Order:
    """What a job asks of the lane: its shard, the shards planned behind it, the servers that it brings, and its outputs."""

    shard: str
    ahead: Sequence[str]
    servers: Sequence[Mapping[str, Any]]
    outputs: Mapping[str, Any] = field(default_factory=dict)


async def _beating(work: asyncio.Task[Any]) -> AsyncIterator[None]:
    """Gives None at least every beat until `work` has ended, well or not; it is cancelled if nobody listens any more."""
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=_BEAT_S)
            if not work.done():
                yield None
    finally:
        work.cancel()


class Lane:
    """Keeps the servers full with rows of the shards that it is given."""

    def __init__(
        self,
        config: GenerateConfig,
        asking: Asking,
        load: Load,
        attach: Callable[[Any], ServerHandle],
        write: Write = lambda shard, outputs: None,
    ) -> None:
        self._config, self._load, self._attach_server, self._write_shard = config, load, attach, write
        listener = Listener(self._voided, self._wake_up, self._lost, self._wanted)
        self.pool = Pool(asking, listener)
        self._shards: dict[str, LaneShard] = {}
        self._plan: list[str] = []
        self._over: set[str] = set()
        self._voids: dict[str, int] = {}
        self._users: dict[str, int] = {}
        self._errors: dict[str, UserError] = {}
        self._wake, self._hunger = asyncio.Event(), asyncio.Event()
        self._chores = Chores()
        self._flying, self._answered, self._rate = 0, 0, Rate()
        self._reading = ""
        self.timeline = Timeline()
        self.idle_since = time.monotonic()

    # Jobs ------------------------------------------------------------------------------------------------------------

    async def serve(self, order: Order) -> AsyncGenerator[dict[str, Any], None]:
        """Work on a job's shard; gives a beat at least every second and ends when the shard's outputs are written.

        A beat is {"waiting": true} until the shard is read. Raises UserError when the job's server is lost, and what
        reading the shard or writing its journal raises.
        """
        handles = [await asyncio.to_thread(self._attach_server, server) for server in order.servers]
        uuids = [handle.uuid for handle in handles]
        for handle in handles:
            self._users[handle.uuid] = self._users.get(handle.uuid, 0) + 1
            self._errors.pop(handle.uuid, None)
            self.pool.add(handle)
        try:
            taking = asyncio.create_task(self._take(order))
            async for _ in _beating(taking):
                yield {"waiting": True}
            shard = await taking
            job = object()
            shard.begun = True
            shard.jobs.add(job)
            self._wake_up()
            try:
                last: dict[str, Any] = {}
                async for last in self._follow(shard, uuids):
                    yield last
                async for beat in self._finish(shard, order.outputs, last):
                    yield beat
            finally:
                shard.jobs.discard(job)
        finally:
            for uuid in uuids:
                self._users[uuid] -= 1
            self.idle_since = time.monotonic()

    async def _take(self, order: Order) -> LaneShard:
        """The shard as its journal has it now: what was in memory counts only if it is in the journal."""
        self._plan = [name for name in order.ahead if name != order.shard]
        if order.shard not in self._shards:
            loaded = await self._read(order.shard)
            # It may have been begun ahead, for another job's plan, while it was read.
            if order.shard not in self._shards:
                return self._enter(order.shard, loaded)
        known = self._shards[order.shard]
        async with known.writing:
            await known.write()
            loaded = await self._read(order.shard)
            # Rows that landed meanwhile are in neither.
            loaded.ledger.absorb(known.ledger.take())
            shard = self._enter(order.shard, loaded)
        shard.jobs = known.jobs
        if known.begun and not known.jobs:
            # An earlier job's rows took time that is not this one's.
            shard.resumed, shard.tokens = shard.taken - len(shard.flying), 0
        else:
            shard.tokens = known.tokens
        return shard

    async def _read(self, name: str) -> Loaded:
        loaded = await asyncio.to_thread(self._load, name, False)
        if loaded is None:
            raise UserError(f"The prompts of shard {name} are not in the store: run `draftmill index`.")
        return loaded

    def _enter(self, name: str, loaded: Loaded) -> LaneShard:
        shard = LaneShard(name, {asked.key: asked for asked in loaded.asked}, loaded.ledger)
        known = self._shards.get(name)
        shard.flying = known.flying if known else set()
        shard.refill()
        shard.resumed = known.resumed if known else shard.taken
        self._shards[name] = shard
        self._over.discard(name)
        return shard

    async def _follow(self, shard: LaneShard, uuids: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
        start = (time.monotonic(), self.pool.tokens, len(shard.ledger.answers))
        while True:
            for uuid in uuids:
                if uuid in self._errors:
                    raise self._errors[uuid]
            yield self._beat(shard, start)
            if shard.finished:
                handing_over = asyncio.create_task(self._hand_over(shard))
                async for _ in _beating(handing_over):
                    yield self._beat(shard, start)
                if await handing_over:
                    yield self._beat(shard, start)
                    return
            shard.moved.clear()
            try:
                await asyncio.wait_for(shard.moved.wait(), _BEAT_S)
            except TimeoutError:
                continue

    async def _finish(
        self, shard: LaneShard, outputs: Mapping[str, Any], beat: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        writing = asyncio.create_task(asyncio.to_thread(self._write_shard, shard.name, outputs))
        async for _ in _beating(writing):
            yield {**beat, "servers": self.pool.describe()}
        await writing

    async def _hand_over(self, shard: LaneShard) -> bool:
        """Whether the shard stands after its servers' canaries; then it is in the journal and leaves the lane."""
        await self.pool.confirm(list(shard.ledger.stamps()))
        await shard.flush()
        if not shard.finished:
            return False
        if self._shards.get(shard.name) is shard:
            del self._shards[shard.name]
        self._over.add(shard.name)
        return True

    def _beat(self, shard: LaneShard, start: tuple[float, int, int]) -> dict[str, Any]:
        ledger, jobs = shard.ledger, max(sum(len(s.jobs) for s in self._shards.values()), 1)
        began, tokens, found = start
        seconds = max(time.monotonic() - began, 1e-3)
        rejected = sum(1 for key in shard.rows if key not in ledger.answers and ledger.next_attempt(key) is None)
        return {
            "total": len(shard.rows),
            "done": len(ledger.answers) + rejected,
            "useful": len(ledger.answers),
            "rejected": rejected,
            "resumed": shard.resumed,
            "found": found,
            "tokens": shard.tokens,
            "failures": len(ledger.failures),
            "retries": self.pool.retries,
            "tokens_1m": round(self._rate.sample(self.pool.tokens) / jobs, 3),
            "tokens_per_second": round((self.pool.tokens - tokens) / seconds / jobs, 3),
            "servers": self.pool.describe(),
            "lane": {"in_flight": self._flying, "places": self.pool.capacity, "ahead": self._ahead()},
        }

    # Rows ------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Send rows and flush journals until cancelled."""
        async with asyncio.TaskGroup() as group:
            for work in (self._send(), self._prepare(), self._keep(), self._account()):
                group.create_task(work)

    async def close(self) -> None:
        """Flush everything and leave the servers."""
        for task in self._chores:
            task.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await asyncio.gather(*(shard.flush() for shard in self._shards.values()), return_exceptions=True)
        await self.pool.close()

    async def _send(self) -> None:
        while True:
            self._wake.clear()
            while self._flying < self.pool.capacity and (found := self._next()) is not None:
                self._start(*found)
            await self._wake.wait()

    def _next(self) -> tuple[LaneShard, Asked] | None:
        """The next row: of the shards that jobs wait for, in the order they came, then of those that come."""
        if (urgent := self._next_of_jobs()) is not None:
            return urgent, urgent.todo.popleft()
        if self._ahead() >= self._most_ahead():
            return None
        coming = (shard for shard in self._shards.values() if not shard.jobs and shard.todo)
        return next(((shard, shard.todo.popleft()) for shard in coming), None)

    def _next_of_jobs(self) -> LaneShard | None:
        return next((shard for shard in self._shards.values() if shard.jobs and shard.todo), None)

    def _ahead(self) -> int:
        return sum(shard.taken for shard in self._shards.values() if not shard.jobs)

    def _most_ahead(self) -> int:
        """The bound of rows ahead: a configured one, or two minutes of what the servers do."""
        fixed = self._config.sglang.ahead_rows
        if fixed is not None:
            return fixed
        return max(_AHEAD_LOADS * self.pool.capacity, int(_AHEAD_S * self.timeline.rate()))

    def _start(self, shard: LaneShard, asked: Asked) -> None:
        self._flying += 1
        shard.flying.add(asked.key)
        self._chores.start(self._answer(shard.name, asked))

    async def _answer(self, name: str, asked: Asked) -> None:
        ledger = self._shards[name].ledger
        attempt = ledger.next_attempt(asked.key)
        try:
            if attempt is None:
                return
            outcome, stamp = await self.pool.answer(asked.request(self._config.seed, attempt))
            shard = self._shards.get(name)
            if shard is not None and not self._is_void(stamp):
                shard.ledger.note(outcome, attempt, stamp)
                self._answered += 1
                shard.tokens += len(outcome.output_ids) if isinstance(outcome, Result) else 0
                self._flush_if_due(shard)
        except UserError:
            pass  # no server is left: the jobs that brought them are told, and the row waits for another
        finally:
            self._flying -= 1
            self._landed(name, asked)

    def _landed(self, name: str, asked: Asked) -> None:
        shard = self._shards.get(name)
        if shard is None:
            return
        shard.flying.discard(asked.key)
        if shard.ledger.next_attempt(asked.key) is not None:
            shard.todo.appendleft(asked)
        if shard.finished:
            shard.moved.set()
        self._wake_up()

    def _is_void(self, stamp: Stamp) -> bool:
        return stamp.era in self._voids and stamp.span >= self._voids[stamp.era]

    # Coming shards ---------------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Read coming shards before their rows are needed."""
        while True:
            self._hunger.clear()
            while self._hungry() and (name := self._next_coming()) is not None:
                await self._read_ahead(name)
            await self._hunger.wait()

    def _next_coming(self) -> str | None:
        return next((n for n in self._plan if n not in self._shards and n not in self._over), None)

    def _hungry(self) -> bool:
        enough = max(_READ_LOADS * self.pool.capacity, int(_READ_S * self.timeline.rate()), 1)
        return self._unsent() < enough and self._ahead() < self._most_ahead()

    def _unsent(self) -> int:
        return sum(len(shard.todo) for shard in self._shards.values())

    async def _read_ahead(self, name: str) -> None:
        self._reading = name
        try:
            loaded = await asyncio.to_thread(self._load, name, True)
        except (UserError, OSError) as error:
            print(f"shard {name} is not begun ahead: {error}", flush=True)
            loaded = None
        finally:
            self._reading = ""
        if loaded is None:
            self._over.add(name)
        elif name not in self._shards:
            self._enter(name, loaded)
            self._wake_up()

    # Account ---------------------------------------------------------------------------------------------------------

    async def _account(self) -> None:
        """Say in the log how full the servers are, and why not."""
        while True:
            due = time.monotonic() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            look = Look(
                self._flying, self.pool.capacity, self._ahead(), self._unsent(), self._answered, self._shortage()
            )
            if (line := self.timeline.note(look, time.monotonic() - due)) is not None:
                print(line, flush=True)

    def _shortage(self) -> str:
        """Why a place of a server would be empty now."""
        if self._unsent():
            return "enough ahead" if self._next_of_jobs() is None else "waking"
        if self._reading:
            return "reading a shard"
        return "nothing planned" if self._next_coming() is None else "not read"

    # Journals --------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Flush what is due; writing is off the event loop, one segment of a shard at a time."""
        while True:
            await asyncio.sleep(_FLUSH_LOOK_S)
            for shard in list(self._shards.values()):
                self._flush_if_due(shard)

    def _flush_if_due(self, shard: LaneShard) -> None:
        if shard.ledger.due() and not shard.writing.locked():
            self._chores.start(self._flush_or_tell(shard))

    async def _flush_or_tell(self, shard: LaneShard) -> None:
        try:
            await shard.flush()
        except (UserError, OSError) as error:
            print(f"shard {shard.name}: the journal could not be written and is tried again: {error}", flush=True)
            # Each row that lands would try again otherwise.
            async with shard.writing:
                await asyncio.sleep(_AGAIN_S)

    # Servers ---------------------------------------------------------------------------------------------------------

    def _voided(self, era: str, span: int) -> None:
        self._voids[era] = min(span, self._voids.get(era, span))
        for shard in self._shards.values():
            gone = shard.ledger.void(era, span)
            if gone:
                print(f"shard {shard.name}: {gone} rows since the last good canary are done again", flush=True)
                shard.refill()
                self._chores.start(self._flush_or_tell(shard))
        self._wake_up()

    def _wake_up(self) -> None:
        self._wake.set()
        self._hunger.set()

    def _lost(self, uuid: str, error: UserError | None) -> None:
        if error is not None:
            self._errors[uuid] = error
        for shard in self._shards.values():
            shard.moved.set()

    def _wanted(self, uuid: str) -> bool:
        return self._users.get(uuid, 0) > 0
