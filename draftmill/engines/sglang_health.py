"""The signs by which a server is known to be sick, as plain values: no clock, no network.

`/health` says nothing: a server answers it while it generates `!!!!`, or nothing at all. What counts is the answer to a
fixed prompt, tokens that move, and how many of the last rows were bad.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from draftmill.engines.base import Request, Sampling

# In bfloat16 the same prompt may part from itself late, because kernels depend on the batch; hardly in its first tokens.
CANARY_TOKENS, _COMPARED = 16, 6
_WINDOW_RESTARTS, _CALM_WINDOWS = 2, 4


@dataclass
class Canary:
    """A prompt whose greedy answer must stay the same as long as the build runs, at every epoch of a server."""

    prompt_ids: tuple[int, ...]
    answer: tuple[int, ...] | None = None

    @property
    def request(self) -> Request:
        """The question."""
        return Request(("canary", 0), self.prompt_ids, 0, Sampling(CANARY_TOKENS, 0.0, 1.0, 0, 0.0))

    def agrees(self, ids: Sequence[int]) -> bool:
        """Whether an answer begins as the first one did; the first is taken for the truth if it is no run of one token."""
        if self.answer is None:
            if len(ids) >= CANARY_TOKENS and len(set(ids)) == 1:
                return False
            self.answer = tuple(ids)
        return self.answer[:_COMPARED] == tuple(ids[:_COMPARED])


class Window:
    """The last rows of a server and what was wrong with them, and how often it was restarted for them."""

    def __init__(self, size: int, limit: float) -> None:
        """`size` rows, of which a share of `limit` may be bad."""
        self._rows: deque[str] = deque(maxlen=size)
        self._size, self._limit = size, limit
        self._bad = self._calm = self._restarts = 0

    def add(self, fault: str) -> None:
        """Count a row: its fault, or "" for a good one."""
        self._bad += bool(fault) - (self.full and bool(self._rows[0]))
        self._rows.append(fault)
        well = self.full and self._bad < self._limit * self._size / 2
        self._calm = self._calm + 1 if well else 0
        if self._calm >= _CALM_WINDOWS * self._size:
            self._restarts = 0

    def due(self) -> str:
        """What is wrong, if the server is to be restarted for it; that restart counts as done.

        A server that restarts did not cure makes rows that are bad by themselves; they are left to the cap and the audit.
        Only several windows well below the limit show that it was cured: a share near the limit is now above it and now
        below.
        """
        if self._restarts >= _WINDOW_RESTARTS or not (verdict := self.verdict()):
            return ""
        self._restarts += 1
        return verdict

    def verdict(self) -> str:
        """What is wrong, for people, or "" while the window is not full or the share is below the limit."""
        if not self.full or self._bad < self._limit * self._size:
            return ""
        kinds = Counter(fault for fault in self._rows if fault).most_common(3)
        said = ", ".join(f"{fault} {count}" for fault, count in kinds)
        return f"{self._bad} of its last {self._size} rows failed: {said}"

    @property
    def full(self) -> bool:
        """Whether enough rows were seen for a verdict."""
        return len(self._rows) == self._size

    def clear(self) -> None:
        """Begin anew with the rows; restarts stay counted."""
        self._rows.clear()
        self._bad = self._calm = 0


class Progress:
    """When tokens moved last, by rows, canaries, or the server's own count."""

    def __init__(self, now: float) -> None:
        self._moved, self._count = now, -1.0

    def mark(self, now: float) -> None:
        """Tokens came, or there is nothing to wait for."""
        self._moved = now

    def count(self, tokens: float | None, now: float) -> None:
        """The server's own count of decoded tokens, if it has one; a count that rose is progress."""
        if tokens is None:
            return
        if self._count >= 0 and tokens > self._count:
            self._moved = now
        self._count = tokens

    def still(self, now: float) -> float:
        """Seconds without a token."""
        return now - self._moved
