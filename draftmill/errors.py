"""The one exception a user may meet: its text is a whole sentence saying what is wrong, where, and what to do.

`draftmill` commands and scripts/ print it without a traceback; every other exception is a fault of draftmill and keeps
its traceback.
"""


class UserError(Exception):
    """A mistake or a limit that the user can act on. The message is shown alone, so it must stand alone."""


def reason(error: BaseException) -> str:
    """The first line of an exception of somebody else's without its full stop, to stand inside a sentence of ours."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(". ")
