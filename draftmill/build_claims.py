"""Claims as the processes of a build hold them: who a process is on this host, and whether another still lives.

store/claims.py knows objects and times; gpu/processes.py knows processes. This is where the two meet.
"""

from __future__ import annotations

import time

from draftmill.gpu import processes
from draftmill.store import claims
from draftmill.store.base import Store
from draftmill.store.claims import Claims, Holder

# Stages whose work is worth a claim: minutes to days, on a GPU.
STAGES = ("generate", "extract", "train", "evaluate")


def myself() -> Holder:
    """Who this process is."""
    me = processes.myself()
    return Holder(me.pid, me.start, processes.boot_id(), processes.pid_namespace())


def alive(holder: Holder) -> bool | None:
    """Whether the process lives; None for one of another boot or pid namespace, of which this process knows nothing."""
    if holder.boot is None or (holder.boot, holder.namespace) != (processes.boot_id(), processes.pid_namespace()):
        return None
    return processes.alive(processes.Process(holder.pid, holder.start))


def claims_of(store: Store, run: str) -> Claims:
    """The claims that this process holds for a build."""
    return Claims(store, run, myself(), alive)


def sweep(store: Store, keys: list[str], run: str | None = None) -> list[str]:
    """Remove claims that bind nobody, and with `run` those that this ended build holds; returns what was removed."""
    return claims.sweep(store, [key for key in keys if key.startswith(claims.PREFIX)], run, alive, time.time())
