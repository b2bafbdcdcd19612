"""Snakemake's lock on a working directory, for profiles that do not say `nolock` as those of this repository do.

Snakemake's locks name files and no holder, so a killed run leaves one that stops the next for ever. The supervisor
writes down which process it started; a lock is stale when that process is dead and no other Snakemake works in the
directory. Locks that somebody else left are never touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict
from pathlib import Path

from draftmill import build_claims
from draftmill.gpu import processes
from draftmill.store.claims import Holder

_RECORD, _LOCKS = Path(".draftmill/supervised.json"), Path(".snakemake/locks")


def locked(folder: Path) -> bool:
    """Whether Snakemake left a lock in a working directory."""
    return any((folder / _LOCKS).glob("*"))


def remember(folder: Path, pid: int) -> None:
    """Write down the Snakemake that was just started; a disk that takes no file costs only the unlocking."""
    found = processes.identify(pid)
    if found is None:
        return
    holder = Holder(found.pid, found.start, processes.boot_id(), processes.pid_namespace())
    with contextlib.suppress(OSError):
        (folder / _RECORD).parent.mkdir(parents=True, exist_ok=True)
        (folder / _RECORD).write_text(json.dumps({"host": socket.gethostname(), "holder": asdict(holder)}))


def stale(folder: Path) -> bool:
    """Whether the lock is that of a Snakemake which a supervisor started here and which is certainly dead."""
    try:
        record = json.loads((folder / _RECORD).read_text())
        holder, host = Holder(**record["holder"]), record["host"]
    except (OSError, ValueError, TypeError, KeyError):
        return False
    living = build_claims.alive(holder)
    # Of this host but another boot: nothing of it is left.
    rebooted = host == socket.gethostname() and holder.boot != processes.boot_id()
    return (living is False or (living is None and rebooted)) and not _working(folder)


def _working(folder: Path) -> bool:
    """Whether some Snakemake of this user works in the directory."""
    real = folder.resolve()
    for seen in processes.all_processes():
        with contextlib.suppress(OSError):
            inside = Path(os.readlink(f"/proc/{seen.pid}/cwd")) == real
            if inside and seen.pid != os.getpid() and "snakemake" in (processes.command(seen.pid, 4096) or ""):
                return True
    return False
