"""One server under watch: rows are asked of it, its health is looked at, and it is brought back when it is sick.

A row in flight when the server turns sick or dies is interrupted, not failed: the pool asks it again, elsewhere or later,
and it loses none of its tries. Rows are stamped with the span of canaries they fell into. When the server turns sick,
everything since the last canary that was answered well is voided (`Events.voided`), because nobody can know since when
it had been so. A planned restart comes only behind a good canary. A server whose process merely died was not sick: its
rows stand, and those that were in flight are told (`Events.died`), because one of them may be why.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
import traceback
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from draftmill.config import SglangConfig
from draftmill.engines import sglang_api as api
from draftmill.engines.base import Failure, Key, Request, Result, Stamp
from draftmill.engines.chores import Chores
from draftmill.engines.sglang_api import FixedServer, ServerHandle
from draftmill.engines.sglang_health import Canary, Progress, Window
from draftmill.engines.sglang_wire import Wire
from draftmill.errors import UserError

T = TypeVar("T")
_TICK_S, _METRICS_S, _HOST_S, _WELL_S = 1.0, 15.0, 30.0, 2.0
_CANARY_TRIES = 3
_MOST_PAUSE_S = 30.0
# Failures of the row, which say nothing about the server.
_OWN = frozenset({"too_long", "refused"})


class Check(Protocol):
    """Turns a result that breaks a rule into its failure."""

    def __call__(self, request: Request, result: Result | Failure) -> Result | Failure:
        """The result, or the failure that it is."""
        ...


@dataclass(frozen=True, slots=True)
class Asking:
    """What all servers of a pool share: limits, ids that end an answer, the rules of a row, the canary's prompt.

    `longest` is the largest limit of a row in tokens.
    """

    config: SglangConfig
    stop_ids: tuple[int, ...]
    check: Check
    canary_ids: tuple[int, ...]
    longest: int

    def deadline(self, tokens: int) -> float:
        """Seconds that a row of at most so many tokens may take."""
        return self.config.row_seconds + self.config.token_seconds * tokens


class Events(Protocol):
    """Whom a server tells, inside the event loop."""

    def voided(self, era: str, span: int) -> None:
        """Rows of this era from this span on cannot be trusted."""
        ...

    def died(self, server: Watched) -> None:
        """The server went down, perhaps because of a row that is in flight (`Watched.rows`)."""
        ...

    def changed(self) -> None:
        """A place is free, or a server's state is another."""
        ...

    def lost(self, server: Watched, error: UserError | None) -> None:
        """The server is gone for good; without an error when nobody wanted it any more."""
        ...

    def wanted(self, server: Watched) -> bool:
        """Whether somebody still holds the server's place, so that it may be started again."""
        ...


@dataclass(frozen=True, slots=True)
class Wrong:
    """What is wrong with the answer to a canary; `cut` if there is none only because the connection broke."""

    words: str
    cut: bool


class Interrupted(Exception):
    """The server went away under a row, which is to be asked again."""


