"""Bad records: the kinds there are, how they are counted, and when there are too many.

A bad record is refused with a reason and counted; it never stops the reading, for one broken line among a million is
normal. The share is judged at the end, when it is known. Faults of a whole file are UserErrors at once instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from draftmill.errors import UserError

FIRST = 5


class Kind(StrEnum):
    """Why a record was refused."""

    BROKEN_JSON = "broken_json"
    BROKEN_CSV = "broken_csv"
    INVALID_UTF8 = "invalid_utf8"
    NUL_BYTE = "nul_byte"
    WRONG_TYPE = "wrong_type"
    NO_PROMPT = "no_prompt"
    NO_ANSWER = "no_answer"
    EMPTY_TURN = "empty_turn"
    UNKNOWN_ROLE = "unknown_role"
    ASSISTANT_LAST = "assistant_last"
    SYSTEM_LAST = "system_last"
    TOO_LONG = "too_long"
    TEMPLATE = "template"


class BadRecord(Exception):
    """One record that cannot be used: its kind, and a reason that reads on after 'file line 3: '."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BadKind:
    """How many records of one kind were refused, and where the first few stand, each with its reason."""

    count: int
    first: tuple[str, ...]


class Tally:
    """Counts refused records by kind and remembers the first few of each."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, list[str]] = {}

    def add(self, location: str, bad: BadRecord) -> None:
        """Count one refused record."""
        self._counts[bad.kind] = self._counts.get(bad.kind, 0) + 1
        first = self._first.setdefault(bad.kind, [])
        if len(first) < FIRST:
            first.append(f"{location}: {bad.reason}")

    def by_kind(self) -> dict[str, BadKind]:
        """The counts, in order of the kinds' names."""
        return {str(kind): BadKind(n, tuple(self._first[kind])) for kind, n in sorted(self._counts.items())}


def check_share(bad: Mapping[str, BadKind], judged: int, max_bad: float) -> None:
    """Raise UserError if more than a share `max_bad` of the `judged` records was refused."""
    total = sum(kind.count for kind in bad.values())
    if total <= max_bad * judged:
        return
    raise UserError(
        f"{total} of {judged} prompt records are bad ({total / judged:.1%}), more than prompts.max_bad allows "
        f"({max_bad:.1%}): {describe(bad)}; correct them or raise prompts.max_bad."
    )


def describe(bad: Mapping[str, BadKind]) -> str:
    """Each kind with its count and first place, in one line."""
    return "; ".join(f"{name} {kind.count} (first: {kind.first[0]})" for name, kind in bad.items())
