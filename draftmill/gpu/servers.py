"""Servers of ours that hold a GPU between jobs: no obstacle to the job they serve, asked to leave for any other.

A server is believed only while it holds the lease's lock, lives under the identity it recorded, belongs to this user
and was attested once. It is asked by SIGTERM to the process group that it recorded, and only while its leader lives:
then the group's number cannot have been given to anybody else.
"""

import contextlib
import os
import signal
from pathlib import Path

from draftmill.gpu import groups, processes
from draftmill.gpu.lease import LeaseRecord, device_path, is_held, occupant, slot_path, try_lock
from draftmill.gpu.verdict import Tenant


def tenant(folder: Path, record: LeaseRecord) -> Tenant:
    """The server as the verdict sees it: its record, and the pids that may hold its memory."""
    marker = f"{groups.MARKER}={record.token}"
    pids = {record.holder.pid, *(p.pid for p in processes.holders_of(device_path(folder, record.uuid)))}
    for seen in processes.all_processes():
        if seen.group == record.group or processes.carries(seen.pid, marker):
            pids.add(seen.pid)
    return Tenant(frozenset(pids), record.to_json())


def leave(folder: Path, record: LeaseRecord, grace_s: float, kill_wait_s: float = 10.0) -> bool:
    """Ask the server to leave all its GPUs; KILL after `grace_s` seconds. True when its leases are free.

    The caller holds the slot of one of its GPUs, so no job is using it.
    """
    paths = [device_path(folder, uuid) for uuid in record.uuids]

    def gone() -> bool:
        return not any(is_held(path) for path in paths)

    signal_group(record, signal.SIGTERM)
    if processes.wait_until(gone, grace_s):
        return True
    if not signal_group(record, signal.SIGKILL):
        _kill_holders(paths, record)
    return processes.wait_until(gone, kill_wait_s)


def leave_if_idle(folder: Path, uuid: str, grace_s: float) -> bool:
    """Ask the server on this GPU to leave unless a job uses it; False when there is none, or it is in use."""
    slot = try_lock(slot_path(folder, uuid))
    if slot is None:
        return False
    try:
        found = occupant(folder, uuid)
        if found is None or found.record is None or not found.server:
            return False
        return leave(folder, found.record, grace_s)
    finally:
        os.close(slot)


def signal_group(record: LeaseRecord, number: signal.Signals) -> bool:
    """Signal the server's process group; False when its leader is dead or not this user's."""
    ours = record.here() and record.uid == os.getuid() == processes.owner(record.holder.pid)
    if not ours or record.group != record.holder.pid or not processes.alive(record.holder):
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(record.holder.pid, number)
        return True
    return False


def _kill_holders(paths: list[Path], record: LeaseRecord) -> None:
    # The leader is gone and left children with the lease: they are known by the open file and the token.
    marker = f"{groups.MARKER}={record.token}"
    for path in paths:
        for process in processes.holders_of(path):
            if processes.carries(process.pid, marker) and processes.owner(process.pid) == os.getuid():
                processes.signal_process(process, signal.SIGKILL)
