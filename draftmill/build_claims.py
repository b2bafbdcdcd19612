"""Claims as the processes of a build hold them: who a process is on this host, and whether another still lives.

store/claims.py knows objects and times; gpu/processes.py knows processes. This is where the two meet.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

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
    return any(not claims.vacant(claim, alive, time.time()) for claim in _others(store, keys, run))


def others_died(store: Store, keys: Iterable[str], run: str) -> bool:
    """Whether claims of other runs are there and bind nobody: whoever lives has let its claim go between two jobs."""
    found = _others(store, keys, run)
    return bool(found) and all(claims.vacant(claim, alive, time.time()) for claim in found)


def _others(store: Store, keys: Iterable[str], run: str) -> list[Claim]:
    found = []
    for key in keys:
        with suppress(KeyError):
            claim = Claim.decode(store.get(key)) if key.startswith(claims.PREFIX) else None
            found += [claim] if claim is not None and claim.run != run else []
    return found
