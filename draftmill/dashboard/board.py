"""The board: one thread that looks at the store again and again, and what it saw last.

Pages read the last view and never the store, so a store that is slow or away delays nobody: the view stays, and the
problem is told with the time since when. While nobody looks at the board, it looks at the store seldom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from draftmill.dashboard.history import History
from draftmill.dashboard.wire import to_bytes
from draftmill.errors import UserError
from draftmill.state.jobs import Picture, picture_of
from draftmill.state.read import Reader, Snapshot
from draftmill.state.state import state_from, state_of
from draftmill.state.types import State
from draftmill.store.base import ObjectInfo

LOCAL_S, REMOTE_S = 1.0, 3.0
"""Pauses between two looks at a folder and at S3, where a listing is paid for."""
LOCAL_GLANCE_S, REMOTE_GLANCE_S = 0.3, 0.7
"""Pauses between two glances at the heartbeats of jobs at work, inside those."""
IDLE_S, WATCHED_S = 15.0, 40.0
"""The pause while nobody watches, and how long somebody who asked counts as watching."""
SILENT_S = 20.0
"""A look that takes longer is told as a problem."""
_BUSY_SHARE = 0.5
_PASSING = ("progress/", "claims/", "journal/")


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the store cannot be read, and since when (seconds since 1970 by this machine's clock)."""

    since: float
    message: str


class View:
    """What one look saw; its parts are computed when first asked for, each once."""

    def __init__(self, number: int, revision: int, snapshot: Snapshot, picture: Picture | None, state: State) -> None:
        self.number, self.revision = number, revision
        self.snapshot, self.picture, self.state = snapshot, picture, state
        self._parts: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def part(self, name: str, make: Callable[[View], Any]) -> bytes:
        """A part of the view as JSON."""
        with self._lock:
            if name not in self._parts:
                self._parts[name] = to_bytes(make(self))
            return self._parts[name]


class Board:
    """Looks at a store until it is closed."""

    def __init__(self, reader: Reader, *, remote: bool = False, clock: Callable[[], float] = time.time) -> None:
        self.reader = reader
        self.history = History()
        self._clock = clock
        self._pause, self._glance = (REMOTE_S, REMOTE_GLANCE_S) if remote else (LOCAL_S, LOCAL_GLANCE_S)
        self._view: View | None = None
        self._failed: Problem | None = None
        self._looking_since: float | None = None
        self._asked = clock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._stamp = 0
        self._thread = threading.Thread(target=self._run, name="board", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after the look that it is in; one that hangs is left behind."""
        self._stop.set()
        self._wake.set()

    @property
    def view(self) -> View | None:
        """The last view; None before the first one."""
        return self._view

    def problem(self) -> Problem | None:
        """Why the view is old, if it is."""
        since = self._looking_since
        if self._failed is None and since is not None and self._clock() - since > SILENT_S:
            return Problem(since, f"The store {self.reader.store.url} does not answer.")
        return self._failed

    def watched(self) -> None:
        """Somebody looks at the board."""
        idle = self._clock() - self._asked > WATCHED_S
        self._asked = self._clock()
        if idle:
            self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = self._clock()
            self._timed(self.look)
            took = self._clock() - began
            watched = began + took - self._asked <= WATCHED_S
            self._rest(max(self._pause, took * _BUSY_SHARE) if watched else IDLE_S, glance=watched)
            self._wake.clear()

    def _timed(self, work: Callable[[], None]) -> None:
        """Do what asks the store, so that a silence is noticed."""
        self._looking_since = self._clock()
        work()
        self._looking_since = None

    def _rest(self, pause: float, *, glance: bool) -> None:
        """Wait until the next look is due or somebody comes; with glances meanwhile, if they are wanted."""
        until, between = time.monotonic() + pause, self._glance if glance else pause
        while (left := until - time.monotonic()) > 0 and not self._wake.wait(min(left, between)):
            if left > between:
                began = time.monotonic()
                self._timed(self.glance)
                between = max(self._glance, time.monotonic() - began)

    def look(self) -> None:
        """Look once; what goes wrong becomes the problem."""
        try:
            snapshot = self.reader.snapshot()
            self._view = self._seen(snapshot)
            self._failed = None
        except Exception as error:  # whatever it is, the board must go on looking
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._failed = Problem(self._failed.since if self._failed else self._clock(), message)

    def glance(self) -> None:
        """Look at the heartbeats of jobs at work alone; whatever is wrong with the store is for the next look to say."""
        view = self._view
        if view is None or self._failed is not None:
            return
        try:
            newer = self.reader.newer(view.snapshot, self._clock())
            if newer is not None:
                self._view = self._seen(newer)
        except Exception:
            return

    def _seen(self, snapshot: Snapshot) -> View:
        if not snapshot.listing:
            again = "any more" if self._view is not None else "yet: start a build, or give another --store"
            raise UserError(f"The store {snapshot.url} holds nothing {again}.")
        now, before = self._clock(), self._view
        picture = picture_of(snapshot, now)
        state = state_from(picture) if picture is not None else state_of(snapshot, now)
        self.history.add(state.lanes, state.now)
        stamp = _stamp(snapshot.listing)
        changed = before is None or stamp != self._stamp
        self._stamp = stamp
        return View(
            (before.number if before else 0) + 1,
            (before.revision if before else 0) + changed,
            snapshot,
            picture,
            state,
        )


def _stamp(listing: Mapping[str, ObjectInfo]) -> int:
    """A number that changes when an object does that stays."""
    return hash(frozenset(info for key, info in listing.items() if not key.startswith(_PASSING)))
