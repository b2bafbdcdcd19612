"""Work that goes on beside what an event loop waits for, and is never lost without a word.

asyncio keeps only weak references to its tasks and says nothing of a fault in one that nobody awaits.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine, Iterator
from typing import Any


class Chores:
    """Tasks that are held until they end, and whose faults are printed."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        """The tasks that have not ended, as they are now."""
        return iter(tuple(self._tasks))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin it; call this inside a running event loop."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            traceback.print_exception(fault)
