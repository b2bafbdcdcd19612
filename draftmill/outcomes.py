"""How a build ended, told to whoever started it: one line of JSON for each job that begins, ends or fails.

Snakemake's own exit status is 1 for a spelling mistake and for an hour without network alike. `draftmill run` must know
the difference, so it names a file in the environment and every process of the build appends to it: kinds are words of
this module, sentences are for people. Without that variable nothing is written.
"""

from __future__ import annotations

import contextlib
import json
import os
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
    """Tell the supervisor of a mistake or limit that ends the process of a build."""
    try:
        yield
    except UserError as error:
        note(error.kind, str(error))
        raise


def read(path: Path) -> Iterator[Outcome]:
    """Every whole line of the file, in the order of writing."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError):
            found = Outcome(**json.loads(line))
            if found.kind in _WORDS:
                yield found
