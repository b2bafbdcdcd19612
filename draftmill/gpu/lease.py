"""Who may use which GPU: a lock per full UUID, held by the processes that use it and by nobody else.

A lease is an flock on `<lock_dir>/<uuid>.lock`. The kernel gives it back when the last process that inherited the open
file is gone, so it outlives a launcher whose child still computes and never outlives both. The lock is the truth; the
record written into the file only says whose it is, and is believed only while the lock is held.

A second lock, `<uuid>.slot`, is the right to run a job on that GPU. A job holds it even when a server of ours holds the
GPU itself; without it two jobs would share one server, and one of them could ask it to leave under the other.

Locks are tried, never waited for, all or none, in sorted order: nothing can deadlock. Advisory locks bind draftmill
alone; that nobody else is on the GPU is the probe's to show.
"""

import contextlib
import fcntl
import json
import os
import socket
import stat as stat_modes
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from draftmill.errors import UserError
from draftmill.gpu import processes
from draftmill.gpu.processes import Process

_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs"})
_TRIES, _BETWEEN_S = 3, 0.01
_RECORD_BYTES = 1 << 16


@dataclass(frozen=True)
class LeaseRecord:
    """What the holder wrote into its lease. `group` is the process group of a server; `spec` what it serves.

    `uuids` are all GPUs of the same lease, `attested` says that the holder's memory was seen to be its own, and `owner`
    is the process whose death makes the holder a leftover (a server outlives its job, not its run).
    """

    uuid: str
    uuids: tuple[str, ...]
    kind: Literal["job", "server"]
    holder: Process
    owner: Process
    token: str
    uid: int
    host: str
    boot_id: str | None
    pid_ns: str | None
    run_id: str | None
    stage: str | None
    shard: str | None
    acquired_at: str
    spec: str | None = None
    group: int | None = None
    attested: bool = False
    schema: str = "gpu-lease/1"

    def to_json(self) -> dict[str, Any]:
        """The record as plain values."""
        return asdict(self)

    @staticmethod
    def from_json(value: Any) -> "LeaseRecord | None":
        """The record, or None for anything that is not wholly one."""
        try:
            if value["schema"] != "gpu-lease/1" or value["kind"] not in ("job", "server"):
                return None
            holder, owner = Process.from_json(value["holder"]), Process.from_json(value["owner"])
            if holder is None or owner is None:
                return None
            return LeaseRecord(**{**value, "uuids": tuple(value["uuids"]), "holder": holder, "owner": owner})
        except (KeyError, TypeError):
            return None

    def here(self) -> bool:
        """Whether its pids mean something to this process: same boot, same pid namespace."""
        return (self.boot_id, self.pid_ns) == (processes.boot_id(), processes.pid_namespace())

    def holder_alive(self) -> bool:
        """Whether the holder lives; one in another namespace is believed, since its lock is held."""
        return processes.alive(self.holder) if self.here() else True


def lock_dir(configured: str | None) -> Path:
    """The folder of leases, made if absent and open to all users; raises UserError where locks would not bind."""
    folder = Path(configured) if configured else _default_dir()
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o1777)
    except OSError as error:
        raise UserError(
            f"The GPU leases' folder {folder} cannot be made ({error.strerror}); set gate.lock_dir to a folder on a "
            "local disk."
        ) from None
    kind = _filesystem(folder)
    if kind in _REMOTE:
        raise UserError(
            f"The GPU leases' folder {folder} is on {kind}, where locks do not bind; set gate.lock_dir to a folder on "
            "a local disk."
        )
    return folder


def _default_dir() -> Path:
    # Where /run/lock is for everybody, it is so for every user alike: all of them choose the same folder.
    shared = Path("/run/lock")
    with contextlib.suppress(OSError):
        if shared.stat().st_mode & stat_modes.S_IWOTH:
            return shared / "draftmill"
    return Path("/var/tmp/draftmill")


def _filesystem(folder: Path) -> str:
    """The type of file system that the folder is on, as the kernel names it; "" where it does not say."""
    real, best, kind = str(folder.resolve()), "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            point = left.split()[4]
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, right.split()[0]
    return kind


def device_path(folder: Path, uuid: str) -> Path:
    """The lock of the GPU itself."""
    return folder / f"{uuid}.lock"


def slot_path(folder: Path, uuid: str) -> Path:
    """The lock of the right to run a job on the GPU."""
    return folder / f"{uuid}.slot"


