"""Heartbeats: what a job is doing right now, for people and for the readers of the store.

One JSON object a job, replaced every few seconds while the job gets on: a job that hangs is told by its silence, and that
it lives by its claim. It may hold times, rates and hosts, because it is no output: outputs
are functions of their inputs. On a terminal the same numbers are a bar, elsewhere a plain line now and then.

A heartbeat must never cost work: it is written by a thread of its own, the newest wins, and a store that is slow or away
is passed over until the next one.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftmill.canonical import canonical_json
from draftmill.store.base import Store

_BEAT_SECONDS = 2.0
_LINE_SECONDS = 10.0
_MINUTE_S = 60.0
# How long a job that has ended waits for its last word to be written.
_LAST_WORD_S = 10.0
_ERROR = 500
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Heartbeat:
    """Counts the units of one job and tells the store and the person. Use as a context manager."""

    def __init__(
        self,
        store: Store,
        key: str,
        *,
        stage: str,
        name: str,
        total: int,
        unit: str = "rows",
        clock: Callable[[], float] = time.time,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """`key` is the heartbeat's place in the store, `total` the number of units, `facts` further fields of it."""
        self._clock, self._writer = clock, _Writer(store, key)
        self._total, self._label, self._unit = total, f"{stage} {name}", unit
        self._started = self._beat = self._line = clock()
        self._fields: dict[str, Any] = {"stage": stage, "name": name, "unit": unit, "total": total}
        self._facts: dict[str, Any] = dict(facts or {})
        self.done, self.tokens, self._resumed = 0, 0, 0
        self._minute = deque([(self._started, 0)])
        self._bar = _bar() if sys.stderr.isatty() else None
        self._failed = False

    def __enter__(self) -> Heartbeat:
        """Start the bar and write the first heartbeat."""
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=self._total, completed=self.done)
        self._write("running")
        return self

    def recall(self, told: Mapping[str, int]) -> None:
        """Begin with the rows of an earlier try (rows_left), until they are counted again; to be called before entering."""
        self.done = self._resumed = told.get("done", 0)
        self._total = self._fields["total"] = told.get("total", self._total)
        self._facts.update({name: told[name] for name in ("useful", "rejected") if name in told})

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell that the job lives while something else gets on, which has a deadline of its own."""
        over = threading.Event()
        thread = threading.Thread(target=self._live, args=(over,), name="heartbeat-waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _live(self, over: threading.Event) -> None:
        while not over.wait(_BEAT_SECONDS):
            self._write("running")

    def resume(self, done: int) -> None:
        """Units that an earlier, killed run had finished; they count as done but not towards the rate."""
        self._resumed = done
        self.advance(done)

    def advance(self, units: int, tokens: int = 0, facts: Mapping[str, Any] | None = None) -> None:
        """Add finished units and their tokens; `facts` are further fields of the heartbeat."""
        self.done += units
        self.tokens += tokens
        self._tell(facts or {})

    def report(self, done: int, tokens: int, resumed: int, facts: Mapping[str, Any], total: int | None = None) -> None:
        """Set what somebody else has counted; `facts` win over what is computed here."""
        self.done, self.tokens, self._resumed = done, tokens, resumed
        if total is not None and total != self._total:
            self._total = self._fields["total"] = total
            if self._bar is not None:
                self._bar.update(self._task, total=total)
        self._tell(facts)

    def settle(self, timeout_s: float = _LAST_WORD_S) -> bool:
        """Wait until the newest heartbeat was tried; False if the time was too short."""
        return self._writer.settle(timeout_s)

    def _tell(self, facts: Mapping[str, Any]) -> None:
        self._facts.update(facts)
        now = self._clock()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif now - self._line >= _LINE_SECONDS:
            self._line = now
            rate = f", {self._rates(now)['tokens_per_second']:.1f} tokens/s" if self.tokens else ""
            print(f"{self._label}: {self.done}/{self._total} {self._unit}{rate}", flush=True)
        if now - self._beat >= _BEAT_SECONDS:
            self._beat = now
            self._write("running")

    def _rates(self, now: float) -> dict[str, float]:
        """Tokens a second since the start and over the last minute."""
        self._minute.append((now, self.tokens))
        while len(self._minute) > 1 and now - self._minute[1][0] >= _MINUTE_S:
            self._minute.popleft()
        then, before = self._minute[0]
        computed = {
            "tokens_per_second": round(self.tokens / max(now - self._started, 1e-9), 3),
            "tokens_1m": round((self.tokens - before) / max(now - then, 1e-9), 3),
        }
        return computed | {name: self._facts[name] for name in computed if name in self._facts}

    def _write(self, state: str) -> None:
        now = self._clock()
        beat = {
            **self._fields,
            "state": state,
            "done": self.done,
            "resumed": self._resumed,
            "tokens": self.tokens,
            "started": self._started,
            "updated": now,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "memory_bytes": _resident(),
            **self._facts,
            **self._rates(now),
        }
        self._writer.post(canonical_json(beat).encode())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the bar and leave a last heartbeat that says how it ended."""
        if self._bar is not None:
            self._bar.stop()
        if error is not None:
            self.fail(str(error) or type(error).__name__)
            return
        self._write("done")
        self._writer.settle(_LAST_WORD_S)

    def fail(self, message: str, facts: Mapping[str, Any] | None = None) -> None:
        """Leave a last heartbeat that says what ended the job; the first such word stands."""
        if self._failed:
            return
        self._failed = True
        self._facts.update({"error": message[:_ERROR], **(facts or {})})
        self._write("failed")
        self._writer.settle(_LAST_WORD_S)


def rows_left(heartbeat: bytes) -> dict[str, int]:
    """The rows of a job that did not finish, as its heartbeat calls them; empty for a finished one and for no heartbeat."""
    try:
        beat = json.loads(heartbeat)
    except ValueError:
        return {}
    if not isinstance(beat, dict) or beat.get("state") == "done":
        return {}
    counts = {name: beat.get(name) for name in ("total", "done", "useful", "rejected")}
    return {name: rows for name, rows in counts.items() if isinstance(rows, int) and rows >= 0}


class _Writer:
    """Puts the newest of the values it is given, from a thread that nobody waits for."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._newest: bytes | None = None
        self._busy = False
        self._change = threading.Condition()

    def post(self, data: bytes) -> None:
        """Take a value to be written; it replaces one that still waits."""
        with self._change:
            self._newest = data
            if not self._busy:
                self._busy = True
                threading.Thread(target=self._work, name="heartbeat", daemon=True).start()

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is left to write."""
        with self._change:
            return self._change.wait_for(lambda: not self._busy, timeout_s)

    def _work(self) -> None:
        while True:
            with self._change:
                data, self._newest = self._newest, None
                if data is None:
                    self._busy = False
                    self._change.notify_all()
                    return
            try:
                self._store.put(self._key, data)
            except Exception as error:  # whatever it is, the work is worth more
                print(f"a heartbeat could not be written: {error}", flush=True)


def _resident() -> int | None:
    """Bytes of memory that this process holds; None where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return None


def _bar() -> Progress:
    from rich.console import Console

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
