"""A shard in the lane: its rows on their way, and its journal, written off the event loop.

A segment that is being written is waited for whatever becomes of the job that wanted it: its thread cannot be stopped, and
another one would write a segment of the same name.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from draftmill.engines.base import Key
from draftmill.errors import UserError, reason
from draftmill.stages.rows import Asked, Ledger


class CannotKeep(UserError):
    """The store takes no more rows."""

    kind = "full"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A shard as the lane gets it: its rows to ask, and their ledger with what the journal held."""

    asked: Sequence[Asked]
    ledger: Ledger


@dataclass
class LaneShard:
    """A shard in the lane: what is still to be sent, what is in flight, and the jobs that wait for it.

    `resumed` rows were in its journal when it came into the lane, or final when its last job left it `begun`; `tokens` are
    those of rows answered since.
    """

    name: str
    rows: Mapping[Key, Asked]
    ledger: Ledger
    todo: deque[Asked] = field(default_factory=deque)
    flying: set[Key] = field(default_factory=set)
    jobs: set[object] = field(default_factory=set)
    begun: bool = False
    resumed: int = 0
    tokens: int = 0
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def refill(self) -> None:
        """Take up every row that is neither final nor under way."""
        under_way = self.flying | {asked.key for asked in self.todo}
        left = (a for key, a in self.rows.items() if key not in under_way and self.ledger.next_attempt(key) is not None)
        self.todo.extend(left)

    @property
    def finished(self) -> bool:
        """Whether every row is answered or refused for good."""
        return not self.todo and not self.flying

    @property
    def taken(self) -> int:
        """Rows answered, refused, or in flight."""
        return len(self.rows) - len(self.todo)

    async def flush(self) -> None:
        """Write what waits to the journal, one segment at a time. Raises CannotKeep, or what a store away from here raises."""
        async with self.writing:
            await self.write()

    async def write(self) -> None:
        """The same for who holds `writing`."""
        records = self.ledger.take()
        writing = asyncio.create_task(asyncio.to_thread(self.ledger.write, records))
        try:
            await asyncio.shield(writing)
        except BaseException as error:
            # The thread of a job that is gone goes on, and two must not write one segment.
            await asyncio.wait({writing})
            if writing.cancelled() or writing.exception() is not None:
                self.ledger.give_back(records)
            if isinstance(error, OSError):
                raise CannotKeep(
                    f"The journal of shard {self.name} cannot be written ({reason(error)}): free some disk or mend the "
                    "store, and give the same command again; what was flushed is kept."
                ) from error
            raise
