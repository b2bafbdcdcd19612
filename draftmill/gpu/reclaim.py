"""Ending what dead runs of ours left behind, and nothing else.

A leftover is a living process that a record of ours names (groups.py) while the run it belongs to is dead, or one that
still holds the lease of a dead holder; and a file in /dev/shm that is this user's and whose maker is provably dead.
Everything else that stands in the way is listed and not touched: it belongs to somebody, or it cannot be shown not to.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from draftmill.gpu import groups, processes, servers, shm
from draftmill.gpu import lease as leases
from draftmill.gpu.check import check
from draftmill.gpu.groups import GroupRecord
from draftmill.gpu.lease import LeaseRecord, Occupant
from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.processes import Process
from draftmill.gpu.record import Reason, ShmFile, Verdict
from draftmill.gpu.verdict import describe

_GRACE_S = 10.0
_VERIFY_S = 30.0
_SECOND_LOOK_S = 0.1


@dataclass(frozen=True)
class Leftover:
    """A process of a dead run: who it is, and why it is certainly ours."""

    process: Process
    command: str | None
    why: str


@dataclass
class Plan:
    """What would be ended and removed, what was seen and may not be touched, and records that have had their day."""

    processes: dict[Process, Leftover] = field(default_factory=dict)
    files: list[ShmFile] = field(default_factory=list)
    untouched: list[str] = field(default_factory=list)
    servers: list[LeaseRecord] = field(default_factory=list)
    stale: list[Path] = field(default_factory=list)
    dead_since: list[float] = field(default_factory=list)

    def add(self, found: Iterable[Process], why: str) -> None:
        """Put processes down to be ended, each once."""
        for process in found:
            self.processes.setdefault(process, Leftover(process, processes.command(process.pid), why))


@dataclass(frozen=True)
class Outcome:
    """What was done: processes that ended and that would not, files removed, and the gate's verdict after it."""

    ended: tuple[Leftover, ...]
    stuck: tuple[Leftover, ...]
    servers: tuple[LeaseRecord, ...]
    removed: tuple[ShmFile, ...]
    verdict: Verdict


def find(policy: GatePolicy, idle_servers: bool = False) -> Plan:
    """Look for leftovers and change nothing; `idle_servers` adds living servers of ours that no job uses."""
    folder, plan = leases.lock_dir(policy.lock_dir), Plan()
    for path, record in groups.recorded(folder):
        _judge_group(plan, path, record)
    for uuid in leases.known_gpus(folder):
        if (occupant := leases.occupant(folder, uuid)) is not None:
            _judge_lease(plan, folder, occupant, idle_servers)
    plan.files = _files(plan, policy)
    _name_the_rest(plan, policy)
    return plan


def _judge_group(plan: Plan, path: Path, record: GroupRecord) -> None:
    if record.boot_id != processes.boot_id():
        plan.stale.append(path)
    elif not record.here():
        plan.untouched.append(f"run {record.run_id}: recorded in another container, which must reclaim it itself")
    elif record.owner_dead():
        found = groups.survivors(record)
        plan.add(found, f"started by run {record.run_id or 'by hand'} ({record.stage or 'no stage'}), which is dead")
        plan.stale += [] if found else [path]
        plan.dead_since.append(datetime.fromisoformat(record.started_at).timestamp())


def _judge_lease(plan: Plan, folder: Path, occupant: Occupant, idle_servers: bool) -> None:
    record = occupant.record
    if occupant.server and record is not None and idle_servers and _idle(folder, record):
        if record not in plan.servers:
            plan.servers.append(record)
    elif not occupant.orphaned or record is None or record.uid != os.getuid():
        plan.untouched.append(f"GPU {occupant.uuid}: {occupant.describe()}")
    elif found := _holders(folder, occupant.uuid):
        plan.add(found, f"holds the lease of GPU {occupant.uuid}, whose run {record.run_id or 'by hand'} is dead")
    else:
        plan.untouched.append(f"GPU {occupant.uuid}: the lease of a dead run is held by a process not visible here")


def _idle(folder: Path, record: LeaseRecord) -> bool:
    return not any(leases.is_held(leases.slot_path(folder, uuid)) for uuid in record.uuids)


def _holders(folder: Path, uuid: str) -> list[Process]:
    """Processes of this user that hold the lease; one that only tries it has closed the file at the second look."""
    path = leases.device_path(folder, uuid)
    first = processes.holders_of(path)
    time.sleep(_SECOND_LOOK_S)
    second = set(processes.holders_of(path))
    return [p for p in first if p in second and processes.owner(p.pid) == os.getuid()]


def _files(plan: Plan, policy: GatePolicy) -> list[ShmFile]:
    """Files of this user whose maker is dead or about to be, or that nobody uses since a run of ours died."""
    own = processes.own_pids(policy.pid_namespace)
    doomed = {process.pid for process in plan.processes}
    since = min(plan.dead_since, default=float("inf"))
    found = []
    for file in shm.look(every=True).leftovers:
        mine = file.uid == os.getuid()
        of_doomed = mine and file.creator_pid in doomed
        nameless = mine and own and file.creator_pid is None and file.mtime >= since
        if of_doomed or shm.provably_left(file, own) or (nameless and not shm.used(file, doomed)):
            found.append(file)
    return found


def _name_the_rest(plan: Plan, policy: GatePolicy) -> None:
    chosen = {file.name for file in plan.files}
    for file in shm.look().leftovers:
        if file.name not in chosen:
            owner = processes.user_name(file.uid)
            plan.untouched.append(
                f"/dev/shm/{file.name}: {file.bytes} bytes of {owner}, its maker is not provably dead"
            )
    doomed = {process.pid for process in plan.processes}
    for gpu in check(policy.model_copy(update={"settle_samples": 1})).gpus:
        people = [p for p in gpu.processes if p.pid not in doomed]
        plan.untouched += [f"GPU {gpu.uuid}: {describe(p)}" for p in people if not _leased_by_us(gpu.reasons)]
        if any(r.code == "memory_held_no_visible_process" for r in gpu.reasons) and not doomed:
            plan.untouched.append(f"GPU {gpu.uuid}: memory is used and no process is visible")


def _leased_by_us(reasons: Iterable[Reason]) -> bool:
    return any(found.code == "leased" for found in reasons)


def carry_out(policy: GatePolicy, plan: Plan, grace_s: float = _GRACE_S) -> Outcome:
    """TERM, then KILL the processes of the plan, remove its files, and let the gate judge the GPUs afterwards."""
    folder = leases.lock_dir(policy.lock_dir)
    left = [server for server in plan.servers if servers.leave(folder, server, policy.server_stop_s)]
    living = set(processes.end(plan.processes, grace_s))
    ended = tuple(found for process, found in plan.processes.items() if process not in living)
    stuck = tuple(found for process, found in plan.processes.items() if process in living)
    doomed = {process.pid for process in plan.processes}
    removed = tuple(file for file in plan.files if not shm.used(file, ()) and shm.remove(file))
    _drop_records(plan, folder, doomed)
    verdict = check(policy, wait_s=min(policy.wait_s, _VERIFY_S))
    return Outcome(ended, stuck, tuple(left), removed, verdict)


def _drop_records(plan: Plan, folder: Path, doomed: set[int]) -> None:
    for path in plan.stale:
        groups.forget(path)
    for path, record in groups.recorded(folder) if doomed else ():
        if record.owner_dead() and not groups.survivors(record):
            groups.forget(path)