class Watched:
    """A server and its watch. `state`: starting, serving, draining, restarting or lost."""

    def __init__(self, handle: ServerHandle, asking: Asking, events: Events) -> None:
        self.handle, self.state = handle, "starting"
        self.rows: set[Key] = set()
        self.tokens = self.retries = 0
        self._asking, self._config, self._events = asking, asking.config, events
        self._wire: Wire | None = None
        self._era, self._span, self._good = "", 0, 0
        self._canary, self._canary_lock, self._canary_at = Canary(asking.canary_ids), asyncio.Lock(), 0.0
        self._window = Window(self._config.bad_window, self._config.max_bad)
        self._progress = Progress(time.monotonic())
        self._polled = self._weighed = 0.0
        self._drained_for = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._chores = Chores()

    # Life ------------------------------------------------------------------------------------------------------------

    @property
    def flying(self) -> int:
        """Rows in flight."""
        return len(self.rows)

    def start(self) -> None:
        """Open the server and watch it from now on."""
        self._chores.start(self._begin())

    async def close(self) -> None:
        """Leave the server as it is; what is in flight is aborted there and interrupted here."""
        self.state = "lost"
        ending = [task for task in (*self._chores, *self._tasks) if task is not asyncio.current_task()]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if self._wire is not None:
            await self._wire.close()

    def describe(self) -> dict[str, Any]:
        """The server for a heartbeat."""
        return {"uuid": self.handle.uuid, "url": self.handle.url, "state": self.state, "epoch": self.handle.epoch}

    async def _begin(self) -> None:
        with self._failing():
            # A lane that has died since may have asked for its restart.
            self.handle = await asyncio.to_thread(self.handle.loaded)
            if not await self._open():
                await self._bring_back("it did not answer the first canary", self._config.patience_seconds)
            self._serve()
        self._chores.start(self._watch())

    def _serve(self) -> None:
        self.state = "serving"
        self._progress.mark(time.monotonic())
        self._events.changed()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self._give_up(error)
        except Exception as fault:
            traceback.print_exc()
            self._give_up(
                UserError(
                    f"The SGLang server {self.handle.url} was given up because of a fault in draftmill "
                    f"({type(fault).__name__}: {fault}); the log of the lane has all of it: give the same command again, "
                    "what was generated is kept."
                )
            )

    def _give_up(self, error: UserError | None) -> None:
        self.state = "lost"
        self._events.lost(self, error)

    async def _open(self) -> bool:
        """Begin a new era; whether its first canary was good."""
        if self._wire is not None:
            await self._wire.close()
        self._wire, self._era, self._span, self._good = Wire(self.handle.url), secrets.token_hex(6), 0, 0
        self._window.clear()
        self._progress = Progress(time.monotonic())
        return await self._sing(self._config.stall_seconds) is None

    # Rows ------------------------------------------------------------------------------------------------------------

    async def ask(self, request: Request) -> tuple[Result | Failure, Stamp]:
        """A row that keeps the rules, or its failure after all repetitions. Raises Interrupted if the server went away."""
        self.rows.add(request.key)
        try:
            return await self._interruptible(self._ask(request))
        finally:
            self.rows.discard(request.key)
            self._events.changed()

    async def _interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise Interrupted from None
        finally:
            self._tasks.discard(task)

    async def _ask(self, request: Request) -> tuple[Result | Failure, Stamp]:
        deadline = self._asking.deadline(request.sampling.max_new_tokens)
        for repetition in range(self._config.retries + 1):
            outcome = self._asking.check(request, await self._send(request, deadline))
            if isinstance(outcome, Result):
                self.tokens += len(outcome.output_ids)
                self._progress.mark(time.monotonic())
            await self._judge(outcome)
            if isinstance(outcome, Result) or outcome.reason not in api.TRANSIENT:
                break
            if repetition < self._config.retries:
                self.retries += 1
                await asyncio.sleep(pause(self._config.backoff_seconds, repetition))
        return outcome, Stamp(self.handle.uuid, self.handle.epoch, self._era, self._span)

    async def _send(self, request: Request, deadline_s: float) -> Result | Failure:
        assert self._wire is not None
        body = api.body(request, self._asking.stop_ids, secrets.token_hex(16))
        return await self._wire.generate(request.key, body, deadline_s)

    async def _judge(self, outcome: Result | Failure) -> None:
        """Count a row for or against the server; does not return if that makes it sick or shows it dead."""
        fault = outcome.reason if isinstance(outcome, Failure) else ""
        if fault == "connection" and await self._dead():
            self.fall("it does not answer", sick=False, died=True)
            await asyncio.sleep(0)
        if fault in _OWN:
            return
        self._window.add(fault)
        if verdict := self._window.due():
            self.fall(verdict, sick=True, died=False)
            await asyncio.sleep(0)

    async def _dead(self) -> bool:
        return not (self.handle.alive() and await self._reachable())

    async def _reachable(self) -> bool:
        assert self._wire is not None
        return await self._wire.reachable()

    # Health ----------------------------------------------------------------------------------------------------------

    async def confirm(self, span: int) -> bool:
        """Whether a canary sent after the rows of `span` was good; False if the server fell meanwhile."""
        async with self._canary_lock:
            if self._good > span:
                return True
            try:
                # It waits behind the rows in the server's queue, so it has their time; _look() sees a standstill.
                wrong = await self._interruptible(self._sing(self._asking.deadline(self._asking.longest)))
            except Interrupted:
                return False
            if wrong is not None:
                died = await self._dead()
                # A death under the canary says as little of the rows before it as a death under a row.
                self.fall(wrong.words, sick=not (died and wrong.cut), died=died)
            return wrong is None

    def serves(self, era: str) -> bool:
        """Whether rows of this era may still turn out bad."""
        return era == self._era and self.state in ("serving", "draining")

    async def _sing(self, deadline_s: float) -> Wrong | None:
        """Ask the canary; what is wrong with its answer, or None if nothing is."""
        self._span += 1
        sent, wrong = self._span, None
        for number in range(_CANARY_TRIES):
            outcome = await self._send(self._canary.request, deadline_s)
            if isinstance(outcome, Failure):
                cut = outcome.reason == "connection"
                words = f"it did not answer the canary ({outcome.reason}: {outcome.detail})"
                wrong = Wrong(words, cut and number == 0)
                if cut:
                    break
                continue
            self._progress.mark(time.monotonic())
            if self._canary.agrees(outcome.output_ids):
                self._good, self._canary_at = sent, time.monotonic()
                return None
            wrong = Wrong("it answers the canary with other tokens than at first", cut=False)
        return wrong

    async def _watch(self) -> None:
        tick = min(_TICK_S, self._config.stall_seconds / 4)
        while self.state != "lost":
            await asyncio.sleep(tick)
            if self.state in ("serving", "draining"):
                with self._failing():
                    await self._look()

    async def _look(self) -> None:
        now = time.monotonic()
        if not self.handle.alive():
            return self.fall("its process has ended", sick=False, died=True)
        if not self.flying and not self._canary_lock.locked():
            self._progress.mark(now)
        still, look = self._progress.still(now), min(_METRICS_S, self._config.stall_seconds / 4)
        if still > self._config.stall_seconds:
            return self.fall(f"it decoded no token for {still:.0f} s", sick=True, died=True)
        if still > look and now - self._polled > look:
            self._polled = now
            self._progress.count(await self._decoded(), time.monotonic())
        # Without metrics a canary shows as well that tokens move, however long the rows are.
        due = now - self._canary_at > self._config.canary_minutes * 60 or still > self._config.stall_seconds / 2
        if self.flying and due and not self._canary_lock.locked():
            self._chores.start(self._confirm_now())
        if self.state == "serving" and (reason := await self._old(now)) and self.state == "serving":
            self.state, self._drained_for = "draining", reason
        if self.state == "draining" and self._drained_for and not self.flying:
            reason, self._drained_for = self._drained_for, ""
            self._chores.start(self._renew(reason))

    async def _decoded(self) -> float | None:
        assert self._wire is not None
        return await self._wire.decoded_tokens()

    async def _confirm_now(self) -> None:
        await self.confirm(self._span)

    async def _old(self, now: float) -> str:
        """Why the server should be started again although it is well, or ""."""
        if isinstance(self.handle, FixedServer):
            return ""
        hours, most = self._config.restart_hours, self._config.restart_host_gib
        if now - self._weighed < _HOST_S:
            return ""
        self._weighed = now
        began, held = await asyncio.to_thread(lambda: (self.handle.began, self.handle.host_bytes))
        if hours is not None and began and time.time() - began > hours * 3600:
            return f"planned after {hours:g} hours"
        over = most is not None and held > most * 2**30
        return f"its processes hold {held / 2**30:.1f} GiB of host memory" if over else ""

    async def _renew(self, reason: str) -> None:
        """A planned restart of a drained server: behind a good canary, so that its rows stand; it begins a new epoch."""
        with self._failing():
            if await self.confirm(self._span):
                self.state = "restarting"
                await self._recover(reason)

    def fall(self, reason: str, *, sick: bool, died: bool) -> None:
        """The server cannot go on: interrupt its rows, void what nobody vouches for, and bring it back.

        `died`: it went down, perhaps because of a row in flight.
        """
        if self.state not in ("serving", "draining"):
            return
        self.state = "restarting"
        print(f"server {self.handle.url} epoch {self.handle.epoch}: {reason}", flush=True)
        if sick:
            self._events.voided(self._era, self._good)
        if died:
            self._events.died(self)
        for task in self._tasks:
            task.cancel()
        self._chores.start(self._recover(reason))

    async def _recover(self, reason: str) -> None:
        if not self._events.wanted(self):
            return self._give_up(None)
        with self._failing():
            await self._bring_back(reason, self._config.patience_seconds)
            self._serve()

    async def _bring_back(self, reason: str, patience_s: float) -> None:
        """Restart a server of ours until it sings, wait for another's. Raises UserError when that does not help."""
        end = time.monotonic() + patience_s
        fixed = isinstance(self.handle, FixedServer)
        while True:
            if not fixed or time.monotonic() >= end:
                self.handle = await asyncio.to_thread(self.handle.restart, reason)
            else:
                await asyncio.sleep(min(_WELL_S, patience_s / 4))
            if await self._open():
                return
            reason = reason if fixed else "it did not answer the canary as before after its restart"


def pause(first_s: float, repetition: int) -> float:
    """Seconds to wait before a repetition: doubling, capped, and spread so that rows do not come back all at once."""
    longest: float = min(first_s * 2**repetition, _MOST_PAUSE_S)
    return longest * random.uniform(0.5, 1.0)
