"""The one exception a user may meet: its text is a whole sentence saying what is wrong, where, and what to do.

`draftmill` commands and scripts/ print it without a traceback; every other exception is a fault of draftmill and keeps
its traceback.
"""


class UserError(Exception):
    """A mistake or a limit that the user can act on. The message is shown alone, so it must stand alone."""
