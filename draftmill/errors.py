"""The one exception a user may meet: its text is a whole sentence saying what is wrong, where, and what to do.

`draftmill` commands and scripts/ print it without a traceback; every other exception is a fault of draftmill and keeps
its traceback.
"""

from __future__ import annotations

from typing import Literal

# Why something ended that did not succeed. A mistake or a full disk waits for a person; what is late (the store), expired
# (credentials) or busy (GPUs) may pass by itself, and what changed since the plan is in the next one; interrupted is
# Ctrl-C, a fault is an exception that nobody foresaw.
Kind = Literal["mistake", "late", "expired", "busy", "changed", "full", "interrupted", "fault"]


class UserError(Exception):
    """A mistake or a limit that the user can act on. The message is shown alone, so it must stand alone.

    `kind` is what `draftmill run` goes by (outcomes.py): a mistake needs a person, every other kind may pass.
    """

    kind: Kind = "mistake"


def reason(error: BaseException) -> str:
    """The first line of an exception of somebody else's without its full stop, to stand inside a sentence of ours."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(". ")
