"""What the system says while an object is read, told apart from what the object holds.

Libraries hide it: torch raises a RuntimeError with the number in its text, safetensors says of every file that it cannot
open that there is none, and readers of ours make a sentence of it. Only a disk that does not give its bytes back says that
an object is of no use; a missing permission or too many open files say nothing of it.
"""

from __future__ import annotations

import os
import re

from draftmill.errors import UserError
from draftmill.outcomes import verdict

# torch: unable to open file </a> in read-only mode: Too many open files (24)
_OF_TORCH = re.compile(r"^unable to .*\((\d+)\)", re.MULTILINE)
_FOR_A_MOMENT = "the system refused it for a moment, perhaps for too many open files"


def of_system(error: BaseException) -> OSError | None:
    """The system's error that an error is or was made of; None if it is of something else."""
    source = error.__context__ if isinstance(error, UserError) else error
    if isinstance(source, OSError):
        return source
    found = _OF_TORCH.search(str(source)) if isinstance(source, RuntimeError) else None
    return None if found is None else OSError(int(found[1]), os.strerror(int(found[1])))


def refused(error: OSError, address: str) -> UserError:
    """The sentence for the person who can mend it; `address` is what was read if the error does not say it."""
    why = os.strerror(error.errno) if error.errno else _FOR_A_MOMENT
    named = OSError(error.errno, why, str(error.filename or address))
    sentence = verdict(error)[1] or verdict(named)[1]
    return UserError(
        sentence
        or f"{named.filename} cannot be read ({why}): mend that and give the same command again; nothing was moved."
    )
