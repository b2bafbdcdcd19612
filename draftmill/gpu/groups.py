"""What a run of ours started, written down at the start, so that it can be found when the run is dead.

One small file per lease and per process group, in a folder that only this user can write to: a record that another user
could forge would turn `reclaim` into a weapon. A process is ours when its identity stands in a record, when it sits in
a group whose recorded leader still lives, or when it was started with the lease's token in its environment. A bare
process-group number proves nothing: numbers are given out again.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftmill.errors import UserError
from draftmill.gpu import processes
from draftmill.gpu.lease import LeaseRecord, now
from draftmill.gpu.processes import Process

MARKER = "DRAFTMILL_LEASE"


@dataclass(frozen=True)
class GroupRecord:
    """Something that a run started: `leader` (its pid is the group's number), and the `owner` it belongs to."""

    leader: Process
    owner: Process
    token: str
    kind: str
    uuids: tuple[str, ...]
    run_id: str | None
    stage: str | None
    shard: str | None
    boot_id: str | None
    pid_ns: str | None
    started_at: str
    schema: str = "gpu-group/1"

    @staticmethod
    def from_json(value: Any) -> "GroupRecord | None":
        """The record, or None for anything that is not wholly one."""
        try:
            leader, owner = Process.from_json(value["leader"]), Process.from_json(value["owner"])
            if value["schema"] != "gpu-group/1" or leader is None or owner is None:
                return None
            return GroupRecord(**{**value, "uuids": tuple(value["uuids"]), "leader": leader, "owner": owner})
        except (KeyError, TypeError):
            return None

    def here(self) -> bool:
        """Whether its pids mean something to this process: same boot, same pid namespace."""
        return (self.boot_id, self.pid_ns) == (processes.boot_id(), processes.pid_namespace())

    def owner_dead(self) -> bool:
        """Whether the run it belongs to is certainly over."""
        return self.here() and not processes.alive(self.owner)


def private_folder(lock_dir: Path) -> Path:
    """The folder of this user's group records; raises UserError when somebody else made it."""
    folder = lock_dir / f"groups-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or folder.is_symlink():
        raise UserError(
            f"The folder {folder} can be written to by others, so its records cannot be trusted; remove it, or set "
            "gate.lock_dir to another folder."
        )
    return folder


def remember(lock_dir: Path, lease: LeaseRecord, leader: Process, kind: str) -> Path:
    """Write down that `leader` was started under `lease`."""
    record = GroupRecord(
        leader=leader,
        owner=lease.owner,
        token=lease.token,
        kind=kind,
        uuids=lease.uuids,
        run_id=lease.run_id,
        stage=lease.stage,
        shard=lease.shard,
        boot_id=lease.boot_id,
        pid_ns=lease.pid_ns,
        started_at=now(),
    )
    path = private_folder(lock_dir) / f"{lease.token}-{leader.pid}-{leader.start}.json"
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(asdict(record)) + "\n")
    draft.replace(path)
    return path


def forget(path: Path) -> None:
    """Remove a record; it may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def recorded(lock_dir: Path) -> Iterator[tuple[Path, GroupRecord]]:
    """Records of this user; broken ones are passed over."""
    for path in sorted(private_folder(lock_dir).glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            if (record := GroupRecord.from_json(json.loads(path.read_text()))) is not None:
                yield path, record


def survivors(record: GroupRecord) -> list[Process]:
    """Living processes that are certainly of this record and this user; this process and the owner excepted."""
    if not record.here():
        return []
    marker = f"{MARKER}={record.token}"
    leads = processes.alive(record.leader)
    spared = {os.getpid(), record.owner.pid if processes.alive(record.owner) else -1}
    found = []
    for seen in processes.all_processes():
        if seen.pid in spared or processes.owner(seen.pid) != os.getuid():
            continue
        grouped = leads and seen.group == record.leader.pid
        if grouped or seen.process == record.leader or processes.carries(seen.pid, marker):
            found.append(seen.process)
    return found
