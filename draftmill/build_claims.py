"""Claims as the processes of a build hold them: who a process is on this host, and whether another still lives.

store/claims.py knows objects and times; gpu/processes.py knows processes. This is where the two meet.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from draftmill.gpu import processes
from draftmill.store import claims
from draftmill.store.base import Store
from draftmill.store.claims import Claim, Claims, Holder

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
    return claims_of(store, run or "sweep").sweep([key for key in keys if key.startswith(claims.PREFIX)], run)


def others_at_work(store: Store, keys: Iterable[str], run: str) -> bool:
    """Whether a claim among `keys` of the store shows a job of another run at work, as far as one look tells.

    What such a run needs cannot be told from here: another configuration may read the same hidden states.
    """
    return any(_works(store, key, run) for key in keys if key.startswith(claims.PREFIX))


def _works(store: Store, key: str, run: str) -> bool:
    try:
        claim = Claim.decode(store.get(key))
    except KeyError:
        return False
    return claim is not None and claim.run != run and not claims.vacant(claim, alive, time.time())
