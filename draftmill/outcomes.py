"""How a build ended, told to whoever started it: one line of JSON for each job that begins, ends or fails.

Snakemake's own exit status is 1 for a spelling mistake and for an hour without network alike. `draftmill run` must know
the difference, so it names a file in the environment and every process of the build appends to it: kinds are words of
this module, sentences are for people. Without that variable nothing is written. The file is one in memory that only its
maker holds, named by way of /proc: what is told may be that no disk takes a byte more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from draftmill.errors import Kind, UserError

# The run that a line belongs to, as every process of a build inherits it (job.py).
RUN_VARIABLE = "DRAFTMILL_RUN"
# began and done are of a job.
Word = Literal[Kind, "began", "done"]
VARIABLE = "DRAFTMILL_OUTCOMES"
_WORDS = frozenset([*get_args(Kind), "began", "done"])
# What the system says of a full disk, also through libraries that hide the error's number.
_FULL = ("No space left on device", "Disk quota exceeded")
# Python's, where each folder for temporary files is full or refused.
_NO_TEMPORARY = "No usable temporary directory"
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
# More than a full disk has left in blocks that are begun.
_TRIED_BYTES = 1 << 16


class DiskError(UserError):
    """A disk of this machine that takes no file."""

    kind = "full"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line: what happened, in words for people where there are any, and to which job of which process."""

    kind: Word
    sentence: str = ""
    job: str = ""
    pid: int = 0
    run: str = ""


def note(kind: Word, sentence: str = "", job: str = "") -> None:
    """Tell the supervisor, if there is one; never fails, for a full disk or a lost folder is being told just now."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    found = Outcome(kind, sentence, job, os.getpid(), os.environ.get(RUN_VARIABLE, ""))
    line = json.dumps(asdict(found)) + "\n"
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            # One write: lines of several processes do not mix.
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Tell the supervisor of a mistake or limit that ends the process of a build; a disk that refuses is a UserError too."""
    try:
        yield
    except Exception as error:
        kind, sentence = verdict(error)
        if sentence is None:
            raise
        note(kind, sentence)
        if isinstance(error, UserError):
            raise
        raise DiskError(sentence) from None


def verdict(error: BaseException) -> tuple[Kind, str | None]:
    """What ended a process, and the sentence for a user's mistake, for Ctrl-C and for a disk; no words for a fault."""
    if isinstance(error, UserError):
        return error.kind, str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "Interrupted: give the same command again to go on."
    if any(words in str(error) for words in _FULL):
        return "full", "The disk has run full: free some and give the same command again; nothing finished is lost."
    if _NO_TEMPORARY in str(error):
        return "full", (
            "No folder for temporary files can be written, or their disk has run full: free some, or set TMPDIR, and give "
            "the same command again; nothing finished is lost."
        )
    if isinstance(error, OSError) and error.errno in _REFUSED and error.filename:
        return "full", (
            f"{error.filename} cannot be written or read ({error.strerror}): mend its permissions and give the same command "
            "again; nothing finished is lost."
        )
    return "fault", None


def refusal(folder: Path) -> str:
    """Why a folder takes no file now, as a sentence; empty if it takes one, or if that is not the disk's doing."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".draftmill-") as file:
            file.write(b"x" * _TRIED_BYTES)
            file.flush()
    except OSError as error:
        return verdict(OSError(error.errno, error.strerror, str(folder.resolve())))[1] or ""
    return ""


@contextlib.contextmanager
def listening() -> Iterator[Path]:
    """A place for `VARIABLE`, good while the block lasts and for processes of this user on this machine."""
    descriptor = os.memfd_create("draftmill-outcomes")
    try:
        # /proc may be that of a namespace above, where this process has another number.
        yield Path("/proc", os.readlink("/proc/self"), "fd", str(descriptor))
    finally:
        os.close(descriptor)


def read(path: Path) -> Iterator[Outcome]:
    """Every whole line of the file, in the order of writing."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError):
            found = Outcome(**json.loads(line))
            if found.kind in _WORDS:
                yield found