def try_lock(path: Path) -> int | None:
    """An open file that holds the lock, or None while somebody else holds it.

    A look at the table of leases takes a lock for a moment, so a refusal counts only when it repeats.
    """
    for attempt in range(_TRIES):
        if (handle := _try_once(path)) is not None:
            return handle
        if attempt + 1 < _TRIES:
            time.sleep(_BETWEEN_S)
    return None


def _try_once(path: Path) -> int | None:
    handle = _open(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A cleaner may have removed the file in between; a lock on a nameless file excludes nobody.
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None


def _open(path: Path) -> int:
    # Without O_CREAT first: in a sticky folder the kernel refuses O_CREAT on another user's file.
    for _ in range(_TRIES):
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o666)
                os.fchmod(handle, 0o666)
                return handle
        except OSError as error:
            raise UserError(
                f"The GPU lease {path} cannot be opened ({error.strerror}); set gate.lock_dir to a folder that you may "
                "write to, or ask its owner."
            ) from None
    raise UserError(f"The GPU lease {path} is removed as fast as it is made; choose another gate.lock_dir.")


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock now."""
    if not path.exists():
        return False
    handle = try_lock(path)
    if handle is None:
        return True
    os.close(handle)
    return False


def read_record(path: Path) -> LeaseRecord | None:
    """What the lease's file says, held or not; None when it says nothing whole."""
    for _ in range(_TRIES):
        try:
            text = path.read_text()[:_RECORD_BYTES]
            return LeaseRecord.from_json(json.loads(text)) if text.strip() else None
        except OSError:
            return None
        except ValueError:
            time.sleep(_BETWEEN_S)
    return None


def write_record(handle: int, record: LeaseRecord) -> None:
    """Write the record into the lease that is held through `handle`."""
    data = json.dumps(record.to_json()).encode() + b"\n"
    os.ftruncate(handle, 0)
    os.pwrite(handle, data, 0)


def new_record(
    uuids: tuple[str, ...], run_id: str | None, stage: str | None, shard: str | None, owner: Process | None
) -> LeaseRecord:
    """A job's record by this process, its `uuid` still empty (`for_gpu` fills it in)."""
    me = processes.myself()
    return LeaseRecord(
        uuid="",
        uuids=uuids,
        kind="job",
        holder=me,
        owner=owner or me,
        token=os.urandom(8).hex(),
        uid=os.getuid(),
        host=socket.gethostname(),
        boot_id=processes.boot_id(),
        pid_ns=processes.pid_namespace(),
        run_id=run_id,
        stage=stage,
        shard=shard,
        acquired_at=now(),
    )


def for_gpu(record: LeaseRecord, uuid: str) -> LeaseRecord:
    """The record as it stands in the lease of one of its GPUs."""
    return replace(record, uuid=uuid)


def now() -> str:
    """The present instant in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Occupant:
    """Who holds a GPU: `record` is None when the lease is held and its record cannot be read."""

    uuid: str
    record: LeaseRecord | None

    @property
    def orphaned(self) -> bool:
        """The lease is held by what a dead holder started."""
        return self.record is not None and not self.record.holder_alive()

    @property
    def server(self) -> bool:
        """It is held by an attested, living server of this user."""
        r = self.record
        return r is not None and r.kind == "server" and r.attested and r.uid == os.getuid() and not self.orphaned

    def describe(self) -> str:
        """The holder in words."""
        r = self.record
        if r is None:
            return "held by a run that left no record"
        what = " ".join(filter(None, (r.kind, r.stage, r.shard)))
        return f"{what}, pid {r.holder.pid} of {processes.user_name(r.uid)}, run {r.run_id or 'by hand'}"


def occupant(folder: Path, uuid: str) -> Occupant | None:
    """Who holds the GPU now, or None when its lease is free."""
    path = device_path(folder, uuid)
    return Occupant(uuid, read_record(path)) if is_held(path) else None


def current(folder: Path, uuid: str) -> LeaseRecord | None:
    """The record of the job that runs on the GPU, else of the server that holds it, else None."""
    for path in (slot_path(folder, uuid), device_path(folder, uuid)):
        if is_held(path):
            return read_record(path)
    return None


def known_gpus(folder: Path) -> Iterator[str]:
    """UUIDs that ever had a lease here."""
    for path in sorted(folder.glob("*.lock")):
        yield path.name.removesuffix(".lock")
