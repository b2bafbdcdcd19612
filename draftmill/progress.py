"""Heartbeats: what a job is doing right now, for people and for the readers of the store.

One JSON object a job, replaced every few seconds. It may hold times, rates and hosts, because it is no output: outputs
are functions of their inputs. On a terminal the same numbers are a bar, elsewhere a plain line now and then.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftmill.canonical import canonical_json
from draftmill.store.base import Store

_BEAT_SECONDS = 2.0
_LINE_SECONDS = 10.0


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
    ) -> None:
        """`key` is the heartbeat's place in the store, `total` the number of units the job has."""
        self._store, self._key, self._clock = store, key, clock
        self._total, self._label, self._unit = total, f"{stage} {name}", unit
        self._started = self._beat = self._line = clock()
        self._fields: dict[str, Any] = {"stage": stage, "name": name, "unit": unit, "total": total}
        self.done, self.tokens, self._resumed = 0, 0, 0
        self._bar = _bar() if sys.stderr.isatty() else None

    def __enter__(self) -> Heartbeat:
        """Start the bar and write the first heartbeat."""
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=self._total)
        self._write("running")
        return self

    def resume(self, done: int) -> None:
        """Units that an earlier, killed run had finished; they count as done but not towards the rate."""
        self._resumed = done
        self.advance(done)

    def advance(self, units: int, tokens: int = 0, facts: Mapping[str, Any] | None = None) -> None:
        """Add finished units and their tokens; `facts` are further fields of the heartbeat."""
        self.done += units
        self.tokens += tokens
        self._fields.update(facts or {})
        now = self._clock()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif now - self._line >= _LINE_SECONDS:
            self._line = now
            rate = f", {self._rate(now):.1f} tokens/s" if self.tokens else ""
            print(f"{self._label}: {self.done}/{self._total} {self._unit}{rate}", flush=True)
        if now - self._beat >= _BEAT_SECONDS:
            self._beat = now
            self._write("running")

    def _rate(self, now: float) -> float:
        return self.tokens / max(now - self._started, 1e-9)

    def _write(self, state: str) -> None:
        now = self._clock()
        beat = {
            **self._fields,
            "state": state,
            "done": self.done,
            "resumed": self._resumed,
            "tokens": self.tokens,
            "tokens_per_second": round(self._rate(now), 3),
            "started": self._started,
            "updated": now,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._store.put(self._key, canonical_json(beat).encode())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the bar and leave a last heartbeat that says how it ended."""
        if self._bar is not None:
            self._bar.stop()
        self._write("done" if kind is None else "failed")


def _bar() -> Progress:
    from rich.console import Console

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
