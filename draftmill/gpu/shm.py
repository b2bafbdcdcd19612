"""What engines leave in /dev/shm, and how much of it is free.

Engines are torn down by SIGKILL, so nothing unlinks their shared memory; a host that runs long fills up, and the next
engine dies of SIGBUS. Names with the creator's pid in them can be proven to be left behind; the others are only named.
"""

import contextlib
import os
import re
import stat as stat_modes
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from draftmill.gpu import processes
from draftmill.gpu.record import ShmFile, ShmRecord

SHM = Path("/dev/shm")
# The group, where there is one, is the pid of the process that made the file.
_PATTERNS = (
    re.compile(r"sgl_shm_\w+?_(\d+)_[0-9a-f]{8}"),
    re.compile(r"multi_tokenizer_args_(\d+)"),
    re.compile(r"torch_(\d+)_\w+"),
    re.compile(r"sem\.loky-(\d+)-\w+"),
    re.compile(r"sglang_loads_.*\.shm"),
    re.compile(r"psm_[0-9a-f]+"),
    re.compile(r"nccl-\w+"),
    re.compile(r"nccl-shm-.*"),
    re.compile(r"sem\.mp-\w+"),
)


@dataclass(frozen=True)
class Name:
    """A file name that an engine gives: the creator's pid, or None where the name does not hold it."""

    creator_pid: int | None


def recognise(name: str) -> Name | None:
    """What the name says, or None when it is no engine's."""
    for pattern in _PATTERNS:
        if (match := pattern.fullmatch(name)) is not None:
            return Name(int(match[1]) if match.groups() else None)
    return None


def look(folder: Path = SHM, every: bool = False) -> ShmRecord:
    """Free bytes, and the engines' files of which the creator is dead or not known (or `every` one)."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return ShmRecord()
    files = [file for name in sorted(os.listdir(folder)) if (file := _file(folder, name)) is not None]
    left = tuple(file for file in files if every or not file.creator_alive)
    return ShmRecord(free_bytes=space.f_bavail * space.f_frsize, leftovers=left)


def _file(folder: Path, name: str) -> ShmFile | None:
    known = recognise(name)
    if known is None:
        return None
    try:
        found = (folder / name).lstat()
    except OSError:
        return None
    if not stat_modes.S_ISREG(found.st_mode):
        return None
    pid = known.creator_pid
    alive = None if pid is None else processes.identify(pid) is not None
    return ShmFile(
        name=name,
        bytes=found.st_size,
        uid=found.st_uid,
        mtime=found.st_mtime,
        creator_pid=pid,
        creator_alive=alive,
    )


def provably_left(file: ShmFile, own_pids: bool) -> bool:
    """Whether the file is this user's and its creator, named in it, is dead.

    `own_pids` says that pids in names are pids of this namespace: with a /dev/shm shared between containers
    (`--ipc=host`) the creator may live where it cannot be seen.
    """
    return own_pids and file.uid == os.getuid() and file.creator_alive is False


def used(file: ShmFile, spared: Collection[int], folder: Path = SHM) -> bool:
    """Whether a living process has the file open or mapped, as far as it may be looked at; `spared` do not count."""
    path = folder / file.name
    users = {process.pid for process in processes.holders_of(path)}
    users |= {found.pid for found in processes.all_processes() if _maps(found.pid, str(path))}
    return bool(users - set(spared))


def _maps(pid: int, path: str) -> bool:
    try:
        lines = (Path("/proc") / str(pid) / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.endswith(path) for line in lines)


def remove(file: ShmFile, folder: Path = SHM) -> bool:
    """Unlink the file if it is still the one that was looked at."""
    path = folder / file.name
    with contextlib.suppress(OSError):
        found = path.lstat()
        if found.st_uid == os.getuid() and found.st_mtime == file.mtime and found.st_size == file.bytes:
            path.unlink()
            return True
    return False
