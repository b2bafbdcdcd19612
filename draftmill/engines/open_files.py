"""Open files of the process that asks the servers: each row in flight is a socket.

The soft limit is 1024 on most hosts, for programs of old that put numbers of files into a fixed bitmap (select). Two servers
at 512 rows each are over it, and a connection that cannot be opened for want of a file looks like a server that is away. So
whoever asks raises its soft limit to the hard one, and a hard limit that is too low is said before the first row.
"""

from __future__ import annotations

import resource

from draftmill.errors import UserError

# Logs, locks, journals, the store's connections, and those of jobs.
_BESIDE = 256


def files_needed(servers: int, in_flight: int) -> int:
    """Open files of the process that asks so many servers for so many rows each."""
    return servers * in_flight + _BESIDE


def check_files(needed: int) -> None:
    """Raise UserError if a process may not have so many files open."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"generate.sglang.in_flight: {needed} open files are needed and the limit is {hard}: raise it "
            "(ulimit -Hn) or lower in_flight."
        )


def raise_file_limit() -> None:
    """Let this process open as many files as it ever may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
